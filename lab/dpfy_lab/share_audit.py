"""Audit of noise in shares, from outside: what sums of rounds show about how many shares of noise
are in them.

Clients answer some rounds with nothing (a rehearsal: vectors of zero), so that what comes out is
noise alone. Its variance over that of one share is how many there are: a client that adds none,
noise that is drawn once for all, shares sized for those who dropped out show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpfy.core import check
from dpfy.core.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


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
            f"where {least} are charged"
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
