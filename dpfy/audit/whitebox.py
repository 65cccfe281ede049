"""The white-box audit: gradient canaries, each along its own coordinate, and an attacker who sees
every update.

The strongest adversary that the guarantee speaks about. For DP-SGD its log likelihood ratio is the
optimal attack, so the audit is tight: what it certifies comes close to what the accountant claims,
and a claim that is a little too good is found out.

Attack scores: one number a canary, larger says "in". Pure functions of what the attacker saw and
of public facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dpfy.audit import bounds
from dpfy.audit.bounds import TrialScores, by_accuracy
from dpfy.audit.families import TradeoffFamily
from dpfy.audit.verdict import AuditVerdict, LowerBound
from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[np.float64]


def likelihood_ratio(
    observed: ArrayLike, noise_multiplier: float, rate: float = 1.0, *, absent: float = 0.0
) -> Array:
    """Log likelihood ratio of "in" against "out" for [steps, canaries] projections, in units of the
    clip norm.

    In: with probability `rate` a step shows 1 plus noise, else 0 plus noise. Out: a step shows
    `absent` (0; -1 for a replaced canary of opposite sign) in its place. Positive is the better
    guess for a fair coin: the threshold 0 is optimal.
    """
    y = np.asarray(observed, dtype=np.float64)
    variance = check.positive("noise_multiplier", noise_multiplier) ** 2
    inside = _shifted(y, 1.0, variance, check.rate("rate", rate))
    outside = _shifted(y, absent, variance, rate) if absent else 0.0
    return np.asarray((inside - outside).sum(0))


def _shifted(y: Array, mean: float, variance: float, rate: float) -> Array:
    """log of (1 - q) + q exp((mean y - mean^2 / 2) / variance)."""
    exponent = (mean * y - mean * mean / 2) / variance
    return exponent if rate == 1 else np.logaddexp(np.log1p(-rate), np.log(rate) + exponent)


def spread(observed: ArrayLike) -> Array:
    """Largest minus smallest projection over the steps: finds noise that is not fresh at each step,
    and noise that is missing.
    """
    y = np.asarray(observed, dtype=np.float64)
    return np.asarray(y.max(0) - y.min(0))


def matched(observed: ArrayLike, encoder: ArrayLike, pattern: ArrayLike, scale: float) -> Array:
    """Log likelihood ratio under correlated noise: a square `encoder` C whitens it, and the canary
    shows as C times its pattern.

    `pattern` [steps] is 1 where the canary takes part. `scale` is the standard deviation before
    C^-1, in units of the clip norm.
    """
    c, u = np.asarray(encoder, dtype=np.float64), np.asarray(pattern, dtype=np.float64)
    if c.ndim != 2 or c.shape[0] != c.shape[1] or c.shape[1] != len(u):
        raise InvalidInput(
            "encoder", c.shape, f"must be square with one column for each of {len(u)} steps"
        )
    response = c @ u / check.positive("scale", scale)
    white = c @ np.asarray(observed, dtype=np.float64) / scale
    return np.asarray(response @ white - response @ response / 2)


def margin(logits: ArrayLike, labels: ArrayLike) -> Array:
    """The label's logit above the log-sum-exp of the others: the loss on a scale on which it is
    close to Gaussian.
    """
    values, own = np.asarray(logits, dtype=np.float64), np.asarray(labels, dtype=np.int64)
    rows = np.arange(len(values))
    others = values.copy()
    others[rows, own] = -np.inf
    top = others.max(1)
    return np.asarray(values[rows, own] - top - np.log(np.exp(others - top[:, None]).sum(1)))


def shadow_likelihood_ratio(target: ArrayLike, shadows: ArrayLike, included: ArrayLike) -> Array:
    """The likelihood-ratio attack (Carlini et al. 2022): Gaussians fitted to each canary's scores
    on shadow models with and without it.

    `target` [canaries], `shadows` and `included` [models, canaries]. Spreads are pooled over
    canaries, which few shadows need.
    """
    scores, coins = np.asarray(shadows, dtype=np.float64), np.asarray(included, dtype=bool)
    seen = np.asarray(target, dtype=np.float64)
    if scores.shape != coins.shape or scores.shape[1:] != seen.shape:
        raise InvalidInput(
            "shadows", scores.shape, "must pair with the coins, one column for each canary"
        )
    if not (coins.any(0).all() and (~coins).any(0).all()):
        raise InvalidInput(
            "shadows", len(scores), "every canary must be in some shadow models and out of others"
        )
    inside, outside = _fitted(scores, coins), _fitted(scores, ~coins)
    return _log_density(seen, *inside) - _log_density(seen, *outside)


def _fitted(scores: Array, chosen: NDArray[np.bool_]) -> tuple[Array, float]:
    mean = np.where(chosen, scores, 0.0).sum(0) / chosen.sum(0)
    freedom = max(1, int(chosen.sum()) - scores.shape[1])
    variance = float((np.where(chosen, scores - mean, 0.0) ** 2).sum() / freedom)
    return mean, max(variance, 1e-12)


def _log_density(x: Array, mean: Array, variance: float) -> Array:
    return np.asarray(-((x - mean) ** 2) / (2 * variance) - 0.5 * np.log(variance))


NOISES = {"": 1.0, " at 0.71 of the noise": 0.5**0.5, " at half the noise": 0.5}
ATTACKS = len(NOISES) + 1

SHOWS = (
    "what an attacker learns who chooses the canaries' gradients and sees every noisy update; at "
    "or below the claim, the code that "
    "samples, clips, sums, adds noise and counts steps behaved as charged for these canaries"
)
DOES_NOT_SHOW = (
    "that other data, other layers or other configurations leak no more; that the seed was secret; "
    "anything about the model's "
    "outputs, which leak less"
)


@dataclass(frozen=True)
class ObservedSums:
    """What the attacker saw: [steps, canaries] projections of the noisy sums in units of the clip
    norm, and the coins.

    `groups` names sets of canaries (a layer, the biases) that are judged by themselves too.
    """

    projections: NDArray[np.float64]
    included: NDArray[np.bool_]
    groups: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.projections.ndim != 2 or self.projections.shape[1:] != self.included.shape:
            raise InvalidInput(
                "projections",
                self.projections.shape,
                "must be [steps, canaries], one coin for each canary",
            )


@dataclass(frozen=True)
class AuditedClaim:
    """What was claimed, as far as the attacker may know it: all of it is public.

    `absent` is what an excluded canary shows instead of 0: -1 where neighbours replace one canary
    by its opposite.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    rate: float
    family: TradeoffFamily
    absent: float = 0.0


def fair_coins(count: int, seed: int | None = None) -> NDArray[np.bool_]:
    """One fair coin for each canary, from the operating system unless a test fixes the seed."""
    randomness = Randomness.from_os() if seed is None else Randomness.for_tests(seed)
    return (
        randomness.generator("audit coins", 0)
        .integers(2, size=check.integer("canaries", count))
        .astype(bool)
    )


def ratio(observed: ObservedSums, claim: AuditedClaim, noise: float = 1.0) -> NDArray[np.float64]:
    """The log likelihood ratio of each canary under the claim, or under the claim with its noise
    multiplied.
    """
    return likelihood_ratio(
        observed.projections, noise * claim.noise_multiplier, claim.rate, absent=claim.absent
    )


def best_attack(
    observed: ObservedSums, claim: AuditedClaim, confidence: float, seed: int = 0
) -> tuple[str, int, int, float]:
    """The attack and group whose share of right guesses has the largest lower limit: (name, right,
    counted, limit).

    Attacks: the likelihood ratio with threshold 0; the same for less noise, which is better where
    noise is missing; and the spread over steps, with a threshold chosen on half of the canaries.
    All limits hold together at `confidence` (Bonferroni).
    """
    members = {"all": np.ones(len(observed.included), dtype=bool), **observed.groups}
    each = _each(confidence, len(members))
    found = []
    ratios = {
        f"likelihood ratio{words}": ratio(observed, claim, noise) for words, noise in NOISES.items()
    }
    for name, chosen in members.items():
        coins = observed.included[chosen]
        for attack, values in ratios.items():
            found.append(
                (f"{attack}, {name}", int(((values[chosen] > 0) == coins).sum()), len(coins))
            )
        found.append((f"spread, {name}", *_by_spread(observed, chosen, seed)))
    limits = [
        (name, right, counted, bounds.lower(right, counted, 1 - each))
        for name, right, counted in found
    ]
    return max(limits, key=lambda row: row[3])


def audit(
    observed: ObservedSums, claim: AuditedClaim, *, confidence: float = 0.95, seed: int = 0
) -> AuditVerdict:
    """The lower bound from the best attack, beside the claim. The family is the same for all, so
    the largest limit is the best.
    """
    name, right, counted, _ = best_attack(observed, claim, confidence, seed)
    each = _each(confidence, 1 + len(observed.groups))
    bound = by_accuracy(right, counted, delta=claim.delta, family=claim.family, confidence=each)
    best = LowerBound(
        bound.epsilon,
        bound.delta,
        confidence,
        f"white-box {name}",
        counted,
        bound.assumptions,
        dict(bound.detail),
    )
    return AuditVerdict(best, claim.epsilon, SHOWS, DOES_NOT_SHOW)


def _each(confidence: float, groups: int) -> float:
    """The confidence of each of the attacks on each group with which all hold together."""
    return 1 - (1 - check.inside_unit("confidence", confidence)) / (ATTACKS * groups)


def _by_spread(observed: ObservedSums, chosen: NDArray[np.bool_], seed: int) -> tuple[int, int]:
    """Right guesses on one half of the canaries, by the threshold that was best on the other
    half.
    """
    values, coins = spread(observed.projections[:, chosen]), observed.included[chosen]
    order = Randomness.for_tests(seed).generator("spread split", 0).permutation(len(values))
    choosing, counting = order[: len(order) // 2], order[len(order) // 2 :]
    candidates = np.unique(values[choosing])
    if len(candidates) < 2:
        return int((~coins[counting]).sum()), len(counting)
    between = (candidates[1:] + candidates[:-1]) / 2
    between = between[np.linspace(0, len(between) - 1, min(len(between), 200)).astype(int)]
    best = max(between, key=lambda at: ((values[choosing] > at) == coins[choosing]).sum())
    return int(((values[counting] > best) == coins[counting]).sum()), len(counting)


def roc(observed: ObservedSums, claim: AuditedClaim) -> TrialScores:
    """The likelihood ratios split by coin, for plots and for the other estimators."""
    return TrialScores.of(ratio(observed, claim), observed.included)
