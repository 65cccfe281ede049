"""Mistakes around the loop: models that mix examples, resumption, correlated noise, and a bill for
another neighbour.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from dpfy.audit.bench import Bug
from dpfy.core.unit import Adjacency

CORRELATED = "correlated noise"
SPENT = "spent"


def redrawing() -> Callable[[Any], Any]:
    """A stream that draws from a new generator whenever it is made again: a resumed run releases a
    step with other noise.
    """
    times = itertools.count()
    return lambda stream: dataclasses.replace(stream, name=f"noise {next(times)}")


def no_restart(strategy: Any) -> Any:
    """The tree goes on over epochs for which restarts were billed."""
    if getattr(strategy, "restart", 0):
        return dataclasses.replace(strategy, restart=0, completion=False)
    return strategy


def forgive(training: Any) -> None:
    """Forget that a step failed behind its noise, and that its sum was bound."""
    training._status.reason = None
    training.private_step.journal.next = training.steps_done


def lose_journal(training: Any) -> None:
    """Forget which sums the noise of the last steps was made for."""
    training.private_step.journal._made = {}
    training.isolation._expected = None


def look_away(training: Any) -> None:
    """Watch neither weights nor optimizer."""
    training._guard.check = lambda: None


def settings_ignored(training: Any) -> None:
    """Compare the optimizer's settings with no schedule."""
    training.settings.check = lambda step: None


def forgotten(name: str) -> Callable[[Any], Any]:
    """Operations that `name` marks are left out of the replay: values that were read, or shapes
    made by values.
    """

    def part(needed: Any) -> Any:
        def without(program: Any, keep: Any) -> Any:
            whole, unmarked = (
                program.operations,
                [dataclasses.replace(o, **{name: False}) for o in program.operations],
            )
            back = {id(new): old for new, old in zip(unmarked, whole, strict=True)}
            program.operations = unmarked
            try:
                return [back[id(operation)] for operation in needed(program, keep)]
            finally:
                program.operations = whole

        return without

    return part


BUGS = (
    Bug(
        "weights-written",
        "weights are written from the data between steps",
        "beside",
        after_entry=look_away,
    ),
    Bug(
        "settings-not-compared",
        "the optimizer's settings are set between steps and compared with no schedule",
        "beside",
        after_entry=settings_ignored,
    ),
    Bug(
        "noise-after-error",
        "the noise of a step is used again after an error that the loop survives",
        SPENT,
        after_error=forgive,
    ),
    Bug(
        "noise-after-crash",
        "the noise of a step is used again by a resumed run with another loss",
        SPENT,
        after_entry=lose_journal,
    ),
    Bug("batchnorm", "BatchNorm left in the model", "batch statistics", batchnorm=True),
    Bug(
        "shapes-not-replayed",
        "shapes made by values are left out of the replay",
        "isolation",
        replayed=forgotten("shaped"),
    ),
    Bug(
        "reads-not-replayed",
        "values that C++ reads are left out of the replay",
        "isolation",
        replayed=forgotten("read"),
    ),
    Bug(
        "resume-redraws",
        "a resumed run draws other noise for the same step",
        "resumed",
        stream=redrawing(),
    ),
    Bug(
        "correlated-reset",
        "correlated noise whose state is reset on resuming",
        CORRELATED,
        restored=lambda saved, fresh: fresh,
    ),
    Bug("tree-no-restart", "the tree's restart is forgotten", CORRELATED, strategy=no_restart),
    Bug(
        "bill-replace-one",
        "the bill says replace-one, the noise is for add-or-remove-one",
        "replace-one audit",
        billed=Adjacency.ADD_OR_REMOVE_ONE,
    ),
)
