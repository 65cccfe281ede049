"""A noise stream under audit by itself: which plan or matrix is claimed, and what an attacker sees
of canaries in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpfy.audit.observation import claimed_curve, observe_stream
from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.guarantee import Curve
from dpfy.core.randomness import Randomness
from dpfy.core.unit import FixedOrder
from dpfy.noise.strategy import Identity
from dpfy.noise.stream import NoiseStream
from dpfy.noise.toeplitz import square_root_banded
from dpfy.plan.recipe import dpsgd

Array = NDArray[np.float64]
MOST_STEPS = 4096
MOST_SEEN = 2**25
"""Numbers that the attacker sees, one for each canary and step: they must fit in memory several
times.
"""


@dataclass(frozen=True)
class StreamFacts:
    """What is claimed: independent noise under Poisson sampling, or banded noise with one
    participation an epoch.
    """

    noise_multiplier: float
    rate: float = 1.0
    steps: int = 16
    epochs: int = 1
    bands: int = 1
    delta: float = 1e-5

    def __post_init__(self) -> None:
        check.noise_multiplier(
            "noise_multiplier", check.positive("noise_multiplier", self.noise_multiplier)
        )
        check.sampling_rate("sampling_rate", check.rate("sampling_rate", self.rate))
        check.integer("steps", self.steps, most=MOST_STEPS)
        check.integer("bands", self.bands, most=self.steps)
        check.delta("delta", self.delta)
        if self.steps % check.integer("epochs", self.epochs):
            raise InvalidInput(
                "epochs", self.epochs, f"must divide the number of steps ({self.steps})"
            )
        if self.bands > 1 and self.rate < 1:
            raise Unsupported(
                "auditing banded noise with sampling",
                "use sampling rate 1: a unit takes part once an epoch",
            )


@dataclass(frozen=True, repr=False)
class StreamSeen:
    """What the attacker saw, [steps, canaries] with the coins, the noise alone, and what is needed
    to judge it.

    For correlated noise `encoder` and `pattern` whiten it, and the claim is Gaussian with ratio 1 /
    noise multiplier; else `curve` is the claimed curve by strength.
    """

    facts: StreamFacts
    included: NDArray[np.bool_]
    projections: Array
    alone: Array
    scale: float
    encoder: Array | None = None
    pattern: Array | None = None
    curve: Callable[[float], Curve] | None = None


def audited(facts: StreamFacts, canaries: int, seed: int | None = None) -> StreamSeen:
    """Draw coins, run the stream on the canaries' bounded sums and once on nothing."""
    randomness = Randomness.from_os() if seed is None else Randomness.for_tests(seed)
    rng = randomness.generator("audit coins", 0)
    if check.integer("canaries", canaries, least=10, most=MOST_SEEN) * facts.steps > MOST_SEEN:
        raise InvalidInput(
            "canaries",
            canaries,
            f"times the number of steps ({facts.steps}) must be at most {MOST_SEEN}",
        )
    coins = rng.integers(2, size=canaries).astype(bool)
    return (
        _correlated(facts, coins, randomness)
        if facts.bands > 1
        else _independent(facts, coins, randomness)
    )


def _independent(
    facts: StreamFacts, coins: NDArray[np.bool_], randomness: Randomness
) -> StreamSeen:
    plan = dpsgd(10**6, facts.rate * 10**6, steps=facts.steps).with_noise(
        facts.noise_multiplier, delta=facts.delta, allow_large_delta=True
    )
    there = np.zeros((facts.steps, len(coins)))
    for step in range(facts.steps):
        rng = randomness.generator("sampling", step)
        there[step, plan.recipe.sampler.batch(step, records=len(coins), rng=rng)] = 1.0
    stream = NoiseStream(Identity(), plan.scale, randomness)
    seen, alone = observe_stream(stream, there * coins), observe_stream(_other(stream), 0 * there)
    return StreamSeen(facts, coins, seen, alone, plan.scale, curve=claimed_curve(plan))


def _correlated(facts: StreamFacts, coins: NDArray[np.bool_], randomness: Randomness) -> StreamSeen:
    strategy = square_root_banded(facts.bands)
    participation = FixedOrder(facts.steps // facts.epochs, facts.epochs)
    scale = facts.noise_multiplier * strategy.sensitivity(participation, facts.steps)
    pattern = np.zeros(facts.steps)
    pattern[:: facts.steps // facts.epochs] = 1.0
    stream = NoiseStream(strategy, scale, randomness)
    seen = observe_stream(stream, pattern[:, None] * coins)
    encoder = strategy.encoder(facts.steps)
    alone = encoder @ observe_stream(_other(stream), np.zeros((facts.steps, len(coins))))
    return StreamSeen(facts, coins, seen, alone, scale, encoder, pattern)


def _other(stream: NoiseStream) -> NoiseStream:
    """The same stream with draws of its own."""
    return NoiseStream(stream.strategy, stream.scale, stream.randomness, "noise alone")
