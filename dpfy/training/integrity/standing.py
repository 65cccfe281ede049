"""Where a training stands, for all to read and for the run alone to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.gradients.clip import Clip
from dpfy.plan.recipe import Plan
from dpfy.training import metrics
from dpfy.training.integrity import publication, state
from dpfy.training.integrity.halt import Halt
from dpfy.training.integrity.settings import Settings
from dpfy.training.integrity.state import TrainState
from dpfy.training.logical import LogicalBatch
from dpfy.training.parallel.read_only_run import Follower
from dpfy.training.parallel.world import World
from dpfy.training.run import TRAINING, RunFolder


class Standing:
    """The views of a training. Once it is entered its fields are read-only, and it cannot be
    copied.
    """

    _state: TrainState
    _pieces: LogicalBatch | None
    _entered: bool
    _entry: int
    _seen: publication.Seen
    _halt: Halt
    _saved: int
    settings: Settings
    device: torch.device
    plan: Plan
    folder: RunFolder | Follower
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
        and source, as stated by the caller. What is recognised as computed from a recent batch is
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
        with self._halt.final():
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
