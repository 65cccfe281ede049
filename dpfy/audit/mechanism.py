"""The audit of one mechanism by itself: its outputs on two neighbouring inputs, and the distance
between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpfy.audit import one_run
from dpfy.audit.bounds import TrialScores, clopper_pearson
from dpfy.audit.verdict import AuditVerdict, LowerBound
from dpfy.core import check

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Sample = Callable[[bool, int], "ArrayLike"]
"""`sample(present, count)`: independent outputs, one number each, on the input with or without the
unit.
"""

SHOWS = (
    "the leak of this mechanism on these two neighbouring inputs, through this one number of its "
    "output"
)
DOES_NOT_SHOW = (
    "other neighbours, other projections of the output, or what composition and sampling make of it"
)


def audit(
    sample: Sample,
    *,
    epsilon: float,
    delta: float,
    trials: int,
    confidence: float = 0.95,
    seed: int = 0,
) -> AuditVerdict:
    """A lower bound on epsilon of any mechanism from `trials` outputs on each side; large and small
    outputs are both tried.

    Guarantees: above the true epsilon with probability at most 1 - confidence; the threshold is
    chosen on outputs that are not counted. `trials` bounds what can be certified: see
    `detail["most"]`.
    """
    inside, outside = (
        _numbers(sample(present, check.integer("trials", trials, least=4)))
        for present in (True, False)
    )
    each = 1 - (1 - check.inside_unit("confidence", confidence)) / 2
    tried = [TrialScores(inside, outside), TrialScores(-inside, -outside)]
    best = max(
        (clopper_pearson(s, delta=delta, confidence=each, seed=seed) for s in tried),
        key=lambda b: b.epsilon,
    )
    distance, margin = kolmogorov(inside, outside, 1 - confidence)
    detail = best.detail | {
        "kolmogorov": distance,
        "total_variation_lower": max(0.0, distance - margin),
        "most": one_run.most_by_rates(trials, each, delta),
    }
    bound = LowerBound(
        best.epsilon, delta, confidence, "mechanism by rates", 2 * trials, best.assumptions, detail
    )
    return AuditVerdict(bound, epsilon, SHOWS, DOES_NOT_SHOW)


def kolmogorov(
    one: NDArray[np.float64], other: NDArray[np.float64], alpha: float
) -> tuple[float, float]:
    """The largest gap between two empirical distributions, and by how much it may exceed the true
    one but for `alpha`.

    The true gap is at most the total variation distance, delta at epsilon 0 (Dvoretzky, Kiefer &
    Wolfowitz 1956; Massart 1990).
    """
    both = np.sort(np.concatenate([one, other]))
    below = [np.searchsorted(np.sort(x), both, side="right") / len(x) for x in (one, other)]
    margin = sum(math.sqrt(math.log(4 / alpha) / (2 * len(x))) for x in (one, other))
    return float(np.abs(below[0] - below[1]).max()), margin


@dataclass(frozen=True)
class NoiseShape:
    """How well a sample of noise fits its claimed distribution, and which error of scale this
    sample size would find.
    """

    count: int
    scale: float
    p_scale: float
    p_shape: float
    finds_factor: float


def gaussian_shape(noise: ArrayLike, claimed: float) -> NoiseShape:
    """Test noise against N(0, claimed^2): two-sided chi-square for the scale, Kolmogorov-Smirnov
    for the shape.

    `finds_factor`: a scale wrong by this factor, up or down, is found at the 0.1% level 99 times
    out of 100.
    """
    from scipy.stats import chi2, kstest

    values = _numbers(noise) / check.positive("claimed", claimed)
    statistic = float((values**2).sum())
    p_scale = 2 * min(chi2.cdf(statistic, len(values)), chi2.sf(statistic, len(values)))
    finds = math.exp((3.29 + 2.33) / math.sqrt(2 * len(values)))
    return NoiseShape(
        len(values),
        math.sqrt(statistic / len(values)),
        float(p_scale),
        float(kstest(values, "norm").pvalue),
        finds,
    )


def _numbers(values: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64).reshape(-1)
