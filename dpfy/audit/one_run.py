"""One run, many canaries: bounds that hold although all canaries share the run's randomness.

Each of m canaries is in by its own fair coin. The attacker sees one output, guesses the coins of r
canaries (chosen from the output: the highest and the lowest scores) and abstains from the rest.
Only the number of right guesses counts.

How many canaries or runs an estimator needs before it can certify anything: to be read before an
audit, not after.

The label-inference audit: how well answers tell which of two labels a record has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpfy.audit import bounds
from dpfy.audit.bounds import by_accuracy
from dpfy.audit.families import GaussianFamily, Tradeoff, TradeoffFamily, weakest
from dpfy.audit.verdict import AuditVerdict, LowerBound
from dpfy.core import check
from dpfy.core.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

COINS = "every canary was in by its own fair coin, and the coins were kept from the trainer"
COUNTS = "the numbers of guesses were fixed in advance"


@dataclass(frozen=True)
class Guesses:
    """Of `canaries` coins the attacker guessed `made` and had `right`."""

    canaries: int
    made: int
    right: int

    def __post_init__(self) -> None:
        check.integer("canaries", self.canaries)
        if not 0 <= self.right <= self.made <= self.canaries:
            raise InvalidInput(
                "guesses",
                (self.canaries, self.made, self.right),
                "must be canaries >= made >= right >= 0",
            )

    @classmethod
    def from_scores(cls, scores: ArrayLike, included: ArrayLike, made: int) -> Guesses:
        """Guess "in" for the highest made/2 scores and "out" for the lowest; ties are broken by
        position, not by coin.
        """
        values, coins = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
        if np.isnan(values).any() or values.shape != coins.shape:
            raise InvalidInput("scores", values.shape, "must pair with the coins, without NaN")
        order = np.argsort(values, kind="stable")
        low, high = order[: made // 2], order[len(order) - (made - made // 2) :]
        return cls(len(values), made, int(coins[high].sum() + (~coins[low]).sum()))


def p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """At least the probability of so many right guesses under any (epsilon, delta)-DP mechanism
    (Steinke et al. 2023, Theorem 5.2).

    Pure DP makes the count at most Binomial(made, e^eps / (1 + e^eps)) in tail; delta adds 2 m
    delta times the steepest slope of that tail.
    """
    from scipy.special import bdtrc
    from scipy.stats import binom

    right, made = guesses.right, guesses.made
    if right == 0:
        return 1.0
    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(bdtrc(right - 1, made, chance))
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), made, chance))
    slope = float((below / np.arange(1, right + 1)).max())
    return min(1.0, tail + 2 * guesses.canaries * delta * slope)


def steinke(guesses: Guesses, *, delta: float, confidence: float = 0.95) -> LowerBound:
    """The bound of Steinke, Nasr & Jagielski 2023: valid for any mechanism, no shape and no
    independence of scores needed.
    """
    alpha = 1 - check.inside_unit("confidence", confidence)
    epsilon = (
        weakest(lambda e: p_value(guesses, e, delta) < alpha, 1.0)
        if p_value(guesses, 0.0, delta) < alpha
        else 0.0
    )
    return LowerBound(
        epsilon, delta, confidence, "one-run", guesses.canaries, (COINS, COUNTS), _detail(guesses)
    )


def too_many_right(guesses: Guesses, tradeoff: Tradeoff, alpha: float) -> bool:
    """Whether so many right guesses have probability below `alpha` under f-DP (Mahloujifar, Melis &
    Chaudhuri 2024).

    For any f-DP mechanism the tail masses r_i = sum over j >= i of (j/m) p_j and h_i = sum over j
    >= i of (1 - j/m) p_j obey h_(i-1) >= f(1 - r_i). Starting from tail `alpha` at the observed
    count, the smallest masses that obey it are added up; if they exceed what there is, the tail was
    smaller than `alpha`. `tradeoff` must be symmetric.
    """
    right, made = guesses.right, guesses.made
    share = made / guesses.canaries
    r, h = alpha * share * right / made, alpha * share * (made - right) / made
    for i in range(right - 1, -1, -1):
        grown = max(h, tradeoff(1 - r))
        r, h = r + (i / (made - i)) * (grown - h), grown
        if r + h > share:
            return True
    return False


def f_dp(
    guesses: Guesses,
    *,
    delta: float,
    family: TradeoffFamily | None = None,
    confidence: float = 0.95,
) -> LowerBound:
    """The f-DP refinement: the weakest member of the family that could have given so many right
    guesses.

    Guarantees: for a mechanism that keeps the claimed trade-off curve, the bound exceeds the
    claimed epsilon with probability at most 1 - confidence, with all canaries in one run.
    """
    chosen = family if family is not None else GaussianFamily()
    alpha = 1 - check.inside_unit("confidence", confidence)
    strength = weakest(
        lambda s: too_many_right(guesses, chosen.tradeoff(s), alpha),
        chosen.claim,
        precision=chosen.precision,
    )
    epsilon = chosen.epsilon(strength, delta) if strength > 0 else 0.0
    shape = f"the leak has the shape of the family ({chosen.name})"
    detail = _detail(guesses) | {"strength_lower": strength}
    return LowerBound(
        epsilon, delta, confidence, "one-run f-DP", guesses.canaries, (COINS, COUNTS, shape), detail
    )


def best_of(
    scores: ArrayLike,
    included: ArrayLike,
    counts: Sequence[int],
    estimate: Callable[[Guesses, float], LowerBound],
    confidence: float = 0.95,
) -> LowerBound:
    """The best bound over several numbers of guesses, each at a confidence raised so that all hold
    together (Bonferroni).
    """
    each = 1 - (1 - check.inside_unit("confidence", confidence)) / len(counts)
    found = [estimate(Guesses.from_scores(scores, included, made), each) for made in counts]
    best = max(found, key=lambda bound: bound.epsilon)
    detail = best.detail | {"numbers_of_guesses_tried": float(len(counts))}
    return LowerBound(
        best.epsilon, best.delta, confidence, best.method, best.canaries, best.assumptions, detail
    )


def _detail(guesses: Guesses) -> dict[str, float]:
    return {"guesses": float(guesses.made), "right": float(guesses.right)}


def most_by_rates(trials: int, confidence: float = 0.95, delta: float = 0.0) -> float:
    """The largest epsilon that `trials` runs, half of them with the canary, certify by rates if the
    attacker never errs.
    """
    upper = bounds.upper(0, max(1, trials // 2), (1 - confidence) / 2)
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
            if bounds.lower(middle, canaries, 1 - confidence) > allowed
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


SHOWS = (
    "how well anyone who sees every answer, and knows how it was drawn, guesses which of two labels "
    "each record has"
)
DOES_NOT_SHOW = "what features tell about labels, which is not protected, or other attacks"
SHARES = (0.1, 0.25, 0.5, 1.0)
"""Of the labels that are guessed, those that the answers speak of most clearly."""


def inference(
    scores: ArrayLike, included: ArrayLike, *, epsilon: float, confidence: float = 0.95
) -> AuditVerdict:
    """A lower bound on the pure epsilon of one run whose labels were drawn by fair coins, from
    `scores` for each coin.

    Guarantees: above the true epsilon with probability at most 1 - confidence, for any
    epsilon-private release (Steinke et al. 2023). `advantage` in the detail is the share of right
    guesses less that of wrong ones.
    """
    import numpy as np

    count = len(np.asarray(included))
    made = [max(2, int(share * count)) for share in SHARES]

    def estimate(guesses: Guesses, each: float) -> LowerBound:
        return steinke(guesses, delta=0.0, confidence=each)

    best = best_of(scores, included, made, estimate, confidence)
    every = Guesses.from_scores(scores, included, count)
    detail = best.detail | {"advantage": 2 * every.right / every.made - 1}
    bound = LowerBound(
        best.epsilon, 0.0, confidence, "label inference", count, best.assumptions, detail
    )
    return AuditVerdict(bound, epsilon, SHOWS, DOES_NOT_SHOW)
