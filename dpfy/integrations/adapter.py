"""What the adapters to other tools share: the end of a run that a tool drives, its epochs, and what
it may log or measure on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Subset

from dpfy.core import errors
from dpfy.core.errors import InvalidInput
from dpfy.plan import recipe as recipes
from dpfy.plan.recipe import Recipe
from dpfy.training.integrity.publication import CLOSE
from dpfy.training.loop import PrivateTraining
from dpfy.training.step import adopt


def steps_per_epoch(recipe: Recipe) -> int:
    """Steps in what tools call an epoch: records over batch, rounded up; at most all of them. The
    last epoch has the steps that are left: a plan rounds once, for the whole run.
    """
    return min(recipe.steps, recipes.steps_per_epoch(recipe.records, recipe.expected_batch))


def epoch_count(recipe: Recipe) -> int:
    """Passes over the loader that make all steps of the plan."""
    return -(-recipe.steps // steps_per_epoch(recipe))


def epoch_at(recipe: Recipe, step: int) -> float:
    """Epochs that are over after `step` steps; the parts of the last one count by the steps that a
    whole one would have there.
    """
    each = recipes.steps_per_epoch(recipe.records, recipe.expected_batch)
    count = epoch_count(recipe)
    before = (count - 1) * each
    if step <= before:
        return step / each
    whole = math.ceil(count * recipe.records / recipe.expected_batch * (1 - recipes.ROUNDING))
    return count - 1 + (step - before) / max(recipe.steps - before, min(each, whole - before))


def check_epochs(name: str, value: float, recipe: Recipe) -> None:
    """Refuse a number of epochs with which the run would not end where the plan does."""
    short = recipe.steps - value * recipe.records / recipe.expected_batch * (1 - recipes.ROUNDING)
    if value == epoch_count(recipe) or 0 <= short < 1:
        return
    rule = (
        f"the plan has {recipe.steps} steps, {steps_per_epoch(recipe)} in an epoch: give "
        f"{name}={epoch_count(recipe)}, or make another plan"
    )
    raise InvalidInput(name, value, rule)


def check_accumulation(name: str, value: object, knob: str) -> None:
    """Refuse accumulation by the tool: a step of the plan is one batch, which the run makes of
    physical ones.
    """
    if value != 1:
        rule = (
            "a batch of the plan is one step, and the run accumulates it: leave it 1, and say by "
            f"{knob} how many examples are computed at once"
        )
        raise InvalidInput(name, value, rule)


def finish(training: PrivateTraining) -> None:
    """Write model and report and give the model the released weights. A run that stops early is
    charged as its plan says, and says so.

    Guarantees: those of :meth:`PrivateTraining.finish`: a plan with points for that is charged up to
    the next of them, any other whole.
    """
    done, steps, stopping = (
        training.steps_done,
        training.plan.recipe.steps,
        training.plan.recipe.stopping,
    )
    training.finish()
    adopt(training.average, training.model)
    if done == steps:
        return
    billed = steps if stopping is None else stopping.next(done)
    way = (
        "; a plan can say where a run may end: dpfy.dpsgd(..., stopping=5)"
        if stopping is None
        else ""
    )
    errors.warn(
        f"run {training.folder.path}: ended after {done} of {steps} steps, {billed} charged{way}"
    )


def share_records(train: Any, other: Any) -> bool:
    """Whether two data sets, or loaders of them, have a record in common, as far as that is seen:
    one data set, or parts of one.

    Data to measure on must not be the training data: anyone who declares it public would publish what
    is measured on private records.
    """
    (mine, of_mine), (theirs, of_theirs) = _origin(train), _origin(other)
    if mine is None or mine is not theirs:
        return False
    return of_mine is None or of_theirs is None or not set(of_mine).isdisjoint(of_theirs)


def _origin(data: Any) -> tuple[Any, Sequence[int] | None]:
    """The data set that records come from, and their numbers there; None for all of them."""
    data, indices = getattr(data, "dataset", data) if not isinstance(data, Subset) else data, None
    while isinstance(data, Subset):
        indices = [data.indices[i] for i in indices] if indices is not None else list(data.indices)
        data = data.dataset
    return data, indices


def metric_name(name: str) -> str:
    """The name of a metric as a run records it: val/loss is val_loss."""
    return re.sub(r"\W", "_", name)


def finite_metrics(found: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of `found`, by the names that a run records."""
    return {
        metric_name(name): float(value)
        for name, value in found.items()
        if math.isfinite(float(value))
    }


class LossTotals:
    """Sums of losses over the physical batches of an epoch, or of a run, as training scripts add them
    up to log them.

    They are private: `check` recognises where somebody publishes their sum or mean.
    """

    def __init__(self) -> None:
        self._means: Tensor | float = 0.0
        self._losses: Tensor | float = 0.0
        self._batches = self._rows = 0

    def add(self, total: Tensor, rows: int) -> None:
        """Take the sum of the losses of a batch of so many rows."""
        self._means, self._losses = self._means + total / rows, self._losses + total
        self._batches, self._rows = self._batches + 1, self._rows + rows

    def check(self, name: str, value: float, steps: int) -> None:
        """Refuse a sum of the losses, or of the means of batches, and their means over records,
        batches or the `steps` of an epoch.
        """
        if not self._batches or not math.isfinite(value) or value == 0:
            return
        seen = [
            float(total) / part
            for total in (self._means, self._losses)
            for part in (1, self._batches, self._rows, steps)
        ]
        if any(math.isclose(value, one, rel_tol=CLOSE) for one in seen):
            rule = "is private: evaluate on public data, or keep it out of the logs"
            raise InvalidInput(name, "the mean or sum of losses of the training batches", rule)
