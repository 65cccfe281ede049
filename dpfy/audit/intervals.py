"""Exact (Clopper & Pearson 1934) one-sided confidence limits on a probability, from a count."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dpfy.core import check
from dpfy.core.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def lower(successes: int, trials: int, alpha: float) -> float:
    """A number that is above the true probability with probability at most `alpha`."""
    _check(successes, trials, alpha)
    if successes == 0:
        return 0.0
    from scipy.special import betaincinv

    return float(betaincinv(successes, trials - successes + 1, alpha))


def upper(successes: int, trials: int, alpha: float) -> float:
    """A number that is below the true probability with probability at most `alpha`."""
    return 1.0 - lower(trials - successes, trials, alpha)


def log_ratio(one: ArrayLike, other: ArrayLike, alpha: float = 1e-6) -> float:
    """How far apart an outcome's chances under two inputs are: the largest log ratio.

    Args:
        one: Outcomes under one input, as whole numbers.
        other: Outcomes under the other input.
        alpha: The chance with which the answer may be too large.

    Returns:
        A lower bound on the largest log ratio, over all outcomes that were seen.
    """
    import numpy as np

    samples = [np.asarray(one), np.asarray(other)]
    names = np.unique(np.concatenate(samples))
    each, best = alpha / (4 * len(names)), 0.0
    for name in names.tolist():
        counts = [(int((seen == name).sum()), len(seen)) for seen in samples]
        for (hits, of), (misses, among) in (counts, counts[::-1]):
            low, high = lower(hits, of, each), upper(misses, among, each)
            best = max(best, math.log(low / high) if low > 0 else 0.0)
    return best


def _check(successes: int, trials: int, alpha: float) -> None:
    check.integer("trials", trials)
    if not 0 <= check.integer("successes", successes, least=0) <= trials:
        raise InvalidInput(
            "successes", successes, f"must be at most the number of trials ({trials})"
        )
    check.inside_unit("alpha", alpha)
