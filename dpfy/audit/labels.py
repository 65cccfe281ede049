"""The label-inference audit: how well answers tell which of two labels a record has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfy.audit import one_run
from dpfy.audit.verdict import AuditVerdict, LowerBound

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

SHOWS = (
    "how well whoever sees every answer, and knows how it was drawn, guesses which of two labels "
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

    def estimate(guesses: one_run.Guesses, each: float) -> LowerBound:
        return one_run.steinke(guesses, delta=0.0, confidence=each)

    best = one_run.best_of(scores, included, made, estimate, confidence)
    every = one_run.Guesses.from_scores(scores, included, count)
    detail = best.detail | {"advantage": 2 * every.right / every.made - 1}
    bound = LowerBound(
        best.epsilon, 0.0, confidence, "label inference", count, best.assumptions, detail
    )
    return AuditVerdict(bound, epsilon, SHOWS, DOES_NOT_SHOW)
