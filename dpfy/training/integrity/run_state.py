"""The state of a run: what it shows to all and what only the run changes, and whether it may go on in
this process. What stops it, stops it permanently: who catches the error cannot make another step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpfy.core import errors
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import require_same_process
from dpfy.core.values import Permit
from dpfy.gradients.clip import Clip
from dpfy.plan.recipe import Plan
from dpfy.training import metrics
from dpfy.training.batches import GradAccumulator
from dpfy.training.integrity import publication, state
from dpfy.training.integrity.settings import Settings
from dpfy.training.integrity.state import TrainState
from dpfy.training.parallel.read_only_run import ReadOnlyRun
from dpfy.training.parallel.world import World
from dpfy.training.run import TRAINING, TrainingRun

if TYPE_CHECKING:
    from dpfy.plan.stopping import Stopping
    from dpfy.training.loop import PrivateTraining

RESUME = (
    "resume it with Run(path, resume=True) (dpfy train --resume), the same code and the same "
    "arguments"
)


class RunStatus:
    """Why a run goes no further here; `reason` is None while it may. `permit` is the right to make
    its steps once they are charged, and `renew_at` when to say again that its folder is in use.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.permit: Permit | None = None
        self.renew_at = 0.0
        self._process = os.getpid()

    @property
    def in_fork(self) -> bool:
        """Whether this is a fork of the process that entered the run: it leaves everything as it
        is.
        """
        return os.getpid() != self._process

    @contextmanager
    def stop_on_error(self) -> Iterator[None]:
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
        errors.warn(words)
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
            f"run {folder.path}: ended after {training.last_step} steps, but its report is not "
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
        errors.warn(words)
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
    words = f"run {path}: unfinished, {done} of {steps} steps made, all {steps} charged; "
    words += f"its secrets are kept in its checkpoint folder; {RESUME}"
    if stopping is not None and unsaved is None:
        words += f"; or end it here with finish(), charged for {stopping.next(done)} steps"
    return words + (f" (from its last checkpoint: {unsaved})" if unsaved else "")


class RunState:
    """The views of a training. Once it is entered its fields are read-only, and it cannot be
    copied.
    """

    _state: TrainState
    _pieces: GradAccumulator | None
    _entered: bool
    _entry: int
    _seen: publication.Seen
    _status: RunStatus
    _saved: int
    settings: Settings
    device: torch.device
    plan: Plan
    folder: TrainingRun | ReadOnlyRun
    world: World
    _require_live: Callable[[], None]
    save: Callable[[], None]

    @property
    def state(self) -> TrainState:
        """Where the training stands: before the step that is under way, or between two steps."""
        if self._pieces is not None or not self._entered:
            return self._state
        return replace(self._state, random=state.generators(self.device))

    @property
    def steps_done(self) -> int:
        """The steps made so far."""
        return self._state.step

    @property
    def last_step(self) -> int:
        """The steps after which the run ends: those of its plan, or those after which it was ended
        early, to which a resumed run keeps.
        """
        ended = self.folder.ledger.settlements.get(TRAINING) if self._entered else None
        return self.plan.recipe.steps if ended is None else ended[0]

    @property
    def boundary(self) -> bool:
        """Whether the last `step` ended a logical batch: noise was added and the optimizer has
        moved.
        """
        return self._pieces is None and self._entered and self.steps_done > self._entry

    @property
    def kept(self) -> dict[str, Any]:
        """What the caller's own loop wants to find again in a resumed run: plain values by name,
        stored in every checkpoint.
        """
        return self._state.kept

    def record(self, *, source: str | None = None, **values: float) -> None:
        """Append a row to metrics.jsonl. Only what may be published belongs there: nothing computed
        from the training data.

        `source` declares where the values are from: "public" (measured on public data), or
        "released" (computed from released weights, the plan or the clock). The report names values
        and source, as declared by the caller. What is recognised as computed from a recent batch is
        refused all the same: see :meth:`dpfy.training.integrity.publication.Seen.check`.
        """
        self._require_live()
        said = (
            "" if publication.declared(source) == "public" else " (computed from what was released)"
        )
        self.require_public(values)
        self._state = replace(
            self._state, recorded=self._state.recorded | {f"{name}{said}" for name in values}
        )
        self._note(**values)

    def schedule(self, *, source: str | None = None, **metric: float) -> None:
        """Record one metric, as `record` does, and give it to the run's ReduceLROnPlateau, at a
        logical boundary.
        """
        if len(metric) != 1 or not self.boundary:
            raise InvalidInput(
                "schedule",
                sorted(metric),
                "takes one metric, after a step that ended a logical batch (boundary)",
            )
        self.record(source=source, **metric)
        with self._status.stop_on_error():
            self.settings.measured(*metric.popitem())
        if self._saved == self.steps_done:
            self.save()

    def require_public(self, values: Mapping[str, object]) -> None:
        """Refuse what is no plain number under a word, and what is recognised as computed from a
        recent batch.
        """
        for name, value in values.items():
            self._seen.check(f"record {name}", value)

    def require_figures(
        self, utility: Mapping[str, float], confusion: object, test: str | None
    ) -> None:
        """Refuse figures whose data nobody declared public, and those that are recognised as
        computed from a recent batch.
        """
        if (utility or confusion) and test is None:
            rule = (
                'say test="public" if the data they were measured on is public: they are published '
                "as they are"
            )
            raise InvalidInput("utility", "figures of data that nothing is said of", rule)
        for value in chain.from_iterable(confusion) if isinstance(confusion, list) else ():
            publication.require_unread("confusion", value)
        if test == "public":
            for name, value in utility.items():
                self._seen.check(name, value)

    def _note(self, **values: float) -> None:
        if self.world.first:
            metrics.append(self.folder.path, {"step": self.steps_done, **values})

    @property
    def clip(self) -> Clip:
        """The clip rule of the next step."""
        return self._state.clip

    @property
    def average(self) -> Mapping[str, Tensor]:
        """The averaged weights; none if there is no averaging."""
        return self._state.average

    def __setattr__(self, name: str, value: object) -> None:
        """The fields of a run that was entered are read-only."""
        view = isinstance(getattr(type(self), name, None), property)
        if view or (self.__dict__.get("_entered") and not name.startswith("_")):
            raise InvalidInput(
                f"training.{name}",
                type(value).__name__,
                "is read-only: the plan says what a run does",
            )
        object.__setattr__(self, name, value)

    def __reduce_ex__(self, protocol: object) -> Any:
        """No copies: each would make the noise of the same steps for sums of its own."""
        raise Unsupported("a copy of a private training", "copy the model, or begin another run")
