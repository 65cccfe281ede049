"""Membership inference on a finished model: attacks, their rates with intervals, and what a sound
reader may conclude from them.

The attacker has records that were trained on (members) and records that were not (others), and one
score for each; a larger score says "member". Scores come from the model's logits (threshold,
quantile) or from its logits beside those of shadow models (likelihood ratio, relative likelihood).

Two traps are looked for. Members and others may differ by themselves: a classifier that never sees
the model is scored beside the attacks (Das, Zhang & Tramer 2024). And only coins certify: without a
random choice of the members no rate is a bound on epsilon.

References: Yeom et al. 2018 (threshold); Bertran et al. 2023 (quantile); Carlini et al. 2022
(likelihood ratio); Zarifzadeh, Liu & Shokri 2024 (relative likelihood).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpfy.audit import bounds, one_run, whitebox
from dpfy.audit.bounds import TrialScores
from dpfy.audit.verdict import LowerBound
from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[np.float64]

RATES = (0.01, 0.001)
"""False-positive rates at which an attack is judged."""
GUESSES = (1.0, 0.4, 0.2)
"""Numbers of guesses tried for a bound, as shares of the records; fixed before a score is seen."""
LEAST = 20
"""Fewer members or others say nothing."""
WIDTH = 64
"""Numbers of a record that the quantile attack and the blind classifier read, after a random
projection.
"""
NO_BOUND = "no bound: membership was not random"
BLIND = (
    "members and others differ by themselves: a classifier that never saw the model tells them "
    "apart (AUC {:.3f}); part of what the attacks find may be that difference"
)
_SMALL = 1e-9


@dataclass(frozen=True)
class RateAt:
    """The true-positive rate of an attack at a false-positive rate, with limits.

    `wanted` is the rate asked for, `false_positive` the one measured on the others, and
    `false_positive_most` its upper limit. `most` is what the guarantee allows at that upper limit;
    None where no guarantee is known.
    """

    wanted: float
    false_positive: float
    false_positive_most: float
    true_positive: float
    low: float
    high: float
    most: float | None = None


@dataclass(frozen=True)
class AttackResult:
    """What one attack tells: the area under its ROC, and its rates."""

    name: str
    auc: float
    auc_low: float
    auc_high: float
    rates: tuple[RateAt, ...]


@dataclass(frozen=True)
class MembershipAudit:
    """The result of all attacks on one model.

    Args:
        members: Number of records that were trained on.
        others: Number of records that were not.
        attacks: One result for each attack, the one with the largest lower AUC limit first.
        blind: The same for a classifier that never saw the model.
        bound: A lower bound on epsilon; None where membership was not random.
        claimed: The epsilon of the model's guarantee at the bound's delta, if there is one.
        confidence: All limits of one kind are true together with this probability.
        shadows: Number of shadow models.
    """

    members: int
    others: int
    attacks: tuple[AttackResult, ...]
    blind: AttackResult | None
    bound: LowerBound | None
    claimed: float | None
    confidence: float
    shadows: int

    @property
    def violated(self) -> bool:
        """Whether a certified bound is above the claim."""
        return (
            self.bound is not None
            and self.claimed is not None
            and self.bound.epsilon > self.claimed
        )

    @property
    def detected(self) -> bool:
        """Whether some attack is better than chance, beyond what `confidence` leaves to chance."""
        return any(
            found.auc_low > 0.5 or any(r.low > r.false_positive_most for r in found.rates)
            for found in self.attacks
        )

    @property
    def shifted(self) -> bool:
        """Whether members and others differ without a look at the model."""
        return self.blind is not None and self.blind.auc_low > 0.5

    def sentences(self) -> list[str]:
        """The result in words."""
        best = self.attacks[0]
        first = best.rates[0]
        said = [
            f"best attack: {best.name}, AUC {best.auc:.3f} ({best.auc_low:.3f} to "
            f"{best.auc_high:.3f}) on {self.members} members and {self.others} others",
            f"true-positive rate {first.true_positive:.1%} ({first.low:.1%} to {first.high:.1%}) at "
            f"a false-positive rate of {first.false_positive:.1%}"
            + ("" if first.most is None else f"; the guarantee allows at most {first.most:.1%}"),
        ]
        said.append(
            "membership is detected" if self.detected else "no attack is better than chance"
        )
        if self.shifted and self.blind is not None:
            said.append(BLIND.format(self.blind.auc))
        if self.bound is None:
            said.append(NO_BOUND)
        elif self.violated:
            said.append(
                f"VIOLATED: epsilon is at least {self.bound.epsilon:.3f} at delta "
                f"{self.bound.delta:g}, above the claimed {self.claimed:.3f}"
            )
        else:
            claim = "" if self.claimed is None else f"; claimed {self.claimed:.3f}"
            said.append(
                f"epsilon is at least {self.bound.epsilon:.3f} at delta {self.bound.delta:g} with "
                f"{self.bound.confidence:.0%} confidence ({self.bound.method}){claim}"
            )
        return said

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "members": self.members,
            "others": self.others,
            "confidence": self.confidence,
            "shadow_models": self.shadows,
            "attacks": [asdict(found) for found in self.attacks],
            "blind": None if self.blind is None else asdict(self.blind),
            "bound": NO_BOUND if self.bound is None else self.bound.to_json(),
            "epsilon_claimed": self.claimed,
            "detected": self.detected,
            "members_and_others_differ": self.shifted,
            "violated": self.violated,
            "sentences": self.sentences(),
        }


def area(scores: TrialScores, confidence: float) -> tuple[float, float, float]:
    """The area under the ROC, and its limits by the variance of DeLong, DeLong & Clarke-Pearson
    (1988).
    """
    from scipy.stats import norm, rankdata

    inside, outside = scores.inside, scores.outside
    m, n = len(inside), len(outside)
    ranks = rankdata(np.concatenate([inside, outside]))
    above = (ranks[:m] - rankdata(inside)) / n
    below = 1 - (ranks[m:] - rankdata(outside)) / m
    found = float(above.mean())
    # A perfect attack on few records has an interval too: no variance is below that of one record.
    spread = math.sqrt(
        max(float(above.var(ddof=1)), 1 / m) / m + max(float(below.var(ddof=1)), 1 / n) / n
    )
    wide = float(norm.ppf((1 + confidence) / 2)) * spread
    return found, max(0.0, found - wide), min(1.0, found + wide)


def rate_at(scores: TrialScores, wanted: float, confidence: float, most: Any = None) -> RateAt:
    """The true-positive rate at the least threshold whose measured false-positive rate is at most
    `wanted`; exact limits (Clopper & Pearson 1934).

    `most` is the largest true-positive rate that a guarantee allows, as a function of the
    false-positive rate.
    """
    n, m = len(scores.outside), len(scores.inside)
    allowed = math.floor(wanted * n + _SMALL)
    ordered = np.sort(scores.outside)[::-1]
    threshold = ordered[allowed] if allowed < n else -math.inf
    hits = int((scores.inside > threshold).sum())
    alarms = int((scores.outside > threshold).sum())
    alpha = (1 - confidence) / 2
    highest = bounds.upper(alarms, n, alpha)
    return RateAt(
        wanted,
        alarms / n,
        highest,
        hits / m,
        bounds.lower(hits, m, alpha),
        bounds.upper(hits, m, alpha),
        None if most is None else float(most(highest)),
    )


def judged(name: str, scores: TrialScores, confidence: float, most: Any = None) -> AttackResult:
    """One attack, from its scores; rates that so few others cannot show are left out."""
    rates = tuple(
        rate_at(scores, wanted, confidence, most)
        for wanted in RATES
        if wanted * len(scores.outside) >= 1 or wanted == RATES[0]
    )
    return AttackResult(name, *area(scores, confidence), rates)


def projected(records: ArrayLike, labels: ArrayLike | None, classes: int) -> Array:
    """What is known of each record without the model: a random projection of its numbers, and its
    label.
    """
    seen = np.asarray(records, dtype=np.float64).reshape(len(np.asarray(records)), -1)
    spread = seen.std(0)
    seen = (seen - seen.mean(0)) / np.where(spread > 0, spread, 1.0)
    if seen.shape[1] > WIDTH:
        rng = Randomness.for_tests(1).generator("projection", seen.shape[1])
        seen = seen @ rng.standard_normal((seen.shape[1], WIDTH)) / math.sqrt(seen.shape[1])
    parts = [np.ones((len(seen), 1)), seen]
    if labels is not None:
        parts.append(np.eye(classes)[np.asarray(labels, dtype=np.int64)])
    return np.concatenate(parts, axis=1)


def _ridge(inputs: Array, targets: Array) -> Array:
    gram = inputs.T @ inputs + 1e-2 * len(inputs) * np.eye(inputs.shape[1])
    return np.asarray(np.linalg.solve(gram, inputs.T @ targets))


def blind_scores(
    known: Array, included: NDArray[np.bool_], seed: int = 0
) -> tuple[Array, NDArray[np.bool_]]:
    """Scores of a linear classifier that never sees the model, fitted on one half of the records,
    and the coins of the other half, which it is judged on.
    """
    order = Randomness.for_tests(seed).generator("blind halves", 0).permutation(len(known))
    fitted, rest = order[::2], order[1::2]
    made = known[rest] @ _ridge(known[fitted], included[fitted] - included[fitted].mean())
    return made, included[rest]


def quantile_scores(known: Array, margins: Array, fitted: NDArray[np.bool_]) -> Array:
    """By how many deviations each margin is above what a regression on public others expects of a
    record like it (Bertran et al. 2023, with a linear Gaussian regression).
    """
    mean = known @ _ridge(known[fitted], margins[fitted])
    logs = np.log((margins - mean) ** 2 + 1e-6)
    spread = np.exp(0.5 * np.clip(known @ _ridge(known[fitted], logs[fitted]), -20, 20))
    return np.asarray((margins - mean) / spread)


def relative_likelihood(target: ArrayLike, shadows: ArrayLike) -> Array:
    """The log of the label's probability under the model over its mean under the shadow models.

    With the population as reference this orders records as the scores of Zarifzadeh, Liu & Shokri
    (2024) do: those are ranks of this ratio.
    """
    own = np.asarray(target, dtype=np.float64)
    others = np.asarray(shadows, dtype=np.float64)
    return np.asarray(own - np.logaddexp.reduce(others, axis=0) + math.log(len(others)))


def log_probability(margins: ArrayLike) -> Array:
    """The log of a label's probability from its margin."""
    return np.asarray(-np.logaddexp(0.0, -np.asarray(margins, dtype=np.float64)))


def scores_of(
    margins: ArrayLike,
    included: NDArray[np.bool_],
    known: Array | None,
    shadows: tuple[Array, NDArray[np.bool_]] | None,
) -> tuple[dict[str, Array], NDArray[np.bool_]]:
    """The scores of every attack, and which records they are judged on.

    Others on which the quantile attack was fitted are left out for all attacks, so that they can be
    compared.
    """
    seen = np.asarray(margins, dtype=np.float64)
    judged_on = np.ones(len(seen), dtype=bool)
    scores: dict[str, Array] = {"threshold": seen}
    apart = np.flatnonzero(~included)
    if known is not None and len(apart) >= 4 * LEAST:
        fitted = np.zeros(len(seen), dtype=bool)
        fitted[Randomness.for_tests(2).generator("quantile half", 0).permutation(apart)[::3]] = True
        scores["quantile"] = quantile_scores(known, seen, fitted)
        judged_on = ~fitted
    if shadows is not None:
        found, coins = shadows
        scores["likelihood ratio"] = whitebox.shadow_likelihood_ratio(seen, found, coins)
        scores["likelihood ratio, offline"] = _offline(seen, found, coins)
        scores["relative likelihood"] = relative_likelihood(
            log_probability(seen), log_probability(found)
        )
    return scores, judged_on


def _offline(target: Array, shadows: Array, coins: NDArray[np.bool_]) -> Array:
    """By how many deviations a margin is above those of shadow models without the record."""
    out = ~coins
    mean = np.where(out, shadows, 0.0).sum(0) / out.sum(0)
    freedom = max(1, int(out.sum()) - shadows.shape[1])
    variance = float((np.where(out, shadows - mean, 0.0) ** 2).sum() / freedom)
    return np.asarray((target - mean) / math.sqrt(max(variance, 1e-12)))


def attack(
    margins: ArrayLike,
    included: ArrayLike,
    *,
    records: ArrayLike | None = None,
    labels: ArrayLike | None = None,
    shadows: tuple[ArrayLike, ArrayLike] | None = None,
    random: bool = False,
    delta: float = 1e-5,
    claimed: float | None = None,
    most: Any = None,
    confidence: float = 0.95,
) -> MembershipAudit:
    """Run every attack that the given facts allow.

    Args:
        margins: For each record, the label's logit above the log-sum-exp of the others
            (:func:`dpfy.audit.whitebox.margin`).
        included: Whether each record was trained on.
        records: The records' numbers, for the quantile attack and the blind classifier.
        labels: The records' classes.
        shadows: Margins on shadow models, and which records each was trained on: both [models,
            records].
        random: Whether every record was trained on or not by a fair coin of its own, tossed before
            the training. Only then there is a bound on epsilon.
        delta: The delta of the bound.
        claimed: The epsilon of the model's guarantee at `delta`.
        most: The largest true-positive rate that the guarantee allows, as a function of the
            false-positive rate.
        confidence: Of all limits of one kind together.

    Returns:
        The attacks, the strongest first.

    Raises:
        InvalidInput: Numbers do not pair, or too few of one side.

    Guarantees: where `random` is true and the guarantee is true, `violated` is false with
    probability at least `confidence`.

    Example:
        >>> import numpy as np
        >>> from dpfy.audit import membership
        >>> rng = np.random.default_rng(0)
        >>> inside = np.arange(400) % 2 == 0
        >>> found = membership.attack(rng.normal(inside * 1.0, 1.0), inside)
        >>> found.detected, found.sentences()[-1]
        (True, 'no bound: membership was not random')
    """
    seen, coins = np.asarray(margins, dtype=np.float64), np.asarray(included, dtype=bool)
    _check(seen, coins, random)
    for name, given in (("records", records), ("labels", labels)):
        if given is not None and len(np.asarray(given)) != len(seen):
            rule = f"must be {len(seen)}, one for each margin"
            raise InvalidInput(name, len(np.asarray(given)), rule)
    # Ties are broken by position: members must not come first.
    order = Randomness.for_tests(3).generator("order of records", 0).permutation(len(seen))
    seen, coins = seen[order], coins[order]
    classes = 0 if labels is None else int(np.asarray(labels).max(initial=0)) + 1
    known = None if records is None else projected(records, labels, classes)[order]
    pairs = None
    if shadows is not None:
        found, trained = np.asarray(shadows[0], float), np.asarray(shadows[1], bool)
        if found.shape != trained.shape or found.shape[1:] != seen.shape:
            rule = f"must be [models, {len(seen)}], with the records each was trained on"
            raise InvalidInput("shadows", found.shape, rule)
        if not np.isfinite(found).all():
            raise InvalidInput("shadows", "NaN or infinity", "every margin must be finite")
        pairs = (found[:, order], trained[:, order])
    scores, judged_on = scores_of(seen, coins, known, pairs)
    each = 1 - (1 - check.inside_unit("confidence", confidence)) / len(scores)
    results = sorted(
        (
            judged(name, TrialScores.of(values[judged_on], coins[judged_on]), each, most)
            for name, values in scores.items()
        ),
        key=lambda result: -result.auc_low,
    )
    blind = None
    if known is not None:
        blind = judged("blind", TrialScores.of(*blind_scores(known, coins)), confidence)
    bound = _bound(scores, coins, delta, confidence) if random else None
    return MembershipAudit(
        int(coins.sum()),
        int((~coins).sum()),
        tuple(results),
        blind,
        bound,
        claimed,
        confidence,
        0 if pairs is None else len(pairs[0]),
    )


def _bound(
    scores: Mapping[str, Array], coins: NDArray[np.bool_], delta: float, confidence: float
) -> LowerBound:
    """The best one-run bound (Steinke, Nasr & Jagielski 2023) over attacks that were fixed before a
    score was seen; the quantile attack, which is fitted on the coins, is not one of them.
    """
    fixed = {name: values for name, values in scores.items() if name != "quantile"}
    each = 1 - (1 - confidence) / len(fixed)
    counts = [max(2, round(share * len(coins))) for share in GUESSES]
    found = [
        one_run.best_of(
            values - np.median(values),
            coins,
            counts,
            lambda guesses, c: one_run.steinke(guesses, delta=delta, confidence=c),
            each,
        )
        for values in fixed.values()
    ]
    return max(found, key=lambda bound: bound.epsilon)


def _check(margins: Array, coins: NDArray[np.bool_], random: bool) -> None:
    if margins.ndim != 1 or margins.shape != coins.shape:
        raise InvalidInput(
            "margins", margins.shape, f"must be one number for each of {len(coins)} records"
        )
    if not np.isfinite(margins).all():
        raise InvalidInput("margins", "NaN or infinity", "the model must give finite scores")
    inside, count = int(coins.sum()), len(coins)
    for name, number in (("members", inside), ("others", count - inside)):
        if number < LEAST:
            raise InvalidInput(name, number, f"must be at least {LEAST} records")
    if random and abs(inside - count / 2) > 2.5 * math.sqrt(count):
        rule = (
            f"cannot be the heads of {count} fair coins: a bound needs a coin for each record; "
            "leave --random out"
        )
        raise InvalidInput("members", inside, rule)
