"""How many canaries or runs an estimator needs before it can certify anything: to be read before an
audit, not after.
"""

from __future__ import annotations

import math

from dpfy.audit import intervals
from dpfy.audit.bounds import by_accuracy
from dpfy.audit.families import GaussianFamily, TradeoffFamily, weakest
from dpfy.audit.one_run import Guesses, steinke
from dpfy.core import check


def most_by_rates(trials: int, confidence: float = 0.95, delta: float = 0.0) -> float:
    """The largest epsilon that `trials` runs, half of them with the canary, certify by rates if the
    attacker never errs.
    """
    upper = intervals.upper(0, max(1, trials // 2), (1 - confidence) / 2)
    return max(0.0, math.log(max(1e-300, 1 - upper - delta) / upper))


def most_in_one_run(canaries: int, *, delta: float = 0.0, confidence: float = 0.95) -> float:
    """The largest epsilon that one run certifies by guesses if all are right."""
    return steinke(
        Guesses(canaries, canaries, canaries), delta=delta, confidence=confidence
    ).epsilon


def detection(
    canaries: int, accuracy: float, claim_accuracy: float, confidence: float = 0.95
) -> float:
    """The probability that an attacker of this accuracy is caught exceeding a claim that allows
    `claim_accuracy`.
    """
    from scipy.special import bdtrc

    needed = _needed(canaries, claim_accuracy, confidence)
    return float(bdtrc(needed - 1, canaries, accuracy)) if needed <= canaries else 0.0


def _needed(canaries: int, allowed: float, confidence: float) -> int:
    """The smallest count of right guesses whose lower limit is above `allowed`."""
    low, high = 0, canaries + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (low, middle)
            if intervals.lower(middle, canaries, 1 - confidence) > allowed
            else (middle, high)
        )
    return high


def canaries_needed(
    epsilon: float,
    delta: float,
    *,
    share: float = 0.8,
    family: TradeoffFamily | None = None,
    confidence: float = 0.95,
    power: float = 0.9,
) -> int:
    """Independent white-box canaries with which `by_accuracy` certifies `share` of a tight
    `epsilon` with probability `power`.
    """
    chosen = family if family is not None else GaussianFamily()
    check.inside_unit("share", share)
    true = weakest(lambda s: chosen.epsilon(s, delta) <= epsilon, chosen.claim, precision=1e-4)
    wanted = weakest(
        lambda s: chosen.epsilon(s, delta) <= share * epsilon, chosen.claim, precision=1e-4
    )
    accuracies = [(1 + chosen.advantage(s)) / 2 for s in (true, wanted)]
    count = 8
    while detection(count, accuracies[0], accuracies[1], confidence) < power:
        count = math.ceil(count * 1.1)
    return count


def certified(canaries: int, epsilon: float, delta: float, confidence: float = 0.95) -> float:
    """What `by_accuracy` certifies, typically, of a tight Gaussian `epsilon` with this many
    white-box canaries.
    """
    family = GaussianFamily()
    true = weakest(lambda s: family.epsilon(s, delta) <= epsilon, 1.0, precision=1e-4)
    correct = round(canaries * (1 + family.advantage(true)) / 2)
    return by_accuracy(correct, canaries, delta=delta, family=family, confidence=confidence).epsilon
