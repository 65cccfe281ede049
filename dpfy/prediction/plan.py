"""How much noise answers need: from an epsilon and a number of questions to a claim."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from dpfy.accounting import epsilon as cost
from dpfy.accounting.gaussian import sigma_analytic
from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import EXAMPLE, Unit
from dpfy.prediction.claim import AnswersClaim, VoteClaim

C = TypeVar("C", bound=VoteClaim)
TIES = 2 / math.pi
"""The part of a Gaussian number's divergence that the side of a threshold tells, at a tie."""
CLOSE = 2e-3
"""How closely epsilon is met, from below."""
TRIES = 12
POINTS = 4097
"""Of the grid that numbers are rounded to."""
CHECK_SHARE = 0.2
"""The part of the budget (of squared moves over noise) that the checks of confident votes get."""


def spent(claim: VoteClaim) -> float:
    """The epsilon of a claim, by its own accountant."""
    return cost(claim.event, claim.delta, adjacency=claim.adjacency, accountant=claim.accountant)


def gaussian(
    epsilon: float,
    delta: float,
    *,
    voters: int,
    classes: int,
    answers: int,
    kind: type[Any] = AnswersClaim,
    **more: Any,
) -> VoteClaim:
    """Noisy votes for so many answers at (epsilon, delta): every question is answered."""

    def claim(sigma: float) -> VoteClaim:
        made: VoteClaim = kind(
            "gaussian", classes, voters, answers, answers, sigma=sigma, delta=delta, **more
        )
        return made

    return calibrated(claim, epsilon, math.sqrt(2 * answers))


def confident(
    epsilon: float,
    delta: float,
    *,
    voters: int,
    classes: int,
    queries: int,
    answers: int,
    threshold: float = 0.6,
    kind: type[Any] = AnswersClaim,
    **more: Any,
) -> VoteClaim:
    """The same where the largest count of votes must be above `threshold` of the voters: at most
    `answers` of `queries` are answered.
    """
    check.inside_unit("threshold", threshold)
    ratio = math.sqrt(queries / CHECK_SHARE) / math.sqrt(
        2 * answers / (1 - CHECK_SHARE)
    )  # noise of a check over that of a count

    def claim(sigma: float) -> VoteClaim:
        parts = {
            "sigma": sigma,
            "check_sigma": ratio * sigma,
            "threshold": round(threshold * voters, 6),
            "delta": delta,
        }
        made: VoteClaim = kind("confident", classes, voters, queries, answers, **parts, **more)
        return made

    return calibrated(claim, epsilon, math.sqrt(2 * answers / (1 - CHECK_SHARE)))


def numbers(
    epsilon: float,
    delta: float,
    *,
    voters: int,
    low: float,
    high: float,
    answers: int,
    kind: type[Any] = AnswersClaim,
    **more: Any,
) -> VoteClaim:
    """Noisy means of numbers from `low` to `high`, for so many answers at (epsilon, delta)."""
    low, high = check.interval("low, high", [low, high])

    def claim(sigma: float) -> VoteClaim:
        parts = {"sigma": sigma, "low": low, "high": high, "delta": delta}
        made: VoteClaim = kind("mean", POINTS, voters, answers, answers, **parts, **more)
        return made

    return calibrated(claim, epsilon, math.sqrt(answers))


def service(
    epsilon: float | None,
    delta: float,
    *,
    voters: int,
    classes: int,
    answers: int | None,
    queries: int | None,
    threshold: float,
    unit: Unit = EXAMPLE,
    interval: tuple[float, float] | None = None,
) -> VoteClaim:
    """The claim of a new service: confident votes where the number of `queries` is given, else one
    answer a question; means of numbers where the voters say numbers of an `interval`.
    """
    if answers is None or epsilon is None:
        raise InvalidInput(
            "answers, epsilon", (answers, epsilon), "must both be given for a new service"
        )
    if interval is not None:
        if queries is not None:
            raise InvalidInput("queries", queries, "goes with classes: every number is answered")
        low, high = interval
        return numbers(
            epsilon, delta, voters=voters, low=low, high=high, answers=answers, unit=unit
        )
    if queries is None:
        return gaussian(epsilon, delta, voters=voters, classes=classes, answers=answers, unit=unit)
    return confident(
        epsilon,
        delta,
        voters=voters,
        classes=classes,
        queries=queries,
        answers=answers,
        threshold=threshold,
        unit=unit,
    )


def calibrated(claim: Callable[[float], C], epsilon: float, length: float) -> C:
    """The claim with about the least noise that meets `epsilon`. `length` is the root of the sum of
    squared moves at noise 1.

    Guarantees: epsilon of the claim is at most `epsilon`, by the accountant that charges it.
    """
    check.epsilon("epsilon", epsilon)
    log_sigma = math.log(
        length * math.sqrt(TIES) * sigma_analytic(min(epsilon, 50.0), claim(1.0).delta)
    )
    aim, slope, before = math.log(epsilon * (1 - CLOSE / 2)), -1.0, None
    for _ in range(TRIES):
        made = claim(_rounded(math.exp(log_sigma)))
        found = spent(made)
        if epsilon * (1 - CLOSE) <= found <= epsilon:
            return made
        if not 0 < found < math.inf:
            log_sigma += 1.0 if found else -1.0
            continue
        here = log_sigma, math.log(found)
        if before is not None and here[0] != before[0]:
            slope = min(
                -0.5, max(-2.0, (here[1] - before[1]) / (here[0] - before[0]))
            )  # between 1 / sigma and 1 / sigma^2
        before, log_sigma = here, log_sigma + (aim - here[1]) / slope
    raise Unsupported(
        f"meeting epsilon {epsilon:g} with votes",
        "state the noise yourself (sigma), or ask for other numbers",
    )


def _rounded(sigma: float) -> float:
    """To six digits, so that the number on the report is the number that was used."""
    if not math.isfinite(sigma) or sigma <= 0:
        raise InvalidInput("sigma", sigma, "must be a positive number")
    return float(f"{sigma:.6g}")
