"""What an attacker learns from answers, measured: a lower bound on the epsilon of noisy votes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpfy import accounting
from dpfy.audit.bounds import by_accuracy
from dpfy.audit.families import ClaimedFamily
from dpfy.audit.verdict import AuditVerdict
from dpfy.core import check, events
from dpfy.core.errors import Unsupported
from dpfy.core.guarantee import Curve
from dpfy.core.randomness import Randomness
from dpfy.mechanisms.exact import Bits
from dpfy.prediction.rules import GaussianVotes, moved


class _Trial:
    """The releases of one trial, each with random bits of its own. No budget: nothing is released
    to anybody.
    """

    def __init__(self, randomness: Randomness, number: int) -> None:
        self._randomness, self._number, self._spent = randomness, number, 0

    def spend(self, kind: str) -> Bits:
        """See `rules.PaidReleases`."""
        self._spent += 1
        return Bits(self._randomness, f"audited votes {self._spent}", self._number)

    def need(self, *kinds: str) -> None:
        """See `rules.PaidReleases`."""

    def same(self, name: str) -> Bits:
        """See `rules.PaidReleases`."""
        return Bits(self._randomness, f"audited votes {name}", self._number)


def audit_votes(
    rule: GaussianVotes,
    *,
    answers: int,
    trials: int,
    delta: float = 1e-5,
    confidence: float = 0.95,
    seed: int = 0,
) -> AuditVerdict:
    """Votes as close as they can be: a canary decides which of two classes leads by one, on each of
    `answers` questions.

    In each trial a fair coin says whether the canary votes for the first class or for the second;
    the attacker sees all answers, and guesses the class that was said more often (for a tie this is
    the likelihood ratio). What is charged is the claim: the same number of `NoisyArgmax`.

    Guarantees: as `audit.bounds.by_accuracy`.
    """
    if type(rule) is not GaussianVotes:
        raise Unsupported(
            f"an audit of the rule {rule.name!r}", 'audit the rule "gaussian" with the same noise'
        )
    check.integer("answers", answers, most=1 << 12)
    check.integer("trials", trials, least=10, most=1 << 24)
    randomness = Randomness.for_tests(seed)
    coins = randomness.generator("coins", 0).random(trials) < 0.5
    right = sum(
        int(_guess(rule, bool(coin), answers, randomness, k) == coin)
        for k, coin in enumerate(coins)
    )

    def curve(strength: float) -> Curve:
        return accounting.curve(
            events.Repeated(events.NoisyArgmax(rule.sigma / strength, rule.classes), answers)
        )

    family = ClaimedFamily(curve, precision=0.02)
    bound = by_accuracy(right, trials, delta=delta, family=family, confidence=confidence)
    return AuditVerdict(bound, family.epsilon(1.0, delta))


def close(classes: int, first: bool) -> NDArray[np.int64]:
    """The first class leads the second by one vote, or the second the first; nobody votes for the
    others.
    """
    counts = np.zeros(classes, np.int64)
    counts[:2] = (1, 0) if first else (0, 1)
    counts[:2] += 1000
    return counts


def _guess(
    rule: GaussianVotes, first: bool, answers: int, randomness: Randomness, number: int
) -> bool:
    """Whether the first class was said more often than not."""
    purse, counts = _Trial(randomness, number), moved(close(rule.classes, first))
    said = sum(rule.answer(lambda bits: counts, purse) == 0 for _ in range(answers))
    return 2 * said > answers
