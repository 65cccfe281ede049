"""Recipes for federations whose clients nobody can sample: they check in when they can, and rest
between two participations.

Clients as the unit of privacy: all that one of them computes on is protected together.

Who took part in which round, and who may take part in the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Adjacency, Separated, Unit
from dpfy.gradients.clip import FlatClip
from dpfy.noise.strategy import Strategy
from dpfy.noise.toeplitz import Banded
from dpfy.plan.recipe import FLOAT, Recipe
from dpfy.sampling.samplers import CheckInSampler

CLIENT = Unit("client", protects="user")
"""One client, with all of its records, however many they are: its update is bounded as a whole."""


def check_unit(unit: Unit) -> None:
    """Refuse a plan for single examples: what is bounded, sampled and counted is a client."""
    if unit.name == "example":
        rule = (
            "a round bounds the update of a whole client: give the recipe "
            "unit=dpfy.federated.CLIENT, or the unit of by_user data"
        )
        raise InvalidInput("plan unit", unit.name, rule)


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


STRATEGIES = ("blt", "bands", "independent")


def check_in(
    clients: int,
    cohort: float,
    *,
    rounds: int,
    separation: int,
    most: int | None = None,
    strategy: str = "blt",
    buffers: int = 3,
    clip_norm: float = 1.0,
    unit: Unit = CLIENT,
    noise: str = FLOAT,
) -> Recipe:
    """DP-FTRL over clients that check in when they can (Kairouz et al. 2021): no sampling is
    assumed, and no amplification claimed.

    A client takes part at most every `separation` rounds, and at most `most` times (by default as
    often as the rounds allow); the server enforces both. `strategy`: "blt" keeps a few `buffers`,
    "bands" one for each round of a separation, "independent" is DP-FedAvg without amplification.
    `cohort` is what the sum of a round is divided by.

    Guarantees: zero-out: the contribution of one client, wherever it took part, is replaced by
    nothing. Who else checks in may depend on anything.
    """
    check.integer("clients", clients, most=check.RECORDS)
    check.integer("rounds", rounds, most=check.STEPS)
    if check.integer("separation", separation) > rounds:
        raise InvalidInput(
            "separation", separation, f"must be at most the number of rounds ({rounds})"
        )
    if check.positive("cohort", cohort) > clients / separation:
        rule = (
            f"must be at most {clients / separation:g}: {clients} clients that rest "
            f"{separation - 1} rounds give no more a round"
        )
        raise InvalidInput("cohort", cohort, rule)
    often = -(-rounds // separation)
    pattern = Separated(
        separation, often if most is None else min(check.integer("most", most), often)
    )
    sampler = CheckInSampler(cohort, separation, pattern.most)
    made = _strategy(check.one_of("strategy", strategy, STRATEGIES), pattern, rounds, buffers)
    return Recipe(
        clients, sampler, rounds, FlatClip(clip_norm), made, unit, Adjacency.ZERO_OUT, noise
    )


def _strategy(name: str, pattern: Separated, rounds: int, buffers: int) -> Strategy:
    if name == "independent":
        return Banded((1.0,))
    if name == "bands":
        from dpfy.noise.optimise import banded

        return banded(min(pattern.separation, rounds), rounds)
    from dpfy.noise.optimise import blt

    return blt(check.integer("buffers", buffers), rounds, pattern)
