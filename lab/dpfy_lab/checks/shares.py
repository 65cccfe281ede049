"""Checks of noise in shares, from outside: what sums of rounds show about how many shares of noise
are in them, and how far one client's message can move a sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dpfy.core import events
from dpfy.core.randomness import Randomness
from dpfy.federated.shares.aggregator import TooFew, TrustedSum
from dpfy.federated.shares.scheme import SharingScheme
from dpfy.noise.shares import Shares
from dpfy_lab.selftest.mistake import Found, check
from dpfy_lab.share_audit import shares_seen

Array = NDArray[np.float64]
SECRET, ROUNDS, SIGMAS = Randomness.for_tests(43), 24, 5.0
SCHEME = SharingScheme(
    Shares(dimension=1000, clients=24, least=16, bits=16, scaled=40.0, rotation=5), 2.7, 1.5
)
"""A clipping norm of 40 steps in 1,024 coordinates: rounding makes vectors longer by a tenth, so
that who forgets it is seen. 16 of the 24 clients survive.
"""
EVENT = SCHEME.event
assert isinstance(EVENT, events.DistributedDiscreteGaussian)
SHARE, SHARES = EVENT.share * SCHEME.step, EVENT.shares
"""What is billed of a round: the deviation of a share in units of the vectors, and their number."""


def _total(vectors: Array, round: int) -> NDArray[np.uint64]:
    """The sum of the messages of all survivors."""
    sent = {c: SCHEME.encode(vector, SECRET, c, round) for c, vector in enumerate(vectors)}
    least = SCHEME.shares.least
    return TrustedSum().sum(sent, bits=SCHEME.bits, least=least, round=round).total


@check("shares of noise")
def NOISE() -> Found:
    """Rounds with as few survivors as allowed, on vectors of zero: their noise is that of as many
    shares as are billed, and fresh in every round.
    """
    zeros = np.zeros((SHARES, SCHEME.shares.dimension))
    sums = np.array([SCHEME.centred(_total(zeros, r)) * SCHEME.step for r in range(ROUNDS)])
    seen = shares_seen(sums, SHARE)
    if said := seen.why_not(SHARES):
        return said
    if seen.low > SHARES:
        return (
            f"the noise of a sum is that of {seen.shares:.2f} shares, where {SHARES} clients "
            f"answered"
        )
    echo = float((sums[1:] * sums[:-1]).mean() / (sums**2).mean() * math.sqrt(sums[1:].size))
    return None if abs(echo) < SIGMAS else "the noise of one round is that of the next"


@check("sums of vectors")
def SUMS() -> Found:
    """What comes out is the sum of the clipped vectors and the noise, and nothing else."""
    rng, dimension = np.random.default_rng(6), SCHEME.shares.dimension
    sums, truth = np.empty((ROUNDS, dimension)), np.empty((ROUNDS, dimension))
    for round in range(ROUNDS):  # vectors that nearly agree
        vectors = 0.3 * rng.normal(size=(SHARES, dimension)) + rng.normal(size=dimension)
        vectors *= SCHEME.clip / np.linalg.norm(vectors, axis=1, keepdims=True)
        sums[round] = SCHEME.decode(_total(vectors, round), round)
        truth[round] = vectors.sum(0)
    noise, size = math.sqrt(SHARES) * SHARE, float(np.sum(truth**2))
    part = float(np.sum(sums * truth)) / size
    if abs(part - 1) > SIGMAS * 1.1 * noise / math.sqrt(size):
        return f"sums hold {part:.2f} of what was added to them"
    left = math.sqrt(float(np.mean((sums - truth) ** 2)))
    return None if left < 1.1 * noise else f"sums are off by {left / noise:.2f} times their noise"


def _difficult() -> Iterator[tuple[str, Array]]:
    """Vectors that a client might have."""
    size, coordinates = SCHEME.shares.dimension, SCHEME.shares.coordinates
    even = np.full(coordinates, SCHEME.clip / math.sqrt(coordinates))
    spread, one = SCHEME._rotation(0).inverse(even), np.zeros(size)
    one[3] = 1e9
    yield "spread", spread
    yield "one number", one
    yield "not a number", np.full(size, np.nan)
    yield "long", 50 * spread


@check("length of messages")
def LENGTHS() -> Found:
    """One client's message moves, by whatever vector it has, by no more than is billed."""
    zero, most = np.zeros(SCHEME.shares.dimension), SCHEME.shares.squared
    for what, vector in _difficult():
        with_it, without = (SCHEME.centred(SCHEME.encode(v, SECRET, 0, 0)) for v in (vector, zero))
        apart = SCHEME.centred(SCHEME.wrapped(with_it - without)).astype(np.float64)
        if (squared := float(apart @ apart)) > most:
            return (
                f"a client moves the sum by {math.sqrt(squared / most):.2f} times what is charged "
                f"({what})"
            )
    return None


@check("survivors")
def SURVIVORS() -> Found:
    """A round with one survivor less than is billed shows nothing."""
    left = SCHEME.shares.least - 1
    try:
        _total(np.zeros((left, SCHEME.shares.dimension)), 0)
    except TooFew:
        return None
    return f"a round with {left} clients was released, where {left + 1} are charged"


CHECKS = (NOISE, SUMS, LENGTHS, SURVIVORS)
