"""Exact (Clopper & Pearson 1934) one-sided confidence limits on a probability, from a count."""

from __future__ import annotations

from dpfy.core import check
from dpfy.core.errors import InvalidInput


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


def _check(successes: int, trials: int, alpha: float) -> None:
    check.integer("trials", trials)
    if not 0 <= check.integer("successes", successes, least=0) <= trials:
        raise InvalidInput(
            "successes", successes, f"must be at most the number of trials ({trials})"
        )
    check.inside_unit("alpha", alpha)
