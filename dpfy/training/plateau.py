"""When to end a run that may end early: a rule over figures of public data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.plan.recipe import Plan

Rows = Sequence[Mapping[str, Any]]
Rule = Callable[[Rows], bool]
"""Whether to end the run, given a row of metrics.jsonl for each point reached so far, the last one
now.
"""


@dataclass(frozen=True)
class Plateau:
    """End a run when `metric` has not improved by more than `least` at any of the last `patience`
    points.

    A metric is better when smaller if its name ends in "loss" or "error", and when larger
    otherwise. What it is measured on must be public: :func:`dpfy.fit` measures test_loss and
    test_accuracy on test data declared so.
    """

    metric: str = "test_loss"
    patience: int = 1
    least: float = 0.0

    def __post_init__(self) -> None:
        check.one_line("plateau.metric", self.metric)
        check.integer("plateau.patience", self.patience)
        check.nonnegative("plateau.least", self.least)

    def __call__(self, rows: Rows) -> bool:
        """Whether the last points brought nothing."""
        if rows and self.metric not in rows[-1]:
            known = ", ".join(key for key in rows[-1] if key != "step") or "nothing"
            raise InvalidInput(
                "plateau.metric",
                self.metric,
                f'is not among what is measured at a point ({known}); give test_is="public"',
            )
        sign = -1.0 if self.metric.endswith(("loss", "error")) else 1.0
        values = [
            sign * float("inf" if row[self.metric] == "infinity" else row[self.metric])
            for row in rows
        ]
        before, last = values[: -self.patience], values[-self.patience :]
        return bool(before) and max(last) <= max(before) + self.least


def check_rule(stop: Rule | None, plan: Plan) -> None:
    """Refuse a rule for a plan that must make all of its steps."""
    if stop is not None and (not callable(stop) or plan.recipe.stopping is None):
        rule = (
            "must be a function of rows of metrics, and the plan one that may end early: "
            "dpfy.dpsgd(..., stopping=5)"
        )
        raise InvalidInput("stop", getattr(stop, "__name__", type(stop).__name__), rule)
