"""The attacker's ROC against the claimed trade-off curve, as SVG."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from dpfy.audit import intervals
from dpfy.audit.bounds import TrialScores
from dpfy.audit.families import Tradeoff

if TYPE_CHECKING:
    from numpy.typing import NDArray


def points(scores: TrialScores, most: int = 200) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(false-positive rate, true-positive rate) at up to `most` thresholds, from (0, 0) to (1,
    1).
    """
    every = np.unique(np.concatenate([scores.inside, scores.outside]))
    cuts = every[np.linspace(0, len(every) - 1, min(most, len(every))).astype(int)]
    inside, outside = np.sort(scores.inside), np.sort(scores.outside)
    fpr = 1 - np.searchsorted(outside, cuts, side="right") / len(outside)
    tpr = 1 - np.searchsorted(inside, cuts, side="right") / len(inside)
    return np.concatenate([[1.0], fpr]), np.concatenate([[1.0], tpr])


def beyond(
    scores: TrialScores, tradeoff: Tradeoff, confidence: float = 0.95, most: int = 40
) -> int:
    """How many points of the ROC lie on the wrong side of the claim, beyond chance at all `most`
    thresholds together.
    """
    fpr, tpr = points(scores, most)
    alpha = (1 - confidence) / len(fpr) / 2
    n_in, n_out = len(scores.inside), len(scores.outside)
    count = 0
    for f, t in zip(fpr, tpr, strict=True):
        upper_fpr = intervals.upper(round(f * n_out), n_out, alpha)
        upper_fnr = intervals.upper(n_in - round(t * n_in), n_in, alpha)
        count += upper_fnr < tradeoff(upper_fpr)
    return count


def roc_svg(scores: TrialScores, tradeoff: Tradeoff, title: str) -> bytes:
    """The plot as SVG: the attacker's points must lie below the claimed curve, on the private
    side.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    grid = np.concatenate([np.linspace(0, 0.02, 41), np.linspace(0.02, 1, 99)])
    allowed = [1 - tradeoff(float(x)) for x in grid]
    figure = Figure(figsize=(5.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(grid, allowed, 1, color="tab:red", alpha=0.12, label="excluded by the claim")
    axes.plot(grid, allowed, color="tab:red", label="claimed trade-off")
    axes.plot(*points(scores), color="tab:blue", label=f"attacker ({len(scores)} canaries)")
    axes.plot([0, 1], [0, 1], color="0.6", linestyle=":", label="chance")
    axes.set(
        xlabel="false-positive rate",
        ylabel="true-positive rate",
        xlim=(0, 1),
        ylim=(0, 1),
        title=title,
    )
    axes.legend(loc="lower right", fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()
