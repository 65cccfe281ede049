"""The end of a run that a tool drives: complete, or where a callback or a `break` stopped it."""

from __future__ import annotations

import warnings

from dpfy.training import update
from dpfy.training.loop import PrivateTraining


def finish(training: PrivateTraining) -> None:
    """Write model and card and give the model the released weights. A run that stops early is
    billed as its plan says, and says so.

    Guarantees: those of :meth:`PrivateTraining.finish`: a plan with points for that is billed up to
    the next of them, any other whole.
    """
    done, steps, stopping = (
        training.steps_done,
        training.plan.recipe.steps,
        training.plan.recipe.stopping,
    )
    training.finish()
    update.adopt(training.average, training.model)
    if done == steps:
        return
    billed = steps if stopping is None else stopping.next(done)
    way = (
        "; a plan can say where a run may end: dpfy.dpsgd(..., stopping=5)"
        if stopping is None
        else ""
    )
    warnings.warn(
        f"run {training.folder.path}: ended after {done} of {steps} steps, {billed} billed{way}",
        stacklevel=2,
    )
