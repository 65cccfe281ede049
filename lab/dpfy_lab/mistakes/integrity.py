"""Mistakes around the loop: models that mix examples, noise that is made for two sums, weights that
others write, and a claim about another neighbour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dpfy.core.unit import Adjacency
from dpfy_lab.checks.gradients import BATCH_STATISTICS
from dpfy_lab.checks.integrity import BESIDE, ISOLATION, SPENT
from dpfy_lab.checks.training import REPLACED
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch

INTEGRITY = "dpfy.training.integrity"


def nothing(real: Any, *given: Any) -> None:
    """A check that checks nothing."""


mistake(
    "weights-written",
    "weights are written from the data between steps",
    BESIDE,
    f"{INTEGRITY}.guard.Guard.check",
)(nothing)
mistake(
    "settings-not-compared",
    "the optimizer's settings are set between steps and compared with no schedule",
    BESIDE,
    f"{INTEGRITY}.settings.Settings.check",
)(nothing)


@mistake(
    "noise-after-error",
    "the noise of a step is used again after an error that the loop survives",
    SPENT,
)
def _(patch: Patch) -> None:
    def bind(real: Any, self: Any, step: int, *given: Any) -> Any:
        self.next = step
        return real(self, step, *given)

    patch.around(f"{INTEGRITY}.run_state.RunStatus.require_live", nothing)
    patch.around(f"{INTEGRITY}.journal.Journal.bind", bind)


@mistake(
    "noise-after-crash",
    "the noise of a step is used again by a resumed run with another loss",
    SPENT,
)
def _(patch: Patch) -> None:
    patch.around(f"{INTEGRITY}.journal.Journal._repeated", nothing)
    patch.around("dpfy.isolation.run_fingerprint.difference", nothing)


@mistake(
    "batchnorm",
    "BatchNorm left in the model",
    BATCH_STATISTICS,
    "dpfy.gradients.checker.check_model",
)
def _(real: Any, model: Any) -> None:
    pass


def not_replayed(name: str) -> Callable[..., Any]:
    """The operations that a replay needs, without those that `name` marks."""

    def needed(real: Any, self: Any, keep: Any) -> Any:
        whole = self.operations
        unmarked = [replace(operation, **{name: False}) for operation in whole]
        back = {id(new): old for new, old in zip(unmarked, whole, strict=True)}
        self.operations = unmarked
        try:
            return [back[id(operation)] for operation in real(self, keep)]
        finally:
            self.operations = whole

    return needed


NEEDED = "dpfy.isolation.program.Program.needed"
mistake(
    "shapes-not-replayed", "shapes made by values are left out of the replay", ISOLATION, NEEDED
)(not_replayed("shaped"))
mistake(
    "reads-not-replayed", "values that C++ reads are left out of the replay", ISOLATION, NEEDED
)(not_replayed("read"))


@mistake(
    "bill-replace-one",
    "the charge says replace-one, the noise is for add-or-remove-one",
    REPLACED,
    "dpfy.accounting.guarantee",
)
def _(real: Any, event: Any, **named: Any) -> Any:
    return real(event, **(named | {"adjacency": Adjacency.ADD_OR_REMOVE_ONE}))
