"""Whether a run may go on in this process. What stops it, stops it for good: who catches the error
cannot make another step.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dpfy.core.errors import Unsupported
from dpfy.core.randomness import require_same_process

if TYPE_CHECKING:
    from dpfy.plan.stopping import Stopping
    from dpfy.training.loop import PrivateTraining

RESUME = (
    "resume it with Run(path, resume=True) (dpfy train --resume), the same code and the same "
    "arguments"
)


class Halt:
    """Why a run goes no further here; `reason` is None while it may."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._process = os.getpid()

    @property
    def elsewhere(self) -> bool:
        """Whether this is a fork of the process that entered the run: it leaves everything as it
        is.
        """
        return os.getpid() != self._process

    @contextmanager
    def final(self) -> Iterator[None]:
        """Whatever is refused inside stops the run."""
        try:
            yield
        except BaseException as error:
            self.reason = str(error) or type(error).__name__
            raise

    def require_live(self) -> None:
        """Refuse to go on with a run that stopped, or in a fork: two processes would make the same
        noise.
        """
        require_same_process(self._process, "this run")
        if self.reason is not None:
            raise Unsupported(
                f"going on with a run that stopped ({self.reason})", f"leave the block; {RESUME}"
            )


def leave(training: PrivateTraining, stopped: str | None, error: BaseException | None) -> None:
    """Leave a run before its end and say in which state it is: by a warning, or by a note on the
    error that ends it. `stopped` says why it may not go on here, if it may not.

    Guarantees: a run of which nothing was released, left by `break` or after an error that the
    caller caught, is undone: its secret destroyed, then its reservations given back. One that
    released something keeps a checkpoint of where it is, unless it was stopped.
    """
    folder, begun = training.folder, training.folder.begun
    if isinstance(error, Exception) and not begun:
        return  # undone when the folder is let go
    if error is None and not begun and folder.fresh:
        folder.abandon()
        words = (
            f"run {folder.path}: left before its first step: nothing was released, its reservation "
            f"was given back"
        )
        warnings.warn(words, stacklevel=3)
        return
    unsaved = stopped
    try:
        if unsaved is None and not _saves_itself(training):
            training.save()
    except Exception as problem:
        if error is None:
            raise
        unsaved = str(problem)
    if training.last_step < training.plan.recipe.steps:
        words = (
            f"run {folder.path}: ended after {training.last_step} steps, but its card is not "
            f"written; {RESUME}"
        )
    else:
        words = unfinished(
            folder.path,
            training.steps_done,
            training.plan.recipe.steps,
            unsaved,
            training.plan.recipe.stopping,
        )
    if error is None:
        warnings.warn(words, stacklevel=3)
    else:
        error.add_note(words)


def _saves_itself(training: PrivateTraining) -> bool:
    """Whether the caller's loop may still add a metric to the last step, or wants checkpoints when
    it says so alone.

    Then the last checkpoint stands: the steps after it are made again, as they were.
    """
    return (
        training.boundary and training.schedules.waiting
    ) or training.folder.run.checkpoint_every == math.inf


def unfinished(
    path: object, done: int, steps: int, unsaved: str | None, stopping: Stopping | None = None
) -> str:
    """What is said of a run that is left before its end: where it stands, what it costs, what it
    keeps and how it goes on.
    """
    words = f"run {path}: unfinished, {done} of {steps} steps made, all {steps} billed; "
    words += f"its secrets are kept in its checkpoint folder; {RESUME}"
    if stopping is not None and unsaved is None:
        words += f"; or end it here with finish(), billed for {stopping.next(done)} steps"
    return words + (f" (from its last checkpoint: {unsaved})" if unsaved else "")
