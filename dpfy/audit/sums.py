"""Audit of noise in shares, from outside: what sums of rounds show about how many shares of noise
are in them.

Clients answer some rounds with nothing (a rehearsal: vectors of zero), so that what comes out is
noise alone. Its variance over that of one share is how many there are: a client that adds none,
noise that is drawn once for all, shares sized for those who dropped out show. Messages of one
client with and without a vector show what it adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpfy.core import check
from dpfy.core.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpfy.audit.bench import Bench, Bug

    Array = NDArray[np.float64]

SIGMAS = 5.0


@dataclass(frozen=True)
class SharesEstimate:
    """How many shares of noise sums show: an estimate, and the least and the most at
    `confidence`.
    """

    low: float
    shares: float
    high: float
    confidence: float

    def why_not(self, least: int) -> str | None:
        """None where so many shares may be there; else what is missing."""
        if self.high >= least:
            return None
        return (
            f"the noise of a sum is that of {self.shares:.2f} shares (at most {self.high:.2f}), "
            f"where {least} are billed"
        )


def shares_seen(noise: Array, share: float, confidence: float = 1 - 1e-6) -> SharesEstimate:
    """How many shares of standard deviation `share` are in sums of noise alone: [rounds,
    coordinates], in the same unit.

    Guarantees: intervals by the law of the variance of as many normal numbers; sums of a dozen
    shares are as normal as that needs.
    """
    from scipy.stats import chi2

    check.positive("share", share)
    if noise.size < 100 or not np.isfinite(noise).all():
        raise InvalidInput("noise", f"{noise.size} numbers", "must be at least 100 finite numbers")
    alpha, total, size = (
        (1 - check.inside_unit("confidence", confidence)) / 2,
        float(np.sum(noise**2)) / share**2,
        noise.size,
    )
    return SharesEstimate(
        total / float(chi2.isf(alpha, size)),
        total / size,
        total / float(chi2.ppf(alpha, size)),
        confidence,
    )


def shares(bench: Bench, bug: Bug) -> str | None:
    """Rounds with as few survivors as allowed: their noise is that of as many shares as are billed,
    and fresh in every round.
    """
    claim, sums, _ = bench.shared(bug, signal=False)
    seen = shares_seen(sums, claim.share)
    if said := seen.why_not(claim.shares):
        return said
    if seen.low > claim.shares:
        return (
            f"the noise of a sum is that of {seen.shares:.2f} shares, where {claim.shares} clients "
            f"answered"
        )
    echo = float((sums[1:] * sums[:-1]).mean() / (sums**2).mean() * math.sqrt(sums[1:].size))
    return None if abs(echo) < SIGMAS else "the noise of one round is that of the next"


def signal(bench: Bench, bug: Bug) -> str | None:
    """What comes out is the sum of the clipped vectors and the noise, and nothing else."""
    claim, sums, truth = bench.shared(bug, signal=True)
    noise, size = math.sqrt(claim.shares) * claim.share, float(np.sum(truth**2))
    part = float(np.sum(sums * truth)) / size
    if abs(part - 1) > SIGMAS * 1.1 * noise / math.sqrt(size):
        return f"sums hold {part:.2f} of what was added to them"
    left = math.sqrt(float(np.mean((sums - truth) ** 2)))
    return None if left < 1.1 * noise else f"sums are off by {left / noise:.2f} times their noise"


def lengths(bench: Bench, bug: Bug) -> str | None:
    """One client's message moves, by whatever vector it has, by no more than is billed."""
    for what, squared, most in bench.moved(bug):
        if squared > most:
            return (
                f"a client moves the sum by {math.sqrt(squared / most):.2f} times what is billed "
                f"({what})"
            )
    return None


def survivors(bench: Bench, bug: Bug) -> str | None:
    """A round with one survivor less than is billed shows nothing."""
    return (
        None
        if (found := bench.too_few(bug)) is None
        else f"a round with {found[0]} clients was released, where {found[1]} are billed"
    )


CHECKS: dict[str, Callable[[Bench, Bug], str | None]] = {
    "shares of noise": shares,
    "sums of vectors": signal,
    "length of messages": lengths,
    "survivors": survivors,
}
