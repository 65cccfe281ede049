"""What proposes settings. A search at random is built in; others ask what to try next, and are told
how it did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dpfy.tuning.space import Settings, Space
from dpfy.tuning.trial import TrialResult

RANDOM_SEARCH = "random"


class SearchEngine(Protocol):
    """Proposes settings. `adaptive` says whether what it proposes depends on earlier scores."""

    @property
    def name(self) -> str:
        """What the card calls it."""

    @property
    def adaptive(self) -> bool:
        """Whether proposals depend on scores."""

    def ask(self, number: int, rng: np.random.Generator, begun: Settings | None = None) -> Settings:
        """The settings of a trial; `begun` are those of a trial that was under way when the search
        was stopped.
        """

    def tell(self, number: int, row: TrialResult) -> None:
        """How a trial did."""

    def prune(self, number: int, score: float) -> bool:
        """Whether a trial should end, by what it tells before its end."""


@dataclass(frozen=True)
class RandomSearch:
    """Every trial draws from the space, independently of all others."""

    space: Space
    name: str = RANDOM_SEARCH
    adaptive: bool = False

    def ask(self, number: int, rng: np.random.Generator, begun: Settings | None = None) -> Settings:
        """A draw."""
        return self.space.draw(rng) if begun is None else begun

    def tell(self, number: int, row: TrialResult) -> None:
        """It does not matter."""

    def prune(self, number: int, score: float) -> bool:
        """Never."""
        return False
