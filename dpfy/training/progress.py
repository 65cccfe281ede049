"""The progress bar of a run: steps made, and the epsilon of a run that had stopped there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
