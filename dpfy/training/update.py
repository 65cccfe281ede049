"""What happens to the private gradient: post-processing, so none of it costs privacy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dpfy.core import check
from dpfy.training.averaging import Averaging


@dataclass(frozen=True)
class Update:
    """Averaging of the weights and a learning-rate schedule (a factor by step, a pure function, so that a resumed run repeats it)."""

    average: float = 0.0
    schedule: Callable[[int], float] | None = None

    def __post_init__(self) -> None:
        check.fraction("average", self.average)

    @property
    def averaging(self) -> Averaging:
        """The averaging rule."""
        return Averaging(self.average)
