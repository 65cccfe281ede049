"""The recipes of How to DP-fy ML (Ponomareva et al. 2023, section 5.4.1) as plain functions:
settings, each with its reason in words.

`utility` is yours: it trains with settings that it is given and returns how well that went, larger
is better. Give it public data, a small model, or data of a trial whose search is paid for: these
functions look at scores, and what scores of private data cost is not paid here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpfy import accounting
from dpfy.accounting import planning
from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.plan.recipe import dpsgd
from dpfy.tuning.planning import Advice, defaults
from dpfy.tuning.space import Settings

__all__ = [
    "Advice",
    "ComputeLimits",
    "batch_for_noise",
    "clip_search",
    "defaults",
    "diagonal",
    "knee",
    "largest_feasible",
    "noise_curve",
    "noise_for",
    "optimizer_rule",
    "plain_rate",
    "privacy_and_accuracy",
    "privacy_and_computation",
    "rate_sweep",
    "scaled",
]
Utility = Callable[[Settings], float]
NORMS = (0.01, 0.1, 1.0, 10.0, 100.0)
SLIGHTLY = 0.02
"""The part of the utility that counts as slightly affected."""
ALIKE = 0.01
"""Optimizers, and rates, whose utilities differ by no more than this part do similarly well."""
NEARLY = 1.1
"""So many times the least noise that a batch of all records has is nearly the least: beyond, larger
batches gain hardly anything.
"""
SMALLER = (1.0, 0.3, 0.1)
"""Parts of a clip norm that are tried with noise."""


def clip_search(
    utility: Utility,
    settings: Mapping[str, Any],
    norms: Sequence[float] = NORMS,
    *,
    slightly: float = SLIGHTLY,
    halvings: int = 2,
) -> Advice:
    """ClipSearch: without noise, the smallest clip norm that affects utility only slightly.

    `settings` are good ones for training without privacy. The reference is what they reach without
    clipping. `norms` are far apart: the gap between the one found and the next smaller one, which
    affects utility more, is halved so many times, on a logarithmic scale.
    """
    check.inside_unit("slightly", slightly)
    chosen = sorted({check.positive("norms", norm) for norm in norms})
    base = {**settings, "noise_multiplier": 0.0}
    plain = utility({**base, "clip_norm": math.inf})
    found = [({**base, "clip_norm": norm}, utility({**base, "clip_norm": norm})) for norm in chosen]
    least = plain - slightly * abs(plain)
    good = [row for row in found if row[1] >= least]
    best = good[0] if good else max(found, key=lambda row: row[1])
    low = max((norm for norm in chosen if norm < best[0]["clip_norm"]), default=None)
    for _ in range(halvings if good and low is not None else 0):
        middle = {**base, "clip_norm": float(f"{math.sqrt(low * best[0]['clip_norm']):.2g}")}
        found.append((middle, utility(middle)))
        best, low = (found[-1], low) if found[-1][1] >= least else (best, middle["clip_norm"])
    norm, chosen = best[0]["clip_norm"], sorted(row[0]["clip_norm"] for row in found)
    reached, tried = (
        f"utility {best[1]:.4g} of {plain:.4g} without clipping",
        ", ".join(f"{n:g}" for n in chosen),
    )
    why = (
        f"clip norm {norm:g}: without noise the smallest of {tried} that affects utility only "
        f"slightly ({reached})"
        if good
        else f"clip norm {norm:g}: none of those tried affects utility only slightly, and this one "
        f"the least ({reached}); try larger ones"
    )
    return Advice({"clip_norm": norm}, (why,), (({**base, "clip_norm": math.inf}, plain), *found))


def largest_feasible(
    *, records: int, batch_size: float, epochs: float, most_batch: float, most_epochs: float
) -> Advice:
    """Batch and epochs of training without privacy, scaled up together until one of their limits is
    met; then the other up to its own.
    """
    together = min(most_batch / batch_size, most_epochs / epochs, records / batch_size)
    if together < 1:
        raise InvalidInput(
            "most_batch",
            most_batch,
            "must leave room for the batch and the epochs of training without privacy",
        )
    batch, passes = (
        min(batch_size * max(together, most_batch / batch_size), records),
        max(epochs * together, most_epochs),
    )
    why = (
        f"batch {batch:g} and {passes:g} epochs: the largest that are feasible ({batch_size:g} and "
        f"{epochs:g} without privacy). Larger "
        "batches make the noise of the average smaller, more epochs use it better"
    )
    return Advice({"batch_size": float(batch), "epochs": float(passes)}, (why,))


def noise_for(
    *,
    records: int,
    batch_size: float,
    epochs: float,
    epsilon: float,
    delta: float,
    accountant: str = accounting.DEFAULT,
) -> Advice:
    """The noise multiplier that (epsilon, delta) asks for at this batch and these epochs."""
    plan = dpsgd(records, batch_size, epochs=epochs).calibrate(
        epsilon, delta, accountant=accountant
    )
    sigma, steps = plan.noise_multiplier, plan.recipe.steps
    why = (
        f"noise multiplier {sigma:.4g}: the least with which {steps} steps cost epsilon "
        f"{epsilon:g} at delta {delta:g}"
    )
    return Advice({"noise_multiplier": sigma}, (why,))


def rate_sweep(
    utility: Utility,
    settings: Mapping[str, Any],
    rates: Sequence[float],
    clips: Sequence[float] | None = None,
) -> Advice:
    """The best learning rate at fixed noise; with `clips`, the best pair."""
    norms = [settings["clip_norm"]] if clips is None else list(clips)
    if not rates or not norms:
        raise InvalidInput("rates", rates, "must be at least one")
    every = [
        {**settings, "learning_rate": rate, "clip_norm": norm} for norm in norms for rate in rates
    ]
    found = [(each, utility(each)) for each in every]
    best = max(found, key=lambda row: row[1])
    rate, norm = best[0]["learning_rate"], best[0]["clip_norm"]
    near = (
        "" if len(norms) == 1 else f" with clip norm {norm:g}, of {len(norms)} near the one found"
    )
    why = f"learning rate {rate:g}{near}: the best of {len(found)} tried (utility {best[1]:.4g})"
    return Advice({"learning_rate": rate, "clip_norm": norm}, (why,), tuple(found))


def plain_rate(utility: Utility, settings: Mapping[str, Any], rates: Sequence[float]) -> Advice:
    """The learning rate to look for a clip norm with: without privacy, the largest of those that do
    about as well as the best one.

    Where gradients are clipped, steps are as long as rate times clip norm: the larger the rate, the
    smaller the clip norm that hardly hurts, and of two that are in doubt the guide takes the
    smaller.
    """
    found = rate_sweep(utility, {**settings, "noise_multiplier": 0.0, "clip_norm": math.inf}, rates)
    best = max(reached for _, reached in found.tried)
    rate = max(
        each["learning_rate"]
        for each, reached in found.tried
        if reached >= best - ALIKE * abs(best)
    )
    why = (
        f"learning rate {rate:g} without privacy, to look for a clip norm with: the largest that "
        f"does about as well as the best one"
    )
    return Advice({"learning_rate": rate}, (why,), found.tried)


@dataclass(frozen=True)
class ComputeLimits:
    """What is feasible: the largest batch and the most epochs; and what training without privacy
    uses.
    """

    batch_size: float
    epochs: float
    most_batch: float
    most_epochs: float


def privacy_and_computation(
    utility: Utility,
    *,
    records: int,
    epsilon: float,
    delta: float,
    limits: ComputeLimits,
    rates: Sequence[float],
    norms: Sequence[float] = NORMS,
    around: float | None = 2.0,
) -> Advice:
    """Privacy and computation are given, utility is sought (the guide, p. 40): batch and epochs,
    then clip norm, then noise, then rate.

    `utility` is given batch_size, epochs, learning_rate, clip_norm (infinity clips nothing) and
    noise_multiplier (0 is none). `around` is the factor between the clip norms that are tried with
    the rate at the end; None tries the one that ClipSearch found alone.
    """
    about = {
        "batch_size": limits.batch_size,
        "epochs": limits.epochs,
        "most_batch": limits.most_batch,
        "most_epochs": limits.most_epochs,
    }
    found = largest_feasible(records=records, **about)
    found = found.then(plain_rate(utility, found.settings, rates))
    found = found.then(clip_search(utility, found.settings, norms))
    size = {"batch_size": found.settings["batch_size"], "epochs": found.settings["epochs"]}
    found = found.then(noise_for(records=records, epsilon=epsilon, delta=delta, **size))
    norm = found.settings["clip_norm"]
    clips = None if around is None else (norm / around, norm, norm * around)
    return found.then(rate_sweep(utility, found.settings, rates, clips))


def noise_curve(
    utility: Utility, settings: Mapping[str, Any], noises: Sequence[float]
) -> list[tuple[float, float]]:
    """Utility over the noise of the average gradient, sigma C / B: (noise, utility), least noise
    first.
    """
    scale = settings["clip_norm"] / settings["batch_size"]
    return sorted(
        (sigma * scale, utility({**settings, "noise_multiplier": sigma})) for sigma in noises
    )


def knee(curve: Sequence[tuple[float, float]], wanted: float) -> float | None:
    """The largest noise of a curve up to which every point reaches the wanted utility; None where
    the first does not.
    """
    found = None
    for noise, reached in sorted(curve):
        if reached < wanted:
            break
        found = noise
    return found


def batch_for_noise(
    *, records: int, steps: int, epsilon: float, delta: float, ratio: float
) -> tuple[int, float] | None:
    """The smallest batch, with its noise multiplier, whose noise over batch is at most `ratio` at
    (epsilon, delta): Figure 1 backwards.

    None where not even all records are enough.
    """
    check.positive("ratio", ratio)

    def noise(batch: int) -> float:
        return planning.noise(epsilon, batch / records, steps, delta)

    if noise(records) / records > ratio:
        return None
    low, high = 0, records
    while high - low > max(1, high // 200):
        middle = (low + high) // 2
        low, high = (low, middle) if middle and noise(middle) / middle <= ratio else (middle, high)
    return high, noise(high)


def privacy_and_accuracy(
    utility: Utility,
    settings: Mapping[str, Any],
    *,
    records: int,
    steps: int,
    epsilon: float,
    delta: float,
    noises: Sequence[float],
    wanted: float | None = None,
    norms: Sequence[float] = NORMS,
    rates: Sequence[float] | None = None,
) -> Advice:
    """Privacy and utility are given, the least computation is sought (the guide, p. 42): for large
    batches utility depends on the noise of the average alone, so it is measured with a small batch,
    and the batch that brings that noise at (epsilon, delta) is computed.

    `settings` are a small batch_size and a learning_rate that do well without privacy. `utility` is
    given steps, batch_size, learning_rate, clip_norm and noise_multiplier. Without `wanted` as much
    utility as there is to be had is: the noise is that of the curve's knee, up to which utility is
    only slightly affected; where epsilon does not allow so little, the batch is the smallest that
    has nearly the least noise it allows. With `rates`, clip norm and rate are searched last, with
    that noise: still with the small batch, so at little cost.
    """
    base = {**settings, "steps": steps}
    clipped = clip_search(utility, base, norms)
    base, small, norm = (
        {**base, **clipped.settings},
        base["batch_size"],
        clipped.settings["clip_norm"],
    )
    plain = clipped.tried[0][
        1
    ]  # without clipping: what clipping and noise take away together is to be slight
    curve = noise_curve(utility, base, noises)
    tried = tuple(({**base, "noise_multiplier": s * small / norm}, u) for s, u in curve)
    least = norm * planning.noise(epsilon, 1.0, steps, delta) / records
    most, why = _noise_of_average(curve, least, plain, wanted, small)
    found = batch_for_noise(
        records=records, steps=steps, epsilon=epsilon, delta=delta, ratio=most / norm
    )
    if found is None:
        raise Unsupported(
            f"utility {wanted:g} at epsilon {epsilon:g}: not even a batch of all {records} records "
            f"brings the noise down to {most:.4g}; it",
            "ask for less utility, more epsilon or fewer steps",
        )
    batch, sigma = found
    size = (
        f"batch {batch} with noise multiplier {sigma:.4g}: the smallest that has this noise at "
        f"epsilon {epsilon:g}, delta {delta:g}, "
    )
    chosen = {**base, "batch_size": float(batch), "noise_multiplier": sigma}
    advice = clipped.then(Advice(chosen, (why, f"{size}{steps} steps"), tried))
    if rates is None:
        return advice.then(
            Advice(
                {}, ("if computation allows, try smaller clip norms and other learning rates too",)
            )
        )
    return advice.then(_refined(utility, chosen, small, rates))


def _noise_of_average(
    curve: Sequence[tuple[float, float]],
    least: float,
    plain: float,
    wanted: float | None,
    small: float,
) -> tuple[float, str]:
    """The most noise of the average that is good enough, and why; `least` is what a batch of all
    records has.
    """
    goal = plain * (1 - SLIGHTLY) if wanted is None else wanted
    most = knee(curve, goal)
    if most is None and wanted is not None:
        best = max(reached for _, reached in curve)
        raise Unsupported(
            f"utility {wanted:g} with noise (the best that was reached is {best:.4g})",
            "ask for less, or train for more steps",
        )
    if wanted is None and (most is None or most < NEARLY * least):
        at = "below all noise that was tried" if most is None else f"{most:.4g}"
        noise = NEARLY * least
        return (
            noise,
            f"noise {noise:.4g} of the average gradient: the knee ({at}) is out of reach, and this "
            f"is nearly the least there is",
        )
    assert most is not None
    what = (
        f"utility {goal:.4g} was reached"
        if wanted is not None
        else f"utility is only slightly affected ({goal:.4g} or more)"
    )
    return (
        most,
        f"noise {most:.4g} of the average gradient: the most with which {what}, measured with "
        f"batch {small:g}",
    )


def _refined(
    utility: Utility, chosen: Mapping[str, Any], small: float, rates: Sequence[float]
) -> Advice:
    """Clip norm and rate with noise, which grows with the clip norm: smaller ones than the one
    found are tried, no larger ones.
    """
    tuned = scaled(chosen, small / chosen["batch_size"]).settings
    found = rate_sweep(utility, tuned, rates, [chosen["clip_norm"] * part for part in SMALLER])
    return Advice(
        found.settings,
        (f"{found.reasons[0]}, with batch {small:g} and the noise of the average that was found",),
        found.tried,
    )


def scaled(settings: Mapping[str, Any], factor: float) -> Advice:
    """Batch and noise multiplier times `factor`, all else as it is: the same noise of the average
    gradient at as many steps.

    The way to tune with small batches and train with a large one (McMahan et al. 2018; Anil et al.
    2021; Sander et al. 2022).
    """
    check.positive("factor", factor)
    found = {
        **settings,
        "batch_size": settings["batch_size"] * factor,
        "noise_multiplier": settings["noise_multiplier"] * factor,
    }
    why = (
        f"batch and noise multiplier {factor:g} times as large, rate and clip norm as they are: "
        f"the noise of the average is the same"
    )
    return Advice(found, (why,))


def diagonal(
    settings: Mapping[str, Any], factors: Sequence[float] = (0.25, 0.5, 1.0, 2.0, 4.0)
) -> list[Settings]:
    """Settings on the diagonal of clip norm and learning rate: their product is kept (Kurakin et
    al. 2022; Figure 2 of the guide).

    As long as nearly all gradients are clipped these train alike; so one of the two can be fixed,
    and the other searched.
    """
    norm, rate = settings["clip_norm"], settings["learning_rate"]
    return [
        {**settings, "clip_norm": norm * check.positive("factors", f), "learning_rate": rate / f}
        for f in factors
    ]


def optimizer_rule(plain: Mapping[str, float], *, alike: float = ALIKE) -> Advice:
    """Which optimizer to make private, from what each reaches without privacy: momentum SGD unless
    an adaptive one does clearly better.

    `plain` maps sgd, adam, adamw ... to utilities of tuned training without privacy.
    """
    if "sgd" not in plain:
        raise InvalidInput("plain", sorted(plain), "must hold what sgd reaches")
    best = max(plain, key=lambda name: plain[name])
    if plain["sgd"] >= plain[best] * (1 - alike):
        reached = f"{plain['sgd']:.4g} of {plain[best]:.4g}"
        why = (
            f"sgd with momentum: without privacy it does about as well ({reached}), and noise "
            f"hurts adaptive ones more"
        )
        return Advice({"optimizer": "sgd", "momentum": 0.9}, (why,))
    why = (
        f"{best}: without privacy it does clearly better than sgd ({plain[best]:.4g} of "
        f"{plain['sgd']:.4g}); tune its rate with noise"
    )
    return Advice({"optimizer": best}, (why,))
