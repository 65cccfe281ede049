"""Recipes for federations whose clients nobody can sample: they check in when they can, and rest
between two participations.
"""

from __future__ import annotations

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Adjacency, Separated, Unit
from dpfy.federated.clients import CLIENT
from dpfy.gradients.clip import FlatClip
from dpfy.noise.strategy import Strategy
from dpfy.noise.toeplitz import Banded
from dpfy.plan.recipe import FLOAT, Recipe
from dpfy.sampling.samplers import CheckInSampler

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
