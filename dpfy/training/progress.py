"""The progress bar of a run: steps made, and the epsilon of a run that had stopped there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dpfy.plan.recipe import Plan

MARKS = 20


def marks(steps: int) -> set[int]:
    """The steps after which something is written down: twenty of them, the last included."""
    return {round(steps * k / MARKS) for k in range(1, MARKS + 1)}


@contextmanager
def bar(plan: Plan, done: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, moved by calling what it gives with the number of steps made; silent when not wanted."""
    if not wanted:
        yield lambda step: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[spent]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task("training", total=plan.recipe.steps, completed=done, spent="")
        marked = marks(plan.recipe.steps)

        def show(step: int) -> None:
            shown.update(task, completed=step)
            if step in marked:
                shown.update(task, spent=f"epsilon {plan.epsilon_after(step):.3f}")

        yield show
