"""What the answers to fixed questions told about *these* votes. Such an epsilon is computed from
private data and is private itself.

A bound for the votes at hand can be far below the one that holds for all votes, since most
questions are not close. But who knows the number knows something about the data. It may be
published only after it was made private by a release of its own, which is billed: that of a smooth
bound on the exact divergence is `dpfy_lab.data_dependent.vote_bill`. The numbers here are not smooth, and
never leave. So what these functions return can be compared in memory, and neither printed,
formatted, stored nor sent.

`published` is the analysis of Papernot et al. 2018 (Theorem 6, Proposition 7), with their orders
and their conversion, for comparison. `exact` is the divergence itself: the arg-max of noisy votes,
with the check before it as one release, against every histogram with one vote moved, in both
directions, by quadrature; and the optimal conversion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, logsumexp, ndtr

from dpfy.accounting.rdp import to_epsilon
from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported

Array = NDArray[np.float64]
PUBLISHED_ORDERS = np.concatenate(
    [np.arange(2, 100, 0.5), np.logspace(np.log10(100), np.log10(500), 50)]
)
EXACT_ORDERS = np.array(
    [
        1.5,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        10,
        12,
        14,
        16,
        18,
        20,
        22,
        24,
        26,
        28,
        30,
        33,
        36,
        40,
        45,
        50,
        60,
        80,
        120,
    ]
)
LOW, HIGH = 8.0, 9.0
"""How far below and above the largest count the winning one may lie, in sigmas."""
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(96)
WAY_OUT = (
    "state what holds for all votes (accounting.epsilon of the claim's event), or release a charge "
    "(dpfy_lab.data_dependent.vote_bill)"
)


class DataDependent:
    """A number computed from private data that was not made private. It compares with numbers, and
    that is all it does.
    """

    __slots__ = ("_value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: float) -> None:
        self._value = float(value)

    def within(self, low: float, high: float) -> bool:
        """Whether it lies between two public numbers."""
        return low <= self._value <= high

    def __lt__(self, other: float | DataDependent) -> bool:
        return self._value < (other._value if isinstance(other, DataDependent) else other)

    def __le__(self, other: float | DataDependent) -> bool:
        return self._value <= (other._value if isinstance(other, DataDependent) else other)

    def __repr__(self) -> str:
        return "DataDependent(not to be published)"

    def _refuse(self, *_: Any) -> NoReturn:
        raise Unsupported(
            "publishing an epsilon that was computed from private votes and not made private",
            WAY_OUT,
        )

    __str__ = __format__ = __float__ = __int__ = __index__ = __bool__ = __reduce_ex__ = __add__ = (
        __mul__
    ) = __eq__ = _refuse  # type: ignore[assignment]


@dataclass(frozen=True)
class ConfidentVote:
    """The parameters of confident aggregation: a check at `check_sigma` against `threshold`, then
    the arg-max at `sigma`.
    """

    threshold: float
    check_sigma: float
    sigma: float

    def __post_init__(self) -> None:
        check.real("threshold", self.threshold)
        check.positive("check_sigma", self.check_sigma)
        check.positive("sigma", self.sigma)


def published(votes: Any, rule: ConfidentVote, delta: float) -> DataDependent:
    """Epsilon as Papernot et al. 2018 compute it: the mean cost of a check and, as often as it
    passes, of an answer.
    """
    total = np.zeros(len(PUBLISHED_ORDERS))
    for counts, times in _distinct(votes):
        passes = log_ndtr((counts.max() - rule.threshold) / rule.check_sigma)
        fails = log_ndtr((rule.threshold - counts.max()) / rule.check_sigma)
        total += times * _bound(min(passes, fails), rule.check_sigma * math.sqrt(2))
        total += times * math.exp(passes) * _bound(_log_other(counts, rule.sigma), rule.sigma)
    return DataDependent(
        float(np.min(total - math.log(check.inside_unit("delta", delta)) / (PUBLISHED_ORDERS - 1)))
    )


def _log_other(counts: Array, sigma: float) -> float:
    """A bound on the log of the chance that another class than the first wins (their Proposition
    7).
    """
    place = int(counts.argmax())
    behind = (counts[place] - np.delete(counts, place)) / (sigma * math.sqrt(2))
    return min(float(logsumexp(log_ndtr(-behind))), math.log1p(-1 / len(counts)))


def _bound(log_q: float, sigma: float) -> Array:
    """Their Theorem 6 at the two orders that they choose, for a release of divergence order /
    sigma^2 whose usual outcome fails with q.
    """
    orders = PUBLISHED_ORDERS
    plain = orders / sigma**2
    if log_q == -math.inf:
        return np.zeros(len(orders))
    second = sigma * math.sqrt(-log_q)
    first = second + 1
    if second <= 1:
        return plain
    high, low = first / sigma**2, second / sigma**2
    most = (second - 1) * low - second * math.log(first / (first - 1) * second / (second - 1))
    if log_q > most or -log_q <= low:
        return plain
    usual = math.log1p(-math.exp(log_q))
    a = (usual - math.log1p(-math.exp((log_q + low) * (1 - 1 / second)))) * (orders - 1)
    b = (high - log_q / (first - 1)) * (orders - 1)
    found = np.logaddexp(usual + a, log_q + b) / (orders - 1)
    return np.asarray(np.where(orders <= first, np.minimum(plain, found), plain))


def exact(votes: Any, rule: ConfidentVote, delta: float) -> DataDependent:
    """Epsilon by the exact Rényi divergences of checks and answers at these votes, the worst
    neighbours of each.
    """
    total = np.zeros(len(EXACT_ORDERS))
    for counts, times in _distinct(votes):
        total += times * divergences(counts, rule, EXACT_ORDERS)
    return DataDependent(to_epsilon(EXACT_ORDERS, total, check.inside_unit("delta", delta)))


def divergences(counts: Array, rule: ConfidentVote, orders: Array) -> Array:
    """Those of one question: refused, or one of the classes; the largest over all votes that may
    move, in both directions.
    """
    other = moved(counts)
    usual = outcomes(counts[None], rule)
    far = outcomes(other, rule)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        loss = np.where((usual > 0) & (far > 0), np.log(usual) - np.log(far), 0.0)
        a = orders[:, None, None]
        ahead = (far * (np.expm1(a * loss) - a * np.expm1(loss))).sum(axis=2)
        back = (usual * (np.expm1(-a * loss) - a * np.expm1(-loss))).sum(axis=2)
    return np.asarray(np.log1p(np.maximum(ahead, back).max(axis=1)) / (orders - 1))


def moved(counts: Array) -> Array:
    """Every histogram with one vote moved, one for each pair of different counts: equal classes are
    alike.
    """
    pairs: dict[tuple[float, float], tuple[int, int]] = {}
    for a in np.flatnonzero(counts >= 1).tolist():
        for b in range(len(counts)):
            if a != b:
                pairs.setdefault((counts[a], counts[b]), (a, b))
    found = np.repeat(counts[None], len(pairs), axis=0)
    for row, (a, b) in enumerate(pairs.values()):
        found[row, a] -= 1
        found[row, b] += 1
    return found


def outcomes(counts: Array, rule: ConfidentVote) -> Array:
    """The chances of a refusal and of every class, row by row, by quadrature over the winning
    count.
    """
    top, sigma = counts.max(axis=1), rule.sigma
    half = (LOW + HIGH) / 2 * sigma
    x = (top + (HIGH - LOW) / 2 * sigma)[:, None] + half * _NODES
    z = (x[:, None, :] - counts[:, :, None]) / sigma
    below = log_ndtr(z)
    wins = (
        np.exp(-(z**2) / 2 + below.sum(axis=1, keepdims=True) - below)
        @ _WEIGHTS
        * (half / (sigma * math.sqrt(2 * math.pi)))
    )
    passed = (top - rule.threshold) / rule.check_sigma
    return np.concatenate([ndtr(-passed)[:, None], ndtr(passed)[:, None] * wins], axis=1)


def _distinct(votes: Any) -> list[tuple[Array, int]]:
    """Histograms up to the order of the classes, with how often each occurs."""
    table = np.asarray(votes, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] < 2 or not np.isfinite(table).all() or (table < 0).any():
        raise InvalidInput(
            "votes", f"an array of shape {table.shape}", "must be counts, a row for every question"
        )
    found, times = np.unique(np.sort(table, axis=1), axis=0, return_counts=True)
    return list(zip(found, times.tolist(), strict=True))
