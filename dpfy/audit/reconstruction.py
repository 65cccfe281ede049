"""Reconstruction of a private column from answers about subsets of people (Dinur & Nissim 2003).

Answers that are too many and too exact give the column away: with n people, about n random subset
sums that are wrong by less than sqrt(n) each determine nearly all of it. Answers under one budget
cannot be both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpfy.audit import bounds
from dpfy.core import check
from dpfy.core.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

ROUNDS, TOLERANCE = 20_000, 1e-9


@dataclass(frozen=True)
class Reconstruction:
    """What an attacker made of the answers: one guess for each person, and the numbers behind it."""

    guesses: NDArray[np.bool_]
    values: NDArray[np.float64]

    def share_right(self, truth: ArrayLike, confidence: float = 0.95) -> tuple[float, float, float]:
        """The share of people whose value was guessed, and its exact limits."""
        real = np.asarray(truth, dtype=bool)
        if real.shape != self.guesses.shape:
            raise InvalidInput("truth", real.shape, f"must be {len(self.guesses)} values")
        right, alpha = int((real == self.guesses).sum()), (1 - confidence) / 2
        return (
            right / len(real),
            bounds.lower(right, len(real), alpha),
            bounds.upper(right, len(real), alpha),
        )


def reconstruct(subsets: ArrayLike, answers: ArrayLike) -> Reconstruction:
    """Guess a column of zeros and ones from sums over subsets.

    The values in [0, 1] whose sums are closest to the answers (least squares, by accelerated
    projected gradients), rounded.

    Args:
        subsets: [questions, people], whether each person was in each sum.
        answers: One number for each question, exact or noisy.

    Returns:
        A guess for each person.

    Raises:
        InvalidInput: Shapes do not fit, or an answer is no number.

    Example:
        >>> import numpy as np
        >>> from dpfy.audit.reconstruction import reconstruct
        >>> rng = np.random.default_rng(0)
        >>> column, subsets = rng.random(50) < 0.5, rng.random((100, 50)) < 0.5
        >>> reconstruct(subsets, subsets @ column.astype(float)).share_right(column)[0]
        1.0
    """
    asked, said = np.asarray(subsets, dtype=np.float64), np.asarray(answers, dtype=np.float64)
    if asked.ndim != 2 or not asked.size or asked.shape[:1] != said.shape:
        raise InvalidInput(
            "answers", said.shape, f"must be one number for each of {len(asked)} subsets"
        )
    if not np.isfinite(said).all() or not np.isin(asked, (0.0, 1.0)).all():
        raise InvalidInput("answers", "subsets or answers", "must be zeros and ones, and finite")
    step = 1 / max(float(np.linalg.norm(asked, 2)) ** 2, TOLERANCE)
    values = ahead = np.full(asked.shape[1], 0.5)
    pace = 1.0
    for _ in range(ROUNDS):
        moved = np.clip(ahead - step * asked.T @ (asked @ ahead - said), 0.0, 1.0)
        grown = (1 + (1 + 4 * pace * pace) ** 0.5) / 2
        ahead = moved + (pace - 1) / grown * (moved - values)
        done = float(np.abs(moved - values).max()) < TOLERANCE
        values, pace = moved, grown
        if done:
            break
    return Reconstruction(values > 0.5, values)


def most_right(epsilon: float, delta: float = 0.0) -> float:
    """The largest expected share that any attacker guesses right, of a column of fair coins, from
    (epsilon, delta)-differentially private answers (add-or-remove-one: twice the epsilon, as a
    value is replaced).
    """
    check.nonnegative("epsilon", epsilon)
    odds = float(np.exp(-2 * epsilon))
    grown = delta * (1 + float(np.exp(epsilon)))
    return min(1.0, (1 + grown) / (1 + odds))
