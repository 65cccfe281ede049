"""Lower bounds on epsilon from scores of independent trials: many runs, or many canaries that do
not disturb each other.

A trial is one coin: the canary was in, or out, and the attacker saw one score. Every estimator
fixes its threshold without a look at the trials that it then counts.

Exact (Clopper & Pearson 1934) one-sided confidence limits on a probability, from a count.

Extraction from language models: the secret sharer's exposure, and the epsilon that repeated low
ranks certify.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpfy.audit.families import GaussianFamily, TradeoffFamily, gaussian_epsilon, weakest
from dpfy.audit.verdict import LowerBound
from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


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


INDEPENDENT = "trials are independent: one canary's score does not depend on another canary's coin"
THRESHOLD = "the threshold was fixed before the counted trials were seen"
SHAPE = (
    "between nothing and the claim, the leak has the shape of the family ({}); that the claim is "
    "exceeded needs no shape"
)


@dataclass(frozen=True)
class TrialScores:
    """Scores of trials in which the canary was in, and in which it was out; larger says "in"."""

    inside: NDArray[np.float64]
    outside: NDArray[np.float64]

    def __post_init__(self) -> None:
        for name in ("inside", "outside"):
            values = np.asarray(getattr(self, name), dtype=np.float64).reshape(-1)
            if not len(values) or np.isnan(values).any():
                raise InvalidInput(
                    f"scores.{name}",
                    f"{len(values)} values",
                    "must hold at least one score, and no NaN",
                )
            object.__setattr__(self, name, values)

    @classmethod
    def of(cls, scores: ArrayLike, included: ArrayLike) -> TrialScores:
        """Split scores by the coins."""
        values, coins = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
        return cls(values[coins], values[~coins])

    def __len__(self) -> int:
        return len(self.inside) + len(self.outside)

    def halves(self, seed: int) -> tuple[TrialScores, TrialScores]:
        """Two disjoint random halves."""
        rng = Randomness.for_tests(seed).generator("audit split", 0)
        a, b = rng.permutation(self.inside), rng.permutation(self.outside)
        if len(a) < 2 or len(b) < 2:
            raise InvalidInput(
                "scores", len(self), "must hold at least two scores on each side to split"
            )
        i, o = len(a) // 2, len(b) // 2
        return TrialScores(a[:i], b[:o]), TrialScores(a[i:], b[o:])


@dataclass(frozen=True)
class ErrorRates:
    """What a threshold gives: counts, and one-sided limits that hold together."""

    true_positives: int
    inside: int
    false_positives: int
    outside: int

    @classmethod
    def at(cls, scores: TrialScores, threshold: float) -> ErrorRates:
        """Count scores above `threshold`."""
        hits, alarms = (
            int((scores.inside > threshold).sum()),
            int((scores.outside > threshold).sum()),
        )
        return cls(hits, len(scores.inside), alarms, len(scores.outside))

    def limits(self, alpha: float) -> tuple[float, float]:
        """(upper limit of the false-positive rate, upper limit of the false-negative rate), both
        true but for `alpha`.
        """
        fpr = upper(self.false_positives, self.outside, alpha / 2)
        fnr = upper(self.inside - self.true_positives, self.inside, alpha / 2)
        return fpr, fnr


def clopper_pearson(
    scores: TrialScores,
    *,
    delta: float,
    confidence: float = 0.95,
    threshold: float | None = None,
    seed: int = 0,
) -> LowerBound:
    """The hypothesis-testing bound (Jagielski et al. 2020): no assumption on the shape of the leak.

    Without a `threshold`, one half of the trials chooses it and the other half is counted.
    """
    counted, at = _threshold(scores, delta, confidence, threshold, seed)
    fpr, fnr = ErrorRates.at(counted, at).limits(1 - confidence)
    epsilon = _from_rates(fpr, fnr, check.fraction("delta", delta))
    detail = {"fpr_upper": fpr, "fnr_upper": fnr, "threshold": at}
    return LowerBound(
        epsilon,
        delta,
        confidence,
        "clopper-pearson",
        len(counted),
        (INDEPENDENT, THRESHOLD),
        detail,
    )


def gaussian_fit(
    scores: TrialScores,
    *,
    delta: float,
    confidence: float = 0.95,
    threshold: float | None = None,
    seed: int = 0,
) -> LowerBound:
    """The Gaussian-DP bound (Nasr et al. 2023): two limits on the rates exclude every mu below
    mu_lower.
    """
    from scipy.special import ndtri

    counted, at = _threshold(scores, delta, confidence, threshold, seed)
    fpr, fnr = ErrorRates.at(counted, at).limits(1 - confidence)
    mu = max(0.0, float(-ndtri(fpr) - ndtri(fnr))) if fpr < 1 and fnr < 1 else 0.0
    assumptions = (INDEPENDENT, THRESHOLD, SHAPE.format("gaussian"))
    detail = {"fpr_upper": fpr, "fnr_upper": fnr, "threshold": at, "mu_lower": mu}
    return LowerBound(
        gaussian_epsilon(mu, delta),
        delta,
        confidence,
        "gaussian-fit",
        len(counted),
        assumptions,
        detail,
    )


def by_accuracy(
    correct: int,
    guesses: int,
    *,
    delta: float,
    family: TradeoffFamily | None = None,
    confidence: float = 0.95,
) -> LowerBound:
    """From guesses of fair coins: a family member allows at most (1 + total variation) / 2 of them
    to be right.

    One binomial count instead of two: the most powerful of the estimators here when guesses of all
    canaries are worth making.

    Guarantees: for a mechanism that keeps its claim, the bound is above the claimed epsilon with
    probability at most 1 - confidence, whatever the shape of its leak, if trials are independent
    and coins fair.
    """
    chosen = family if family is not None else GaussianFamily()
    accuracy = lower(correct, guesses, 1 - check.inside_unit("confidence", confidence))
    strength = weakest(
        lambda s: (1 + chosen.advantage(s)) / 2 < accuracy, chosen.claim, precision=chosen.precision
    )
    epsilon = chosen.epsilon(strength, delta) if strength > 0 else 0.0
    assumptions = (
        INDEPENDENT,
        THRESHOLD,
        "canaries were in by independent fair coins",
        SHAPE.format(chosen.name),
    )
    detail = {"accuracy": correct / guesses, "accuracy_lower": accuracy, "strength_lower": strength}
    return LowerBound(epsilon, delta, confidence, "accuracy", guesses, assumptions, detail)


def _from_rates(fpr: float, fnr: float, delta: float) -> float:
    """The largest epsilon that the two error rates exclude."""
    pairs = ((1 - fnr - delta, fpr), (1 - fpr - delta, fnr))
    found = [math.log(top / bottom) if bottom > 0 else math.inf for top, bottom in pairs if top > 0]
    return max([0.0, *found])


def _threshold(
    scores: TrialScores, delta: float, confidence: float, threshold: float | None, seed: int
) -> tuple[TrialScores, float]:
    """The trials to count, and a threshold that they had no part in."""
    check.inside_unit("confidence", confidence)
    if threshold is not None:
        return scores, threshold
    chooser, counted = scores.halves(seed)
    candidates = np.unique(np.concatenate([chooser.inside, chooser.outside]))
    if len(candidates) > 400:
        candidates = candidates[np.linspace(0, len(candidates) - 1, 400).astype(int)]
    best = max(
        candidates,
        key=lambda at: _from_rates(
            *ErrorRates.at(chooser, float(at)).limits(1 - confidence), delta
        ),
    )
    return counted, float(best)


def ranks(losses: ArrayLike, chosen: ArrayLike) -> NDArray[np.int64]:
    """The rank (1 is best) of each chosen secret's loss among its candidates; [secrets,
    candidates]. Ties count against the attacker.
    """
    values, picks = np.asarray(losses, dtype=np.float64), np.asarray(chosen, dtype=np.int64)
    if values.ndim != 2 or len(picks) != len(values):
        raise InvalidInput(
            "losses", values.shape, "must be [secrets, candidates], one chosen candidate a secret"
        )
    own = values[np.arange(len(values)), picks]
    return np.asarray((values <= own[:, None]).sum(1))


def exposure(rank: ArrayLike, candidates: int) -> NDArray[np.float64]:
    """log2 of candidates over rank (Carlini et al. 2019): 0 or 1 is no memory, log2(candidates) is
    full extraction.
    """
    return np.asarray(
        math.log2(check.integer("candidates", candidates))
        - np.log2(np.asarray(rank, dtype=np.float64))
    )


def from_ranks(
    rank: ArrayLike, candidates: int, *, most: int = 1, delta: float, confidence: float = 0.95
) -> LowerBound:
    """A lower bound on epsilon for replace-one: a secret drawn uniformly has rank at most k with
    probability at most e^eps k/n + delta.

    `most` (k) must be fixed in advance. Secrets in one run share it, so each must be its own unit
    and the ranks independent.
    """
    found = np.asarray(rank)
    hits = int((found <= check.integer("most", most)).sum())
    limit = lower(hits, len(found), 1 - check.inside_unit("confidence", confidence)) - delta
    base = most / check.integer("candidates", candidates)
    epsilon = max(0.0, math.log(limit / base)) if limit > 0 else 0.0
    assumptions = (
        "each secret was drawn uniformly from its candidates, after the candidates were fixed",
        "ranks of different secrets are independent",
        "neighbours differ in one secret replaced by another (replace-one)",
    )
    detail = {
        "hits": float(hits),
        "most": float(most),
        "mean_exposure": float(exposure(found, candidates).mean()),
    }
    return LowerBound(epsilon, delta, confidence, "exposure", len(found), assumptions, detail)
