"""Before a search: what each way to pay would cost, or how much noise it would leave, and what the
law of the trials lets one hope for; and settings that need no search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dpfy.accounting import planning as diminishing
from dpfy.accounting import tuning as prices
from dpfy.core import check
from dpfy.core.errors import DpfyError
from dpfy.core.events import Event, gamma_for
from dpfy.core.unit import Adjacency
from dpfy.plan.recipe import Recipe, dpsgd
from dpfy.tuning.claim import LARGE_FACTOR
from dpfy.tuning.routes import (
    COMPOSITION,
    HELD_OUT,
    LAWS,
    NOISY_MAX,
    RANDOM,
    SUBSET,
    PrivacyTarget,
    SearchRoute,
    calibrate_search,
)
from dpfy.tuning.space import Settings

RATE = 0.5
"""The rate of `defaults` where noise is no longer than a gradient; beyond, it falls with the root
of the noise.
"""
TENTH = 0.1
MOST_K = 2_000_000
CONSIDER = {
    RANDOM: "the best trial is released; how many there were is never known",
    COMPOSITION: "every trial may be shown; the only way for searches that look at scores, or "
    "prune",
    NOISY_MAX: "every trial is charged, and one of the best is chosen by records held out, charged "
    "once",
    SUBSET: "trials see a part of the records; one more run on all of them, with settings that "
    "were scaled",
    "public": "free, where there is public data like the private",
    "none": "no search: requires good defaults (dpfy.tuning.planning.defaults)",
}


@dataclass(frozen=True)
class RouteOffer:
    """One way to pay: the noise of a trial at the epsilon asked for, and how many times that of a
    run without a search it is.

    `tenth` is the chance that a trial has settings among the best tenth of the space; `few` that
    there are fewer than half of the trials asked for; `many` the number of trials that is not
    exceeded in 99 of 100 searches.
    """

    route: str
    law: str
    noise_multiplier: float
    noise_ratio: float
    training_alone: float
    tenth: float
    few: float
    many: int
    note: str

    def to_json(self) -> dict[str, Any]:
        """As a row of a table."""
        return dict(self.__dict__)


def offers(
    recipe: Recipe,
    target: PrivacyTarget,
    trials: int,
    *,
    sample: float = 0.25,
    small: Recipe | None = None,
) -> list[RouteOffer]:
    """Every way to pay for `trials` trials of a recipe within the target, the least noise first;
    without a search, and on public data, too.

    `small` is what a trial of a search on a subset does.
    """
    check.integer("trials", trials, least=2)
    plain = target.least(recipe.event)
    alone = target.reached(recipe.event(plain))
    rows = [
        RouteOffer(
            "public",
            "",
            plain,
            1.0,
            alone,
            1 - (1 - TENTH) ** trials,
            0.0,
            trials,
            CONSIDER["public"],
        )
    ]
    rows.append(RouteOffer("none", "", plain, 1.0, alone, TENTH, 0.0, 1, CONSIDER["none"]))
    payments = [
        (SearchRoute(RANDOM, trials, shape, adjacency=target.adjacency), law)
        for law, shape in LAWS.items()
    ]
    payments += [(SearchRoute(COMPOSITION, trials, adjacency=target.adjacency), "")]
    payments += [(SearchRoute(NOISY_MAX, trials, score=HELD_OUT, adjacency=target.adjacency), "")]
    if small is not None:
        payments += [
            (SearchRoute(SUBSET, trials, shape, sample=sample, adjacency=target.adjacency), law)
            for law, shape in LAWS.items()
            if law != "poisson"
        ]
    for payment, law in payments:
        try:
            first = recipe if payment.route != SUBSET or small is None else small
            paid = calibrate_search(
                payment, target, [first], [recipe] if payment.route == SUBSET else []
            )
        except DpfyError:
            continue
        plan = paid.alone[0]
        rows.append(
            RouteOffer(
                payment.route,
                law,
                plan.noise_multiplier,
                plan.noise_multiplier / plain,
                target.reached(plan.event),
                tenth(payment),
                few(payment),
                many(payment),
                CONSIDER[payment.route],
            )
        )
    return sorted(rows, key=lambda row: (row.noise_multiplier, row.route))


def warning(rows: Sequence[RouteOffer]) -> str | None:
    """Where every search on private data costs more noise than it is likely to give back."""
    private = [row.noise_ratio for row in rows if row.route not in ("public", "none")]
    if not private or min(private) < LARGE_FACTOR:
        return None
    return (
        f"the cheapest search on private data multiplies the noise by {min(private):.3g}: the "
        f"settings it finds must gain more than "
        f"{min(private):.3g} times as many records would; consider public data, fewer trials, or "
        f"defaults"
    )


def totals(event: Event, trials: int, delta: float, adjacency: Adjacency) -> list[prices.Route]:
    """What trials with a given noise cost by every proven way to pay (the guide's appendix C),
    cheapest first.
    """
    return prices.routes(event, trials, delta, adjacency=adjacency)


def printed(event: Event, trials: int, delta: float, adjacency: Adjacency) -> prices.PrintedFigure:
    """The figure of the guide's appendix C.3, which is no guarantee."""
    return prices.printed(event, trials, delta, adjacency=adjacency)


def generating(payment: SearchRoute, x: float) -> float:
    """The generating function of the number of trials, E[x^K]."""
    if not payment.random:
        return float(x**payment.trials)
    if math.isinf(payment.shape):
        return math.exp(payment.trials * (x - 1))
    gamma, eta = gamma_for(payment.shape, payment.trials), payment.shape
    if eta == 0:
        return math.log1p(-(1 - gamma) * x) / math.log(gamma)
    return math.expm1(-eta * math.log1p(-(1 - gamma) * x)) / math.expm1(-eta * math.log(gamma))


def tenth(payment: SearchRoute, share: float = TENTH) -> float:
    """The chance that at least one trial has settings among the best `share` of the space."""
    return 1 - generating(payment, 1 - share)


def chance(payment: SearchRoute, number: int) -> float:
    """The probability of exactly so many trials."""
    if not payment.random:
        return float(number == payment.trials)
    if math.isinf(payment.shape):
        return math.exp(
            number * math.log(payment.trials) - payment.trials - math.lgamma(number + 1)
        )
    return (
        prices.trials_pmf(payment.shape, gamma_for(payment.shape, payment.trials), number)
        if number
        else 0.0
    )


def few(payment: SearchRoute) -> float:
    """The chance of fewer than half of the trials asked for."""
    if not payment.random:
        return 0.0
    return sum(chance(payment, number) for number in range(math.ceil(payment.trials / 2)))


def many(payment: SearchRoute, certain: float = 0.99) -> int:
    """The number of trials that is exceeded with a chance of one in a hundred."""
    if not payment.random:
        return int(payment.trials)
    total, number = chance(payment, 0), 0
    while total < certain and number < MOST_K:
        number += 1
        total += chance(payment, number)
    return number


@dataclass(frozen=True)
class Advice:
    """Settings, the reasons for them in the order in which they were found, and what was tried on
    the way: (settings, utility).
    """

    settings: Settings
    reasons: tuple[str, ...]
    tried: tuple[tuple[Settings, float], ...] = field(default=(), repr=False)

    def words(self) -> str:
        """The reasons, one a line."""
        return "\n".join(self.reasons)

    def then(self, other: Advice) -> Advice:
        """What was found before, and what was found after it."""
        return Advice(
            {**self.settings, **other.settings},
            self.reasons + other.reasons,
            self.tried + other.tried,
        )


def defaults(
    *, records: int, epsilon: float, delta: float, parameters: int, steps: int = 100
) -> Advice:
    """What an expert would type first: settings that need no search at all, from public numbers
    alone.

    Normalised clipping has no norm to search: every gradient is brought to about the same length.
    The rate follows from the noise: with gradients of length 1 a step of rate r moves the weights
    by at most r, and the noise of the average by r sigma sqrt(d) / B.
    """
    check.integer("parameters", parameters)
    turn = diminishing.knee(records, steps, epsilon)
    batch = float(min(records, 2 ** math.ceil(math.log2(max(1.0, 2 * turn)))))
    plan = dpsgd(records, batch, steps=steps).calibrate(epsilon, delta)
    spread = plan.noise_multiplier * math.sqrt(parameters) / batch
    rate = float(f"{RATE / max(1.0, spread) ** 0.5:.2g}")
    found = {
        "training.clip": "automatic", "training.clip_norm": 1.0, "training.batch_size": batch, "training.steps": steps,
        "training.optimizer": "sgd", "training.momentum": 0.9, "training.learning_rate": rate, "training.average": 0.9,
    }  # fmt: skip
    reasons = (
        "automatic clipping: every gradient has about the same length, so that there is no clip "
        "norm to search (Bu et al. 2022)",
        f"batch {batch:g}: twice the point of diminishing returns, n sqrt(epsilon / T) = "
        f"{turn:.4g}, rounded up to a power of two",
        f"{steps} steps of momentum 0.9, and the average of the weights is released: what noise "
        f"does to single steps is averaged away",
        f"learning rate {rate:g}: from the noise of the average gradient, {spread:.3g} over all "
        f"{parameters} parameters",
    )
    return Advice(found, reasons)
