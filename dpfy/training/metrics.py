"""What a run tells about itself while it goes: metrics.jsonl (one JSON object a line, only public
values), the progress bar, and rules over those figures that end a run early.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfy.core import check, storage
from dpfy.core.codec import number
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.plan.recipe import Plan

MARKS = 20


def marks(steps: int) -> set[int]:
    """The steps after which something is written down: twenty of them, the last included."""
    return {round(steps * k / MARKS) for k in range(1, MARKS + 1)}


def spent(plan: Plan, done: int = 0) -> dict[int, float]:
    """Epsilon after every marked step from `done` on, computed together: what cannot be told is
    refused before the first step.
    """
    return {
        step: plan.epsilon_after(step) for step in sorted(marks(plan.recipe.steps)) if step >= done
    }


@contextmanager
def bar(plan: Plan, done: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, moved by calling what it gives with the number of steps made."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    epsilons = spent(plan, done)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[spent]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task("training", total=plan.recipe.steps, completed=done, spent="")

        def show(step: int) -> None:
            shown.update(task, completed=step)
            if step in epsilons:
                shown.update(task, spent=f"epsilon {epsilons[step]:.3f}")

        yield show


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
                f"is not among what is measured at a point ({known}); give evaluation=dpfy.PublicTest(data)",
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


FILE = "metrics.jsonl"


def rows(folder: Path) -> list[dict[str, Any]]:
    """All whole rows so far; a last line that a crash cut short does not count."""
    file = folder / FILE
    if not file.is_file():
        return []
    lines = storage.text(FILE, file).splitlines(keepends=True)
    found = [storage.parsed_json(FILE, line) for line in lines if line.endswith("\n")]
    if not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in found):
        raise Corrupt(FILE, "holds a line that is no row of metrics")
    return found


def last_step(folder: Path) -> int:
    """The step of the last row, 0 if there is none."""
    found = rows(folder)
    return int(found[-1]["step"]) if found else 0


def append(folder: Path, row: dict[str, Any]) -> None:
    """Add a row."""
    storage.append(
        folder / FILE,
        (json.dumps({k: number(v) for k, v in row.items()}, allow_nan=False) + "\n").encode(),
    )


def cut(folder: Path, step: int) -> None:
    """Forget rows written after `step`: the resumed run will write them again."""
    if not (folder / FILE).is_file():
        return
    kept = [row for row in rows(folder) if row["step"] <= step]
    storage.write_atomically(
        folder / FILE, "".join(json.dumps(row) + "\n" for row in kept).encode()
    )
