"""Checks of what protects people rather than records: users of several records, and local reports.

Statistical ones have a false-alarm rate below 1e-6 each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from dpfy.audit import intervals
from dpfy.audit.bench import Bench, Bug

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Outcomes = NDArray[np.int64]

ALPHA = 1e-6
RECORDS, LONG = 4, 10.0
"""Records of a user, and the length of their gradients in clip norms."""


def log_ratio(one: Outcomes, other: Outcomes, alpha: float = ALPHA) -> float:
    """A lower bound on the largest log ratio of the chances of one outcome under two inputs, true
    but for `alpha`.
    """
    names = np.unique(np.concatenate([one, other]))
    each, best = alpha / (4 * len(names)), 0.0
    for name in names.tolist():
        counts = [(int((seen == name).sum()), len(seen)) for seen in (one, other)]
        for (hits, of), (misses, among) in (counts, counts[::-1]):
            low, high = intervals.lower(hits, of, each), intervals.upper(misses, among, each)
            best = max(best, math.log(low / high) if low > 0 else 0.0)
    return best


def local_reports(bench: Bench, bug: Bug) -> str | None:
    """Reports of two people with different values: no report is more than exp(epsilon) times as
    likely for one as for the other.
    """
    for name, epsilon, one, other in bench.reports(bug):
        if (found := log_ratio(one, other)) > epsilon:
            return (
                f"{name}: a report tells two values apart with epsilon at least {found:.3f}, "
                f"claimed {epsilon:g}"
            )
    return None


def kept_answers(bench: Bench, bug: Bug) -> str | None:
    """Many reports from one kept answer show no more than the answer itself would."""
    epsilon, one, other = bench.kept_answers(bug)
    found = log_ratio(one, other)
    return (
        None
        if found <= epsilon
        else f"many reports of a device cost epsilon at least {found:.3f}, claimed {epsilon:g} for "
        f"all of them"
    )


def _users(bench: Bench) -> tuple[NDArray[np.float64], Outcomes]:
    """Six users of four records each: the records of a user are long and alike, which clipping them
    one by one would let add up.
    """
    d = max(place.stop for place in bench.parameters.values())
    rng = np.random.default_rng(8)
    own = rng.standard_normal((6, 1, d)) + 0.1 * rng.standard_normal((6, RECORDS, d))
    own *= LONG / np.linalg.norm(own, axis=2, keepdims=True)
    return own.reshape(-1, d), np.repeat(np.arange(6), RECORDS)


def user_sensitivity(bench: Bench, bug: Bug) -> str | None:
    """Without noise: leaving out all records of one user changes the sum by at most one clip
    norm.
    """
    rows, owners = _users(bench)
    whole = bench.users(rows, owners, bug, noise=0.0)[0]
    for user in (0, 3):
        kept = owners != user
        change = float(
            np.linalg.norm(whole - bench.users(rows[kept], owners[kept], bug, noise=0.0)[0])
        )
        if not change <= 1 + 1e-3:
            return f"leaving out one user changes the sum by {change:.3f} clip norms"
    return None


def user_noise(bench: Bench, bug: Bug) -> str | None:
    """Records without gradients: the noise is that of the claim, in clip norms of a user."""
    rows, owners = _users(bench)
    seen = (
        bench.users(0 * rows, owners, bug, noise=bench.noise_multiplier, steps=4)
        / bench.noise_multiplier
    )
    scale = math.sqrt(float(np.mean(seen**2)))
    return (
        None
        if abs(scale - 1) < 6 / math.sqrt(2 * seen.size)
        else f"noise of {scale:.3f} of what hides a user was added"
    )


CHECKS: dict[str, Callable[[Bench, Bug], str | None]] = {
    "user sensitivity": user_sensitivity,
    "user noise": user_noise,
    "local reports": local_reports,
    "kept answers": kept_answers,
}
