"""Where a training stands, for all to read and for the run alone to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.gradients.clip import Clip
from dpfy.plan.recipe import Plan
from dpfy.training import metrics, public, state
from dpfy.training.follower import Follower
from dpfy.training.logical import LogicalBatch
from dpfy.training.run import TRAINING, RunFolder
from dpfy.training.state import TrainState
from dpfy.training.world import World


class Standing:
    """The views of a training. Once it is entered its fields are read-only, and it cannot be copied."""

    _state: TrainState
    _pieces: LogicalBatch | None
    _entered: bool
    _entry: int
    _losses: Tensor | None
    device: torch.device
    plan: Plan
    folder: RunFolder | Follower
    world: World

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
        """The steps after which the run ends: those of its plan, or those after which it was ended early, to which a resumed run keeps."""
        ended = self.folder.ledger.settlements.get(TRAINING) if self._entered else None
        return self.plan.recipe.steps if ended is None else ended[0]

    @property
    def boundary(self) -> bool:
        """Whether the last `step` ended a logical batch: noise was added and the optimizer has moved."""
        return self._pieces is None and self._entered and self.steps_done > self._entry

    @property
    def kept(self) -> dict[str, Any]:
        """What the caller's own loop wants to find again in a resumed run: plain values by name, stored in every checkpoint."""
        return self._state.kept

    def require_public(self, values: Mapping[str, object]) -> None:
        """Refuse what is no plain number under a word, and losses of the batch where they are recognised."""
        for name, value in values.items():
            public.check_number(f"record {name}", value, self._losses)

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
            raise InvalidInput(f"training.{name}", type(value).__name__, "is read-only: the plan says what a run does")
        object.__setattr__(self, name, value)

    def __reduce_ex__(self, protocol: object) -> Any:
        """No copies: each would make the noise of the same steps for sums of its own."""
        raise Unsupported("a copy of a private training", "copy the model, or begin another run")
