"""Who took part in which round, and who may take part in the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Participations:
    """The cohorts of all rounds so far, of `clients` numbered clients. Who was admitted took part,
    also if it sent nothing.
    """

    clients: int
    rounds: Sequence[Sequence[int]]

    def eligible(self, step: int, separation: int, most: int) -> NDArray[np.int64]:
        """Who may take part in round `step`: the last time is `separation` rounds ago or more, and
        there were fewer than `most`.
        """
        last = np.full(self.clients, -separation, dtype=np.int64)
        often = np.zeros(self.clients, dtype=np.int64)
        for made, cohort in enumerate(self.rounds):
            last[list(cohort)] = made
            often[list(cohort)] += 1
        return np.flatnonzero((step - last >= separation) & (often < most))


@dataclass(frozen=True)
class OwnTimes:
    """Arrivals of a simulation: each device is there around a time of its own, and a round takes
    the first `cohort` that may take part.

    Some come often and some hardly ever; nothing about it is secret or random, and nothing is
    claimed for it.
    """

    cohort: int
    seed: int = 0

    def __call__(self, step: int, may: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the clients that may take part who are there first."""
        devices = int(may.max(initial=-1)) + 1
        habit = np.random.default_rng([self.seed, 1]).random(devices)
        late = np.random.default_rng([self.seed, 2, step]).random(devices)
        waits = (habit + 0.381966 * step) % 1.0 + late
        return np.sort(may[np.argsort(waits[may], kind="stable")[: self.cohort]])
