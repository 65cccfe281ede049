"""The audit of a finished run: from coins and what the attacker saw to a verdict, and the record of
it for the report.

Canary users in one run: how far the angles between their updates and the model's movement are
from chance.

A canary user sends a random direction, clipped as everybody's update is. In many dimensions the
cosine between a random direction that was not sent and the movement of the model is N(0, 1/d);
those of canaries that were sent are larger. Epsilon is estimated as that of telling a Gaussian with
their mean and deviation from N(0, 1/d). It is an estimate of what this attack learns and no bound:
lower bounds come from the coins of the canaries (:mod:`dpfy.audit.one_run`). Reference: Andrew,
Kairouz, Oh, Oprea, McMahan & Suriyakumar 2023, algorithms 2, 3.

The attacker's ROC against the claimed trade-off curve, as SVG.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpfy.audit import bounds, mechanism, one_run, whitebox
from dpfy.audit.bounds import TrialScores, by_accuracy
from dpfy.audit.families import ClaimedFamily, GaussianFamily, Tradeoff, TradeoffFamily
from dpfy.audit.verdict import AuditVerdict, LowerBound
from dpfy.audit.whitebox import AuditedClaim, ObservedSums, audit, ratio
from dpfy.core import check
from dpfy.core.codec import number
from dpfy.core.errors import InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.core.storage import write_atomically

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

WIDE, POINTS = 12.0, 40_001
MOST = 200.0
"""Beyond this epsilon the two laws are distinguished for sure."""


Law = tuple[float, float]
"""Mean and standard deviation of a Gaussian."""


@dataclass(frozen=True)
class CosineEstimate:
    """What cosines of canaries say: an estimate of epsilon at `delta`, and the two Gaussian laws
    that it was made of.
    """

    epsilon: float
    delta: float
    canaries: int
    sent: Law
    unsent: Law

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self) | {"epsilon": number(self.epsilon), "kind": "an estimate, no bound"}


def estimate(cosines: ArrayLike, unsent: Law, delta: float) -> CosineEstimate:
    """From the cosines of canaries that were sent, and the law of those that were not."""
    sent = fitted(cosines)
    found = told_apart(sent, unsent, check.inside_unit("delta", delta))
    return CosineEstimate(found, delta, np.size(cosines), sent, unsent)


def by_chance(dimension: int) -> Law:
    """Of the cosine between a random direction and any other one, in many dimensions."""
    return 0.0, 1 / math.sqrt(check.integer("dimension", dimension, least=2))


def fitted(cosines: ArrayLike) -> Law:
    """The Gaussian with the mean and deviation of a sample: of canaries that were not sent, where
    no law is known.
    """
    seen = np.asarray(cosines, dtype=np.float64).reshape(-1)
    if len(seen) < 3 or not np.isfinite(seen).all():
        raise InvalidInput("cosines", f"{len(seen)} values", "must be at least 3 finite numbers")
    return float(seen.mean()), max(float(seen.std(ddof=1)), 1e-12)


def told_apart(one: Law, other: Law, delta: float) -> float:
    """The least epsilon with which two Gaussians are indistinguishable at `delta`, by sums over a
    fine grid.
    """
    ends = [mean + sign * WIDE * deviation for mean, deviation in (one, other) for sign in (-1, 1)]
    at = np.linspace(min(ends), max(ends), POINTS)
    logs = [
        -0.5 * ((at - m) / s) ** 2 - math.log(s * math.sqrt(2 * math.pi)) for m, s in (one, other)
    ]
    step, low, high = float(at[1] - at[0]), 0.0, MOST
    if _left(logs, 0.0, step) <= delta:
        return 0.0
    if _left(logs, high, step) > delta:
        return math.inf
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _left(logs, middle, step) > delta else (low, middle)
    return high


def _left(logs: list[NDArray[np.float64]], epsilon: float, step: float) -> float:
    """Delta at an epsilon, the larger of both directions."""
    found = []
    for one, other in (logs, logs[::-1]):
        beyond = np.minimum(epsilon + other - one, 0.0)
        found.append(float((np.exp(one) * -np.expm1(beyond)).sum()) * step)
    return max(found)


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
        upper_fpr = bounds.upper(round(f * n_out), n_out, alpha)
        upper_fnr = bounds.upper(n_in - round(t * n_in), n_in, alpha)
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


FILE, PICTURE = "audit.json", "audit.svg"
SHARES = (1.0, 0.4, 0.2)
"""Numbers of guesses tried, as shares of the canaries; fixed here, before any score is seen."""

SHOWS = (
    "what an attacker learns about synthetic canaries from the released model's answers alone, in "
    "this one run; the bound holds for "
    "any mechanism, although all canaries share the run"
)
DOES_NOT_SHOW = (
    "how much a stronger attack would find: intermediate updates, better canaries or more of them. "
    "A low bound is not evidence of "
    "more privacy than claimed, and one run certifies little of a large epsilon"
)


def by_updates(
    observed: ObservedSums, claim: AuditedClaim, confidence: float
) -> tuple[AuditVerdict, list[LowerBound], TrialScores]:
    """White-box: the tight bound, and beside it the one-run bounds that need no independence."""
    verdict = audit(observed, claim, confidence=confidence)
    values = ratio(observed, claim)
    return (
        verdict,
        _one_run(values, observed.included, claim.delta, claim.family, confidence),
        TrialScores.of(values, observed.included),
    )


def of_stream(
    seen: Any, confidence: float
) -> tuple[AuditVerdict, list[LowerBound], TrialScores, TradeoffFamily, dict[str, float]]:
    """A noise stream by itself (`dpfy.audit.observation.StreamSeen`): the optimal attack, and a
    test of the noise alone.
    """
    facts = seen.facts
    family: TradeoffFamily
    if seen.curve is not None:
        family = ClaimedFamily(seen.curve)
        values = whitebox.likelihood_ratio(seen.projections, seen.scale, facts.rate)
    else:
        family = GaussianFamily(1 / facts.noise_multiplier)
        values = whitebox.matched(seen.projections, seen.encoder, seen.pattern, seen.scale)
    right = int(((values > 0) == seen.included).sum())
    bound = by_accuracy(right, len(values), delta=facts.delta, family=family, confidence=confidence)
    verdict = AuditVerdict(
        bound, family.epsilon(family.claim, facts.delta), mechanism.SHOWS, mechanism.DOES_NOT_SHOW
    )
    found = _one_run(values, seen.included, facts.delta, family, confidence)
    shape = dataclasses.asdict(mechanism.gaussian_shape(seen.alone, seen.scale))
    return verdict, found, TrialScores.of(values, seen.included), family, shape


def of_people(seen: Any, claim: AuditedClaim, confidence: float) -> dict[str, Any]:
    """Of canary users (`dpfy.audit.user_training.UsersSeen`): estimates from their cosines, and
    what so many canaries can find.
    """
    final = estimate(seen.final[seen.included], by_chance(seen.dimension), claim.delta)
    largest = estimate(
        seen.largest[seen.included], fitted(seen.largest[~seen.included]), claim.delta
    )
    family, canaries = claim.family, len(seen.included)
    allowed, half = ((1 + family.advantage(strength)) / 2 for strength in (1.0, 2.0))
    caught = one_run.detection(canaries, half, allowed, confidence)
    typical = by_accuracy(
        round(canaries * allowed), canaries, delta=claim.delta, family=family, confidence=confidence
    ).epsilon
    lines = [
        f"estimate from cosines of canary users: {final.epsilon:.3f} from the final model, "
        f"{largest.epsilon:.3f} from the largest of all "
        "rounds (estimates, no bounds)",
        f"power: {canaries} canary users certify about {typical:.3f} of a tight claim; half the "
        f"noise would be found with probability "
        f"{caught:.2f}",
    ]
    held = {"certifies_typically": typical, "finds_half_the_noise": caught}
    return {
        "cosines": {"final": final.to_json(), "largest": largest.to_json()},
        "power": held,
        "people": lines,
    }


def by_answers(
    margins: NDArray[np.float64],
    included: NDArray[np.bool_],
    claim: AuditedClaim,
    confidence: float,
) -> tuple[AuditVerdict, list[LowerBound], TrialScores]:
    """Final model: margins of the canaries' labels, judged by the one-run bound that assumes
    nothing about the leak.
    """
    found = _one_run(margins, included, claim.delta, claim.family, confidence)
    return (
        AuditVerdict(found[0], claim.epsilon, SHOWS, DOES_NOT_SHOW),
        found[1:],
        TrialScores.of(margins, included),
    )


def _one_run(
    values: NDArray[np.float64],
    included: NDArray[np.bool_],
    delta: float,
    family: TradeoffFamily,
    confidence: float,
) -> list[LowerBound]:
    counts = [max(2, round(share * len(values))) for share in SHARES]
    plain = one_run.best_of(
        values,
        included,
        counts,
        lambda g, c: one_run.steinke(g, delta=delta, confidence=c),
        confidence,
    )
    refined = one_run.best_of(
        values,
        included,
        counts,
        lambda g, c: one_run.f_dp(g, delta=delta, family=family, confidence=c),
        confidence,
    )
    return [plain, refined]


def record(
    verdict: AuditVerdict, others: list[LowerBound], seen: TrialScores, family: TradeoffFamily
) -> dict[str, Any]:
    """The audit as one JSON object; `points` is the attacker's ROC."""
    fpr, tpr = points(seen, 60)
    return verdict.to_json() | {
        "others": [bound.to_json() for bound in others],
        "points_beyond_claim": beyond(seen, family.tradeoff(family.claim)),
        "points": [
            {"false_positive_rate": float(f), "true_positive_rate": float(t)}
            for f, t in zip(fpr, tpr, strict=True)
        ],
    }


def write(folder: Path, answer: dict[str, Any], seen: TrialScores, family: TradeoffFamily) -> None:
    """Leave audit.json and audit.svg in the run folder; the report shows them, and the ledger holds
    their hashes.
    """
    write_atomically(
        folder / FILE,
        (json.dumps(answer, indent=1, sort_keys=True, allow_nan=False) + "\n").encode(),
    )
    picture = roc_svg(seen, family.tradeoff(family.claim), "attacker against the claimed trade-off")
    write_atomically(folder / PICTURE, picture)
    if (ledger := Ledger.read(folder / "ledger.jsonl")).book.finish is not None:
        ledger.attach((FILE, PICTURE))
