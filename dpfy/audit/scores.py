"""Attack scores: one number a canary, larger says "in". Pure functions of what the attacker saw and
of public facts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpfy.core import check
from dpfy.core.errors import InvalidInput

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
