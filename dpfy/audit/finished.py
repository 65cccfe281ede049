"""The audit of a finished run: from coins and what the attacker saw to a verdict, and the record of
it for the report.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpfy.audit import cosines, mechanism, one_run, plot, power, scores
from dpfy.audit.bounds import TrialScores, by_accuracy
from dpfy.audit.families import ClaimedFamily, GaussianFamily, TradeoffFamily
from dpfy.audit.verdict import AuditVerdict, LowerBound
from dpfy.audit.whitebox import AuditedClaim, ObservedSums, audit, ratio
from dpfy.core.ledger import Ledger
from dpfy.core.storage import write_atomically

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    """A noise stream by itself (`dpfy.audit.noise_stream.StreamSeen`): the optimal attack, and a
    test of the noise alone.
    """
    facts = seen.facts
    family: TradeoffFamily
    if seen.curve is not None:
        family = ClaimedFamily(seen.curve)
        values = scores.likelihood_ratio(seen.projections, seen.scale, facts.rate)
    else:
        family = GaussianFamily(1 / facts.noise_multiplier)
        values = scores.matched(seen.projections, seen.encoder, seen.pattern, seen.scale)
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
    final = cosines.estimate(
        seen.final[seen.included], cosines.by_chance(seen.dimension), claim.delta
    )
    largest = cosines.estimate(
        seen.largest[seen.included], cosines.fitted(seen.largest[~seen.included]), claim.delta
    )
    family, canaries = claim.family, len(seen.included)
    allowed, half = ((1 + family.advantage(strength)) / 2 for strength in (1.0, 2.0))
    caught = power.detection(canaries, half, allowed, confidence)
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
    fpr, tpr = plot.points(seen, 60)
    return verdict.to_json() | {
        "others": [bound.to_json() for bound in others],
        "points_beyond_claim": plot.beyond(seen, family.tradeoff(family.claim)),
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
    picture = plot.roc_svg(
        seen, family.tradeoff(family.claim), "attacker against the claimed trade-off"
    )
    write_atomically(folder / PICTURE, picture)
    if (ledger := Ledger.read(folder / "ledger.jsonl")).book.finish is not None:
        ledger.attach((FILE, PICTURE))
