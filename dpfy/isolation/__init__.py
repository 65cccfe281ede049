"""Checks that examples do not mix: in the step, in the collate function and in the data set.

:class:`dpfy.isolation.check.IsolationCheck` checks the steps of a training run: `begin` when a
batch is handed out, `end` with its losses, `require_sound` before anything is released.
:class:`dpfy.isolation.inspection.Inspection` decides which batches a reader checks.
"""
