"""What boosting makes small: residuals of bounded norm, in whole steps, from scores in whole steps.

Every residual is divided by a clip, so that a record's has at most the norm one whatever the clip,
which may thus follow from earlier releases. Scores are sums of whole numbers and residuals are
looked up or computed by correctly rounded operations: what one record adds depends on only
that record and what was released.

Clipping a residual moves the score at which the residuals of a probability q balance, and not their
order: with s_y = min(1, clip / |e_y - p|) the balance sum_y q_y s_y (e_y - p) = 0 says that q_y is
proportional to p_y / s_y. So probabilities are put right after the fit
(`ClassResiduals.log_joint`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from dpfy.core.errors import InvalidInput
from dpfy.estimators.target import ClassTarget, NumberTarget, Target

Floats = NDArray[np.float64]
Steps = NDArray[np.int32]

SCORE_BITS, RESIDUAL_BITS = 10, 12
"""Fractional bits of a score and of a residual."""
FAR = 1 << 14
"""Scores beyond +-16 count as +-16."""
ONE = 1 << RESIDUAL_BITS
HALF_WAY = 0.5
"""The clip of a binary residual y - p: the least that leaves every probability its own score."""
TARGET_CELLS = 64


@dataclass(frozen=True)
class InitialScores:
    """What the noisy histogram of the target says before the first round: a score for all, the
    clip, and how a record curves the loss.

    `curvature` and `spread` [scores]: by how much a record's residual falls as its score rises, and
    the variance of a residual. `level` is how far scores are thought to lie apart.
    """

    score: Floats
    clip: float
    curvature: Floats
    spread: Floats
    level: float


class Residuals(Protocol):
    """What is fitted: `width` scores for each record."""

    @property
    def width(self) -> int:
        """How many scores a record has."""

    @property
    def cells(self) -> int:
        """How many cells the histogram of the target has."""

    @property
    def steepest(self) -> float:
        """The largest norm of the curvatures of a record."""

    def places(self, target: NDArray[Any]) -> NDArray[np.int64]:
        """The cell of each record in the histogram of the target."""

    def begin(self, counts: Floats) -> InitialScores:
        """From noisy counts of these cells."""

    def residuals(self, target: NDArray[Any], scores: Sequence[Steps], clip: float) -> list[Floats]:
        """Of each score, in whole steps of 2^-RESIDUAL_BITS and divided by the clip.

        Guarantees: over the scores of one record, the L2 norm is at most one.
        """

    def curvatures(self, scores: Sequence[Steps]) -> list[Floats]:
        """By how much the residual of each score falls as the score rises, in whole steps of
        2^-RESIDUAL_BITS and divided by `steepest`.

        Guarantees: over the scores of one record, the L2 norm is at most one.
        """


@dataclass(frozen=True)
class ClassResiduals:
    """Classes. Two of them have one score, that of the second."""

    classes: int

    @property
    def width(self) -> int:
        """One score for each class, and one for two of them."""
        return 1 if self.classes == 2 else self.classes

    @property
    def cells(self) -> int:
        """One for each class."""
        return self.classes

    @property
    def steepest(self) -> float:
        """p (1 - p) is at most a quarter, and their sum over classes at most one, so that the sum
        of squares is at most a quarter.
        """
        return 0.25 if self.classes == 2 else 0.5

    def places(self, target: NDArray[Any]) -> NDArray[np.int64]:
        """The classes themselves."""
        return target

    def begin(self, counts: Floats) -> InitialScores:
        """All records get the score that balances the residuals of the shares of the classes."""
        floor = max(1.0, 0.001 * float(np.maximum(counts, 0).sum()))
        shares = np.maximum(counts, floor)
        shares /= shares.sum()
        curve = (
            0.64 * shares * (1 - shares)
        )  # about the mean of p (1 - p) of a useful model, less what is clipped
        clip = HALF_WAY * np.sqrt(self.classes / 2 if self.classes == 2 else 2)
        if self.classes > 2:
            score = np.log(shares)
            return InitialScores(score - score.mean(), float(clip), curve, curve, 1.0)
        q = float(shares[1])
        p = q * clip / (1 - q) if q < 0.5 else 1 - (1 - q) * clip / q
        return InitialScores(
            np.array([np.log(p / (1 - p))]), float(clip), curve[1:], curve[1:], 1.0
        )

    def residuals(self, target: NDArray[Any], scores: Sequence[Steps], clip: float) -> list[Floats]:
        """What each class has less than the record says, shortened to the clip."""
        if self.classes == 2:
            table = _logistic_table(clip)
            return [table[target, np.clip(scores[0], -FAR, FAR) + FAR]]
        return _softmax_residuals(target, scores, clip)

    def curvatures(self, scores: Sequence[Steps]) -> list[Floats]:
        """p (1 - p) of each score, rounded towards zero."""
        if self.classes == 2:
            return [_curvature_table()[np.clip(scores[0], -FAR, FAR) + FAR]]
        return [
            np.trunc(p * (1 - p) / self.steepest * ONE * (1 - 2.0**-40)) for p in _shares(scores)
        ]

    def log_joint(self, scores: Floats, clip: float) -> Floats:
        """Logarithms of the probabilities of the classes, up to a constant for each row, put right
        for the clip.
        """
        held = (
            np.concatenate([np.zeros_like(scores), scores], axis=1) if self.classes == 2 else scores
        )
        held = held - held.max(axis=1, keepdims=True)
        p = np.exp(held)
        p /= p.sum(axis=1, keepdims=True)
        far = (
            1 - p
            if self.classes == 2
            else np.sqrt(np.maximum(1 - 2 * p + (p * p).sum(axis=1, keepdims=True), 0))
        )
        return np.asarray(held + np.log(np.maximum(1.0, far / clip)))


@dataclass(frozen=True)
class NumberResiduals:
    """A number in a public range, by Huber's loss: squared up to the clip, then straight. Scores
    are shares of the range, from -1 to 1.
    """

    low: float
    high: float

    width: ClassVar[int] = 1
    cells: ClassVar[int] = TARGET_CELLS
    steepest: ClassVar[float] = 1.0

    def units(self, target: NDArray[Any]) -> Floats:
        """The target in shares of its range, on the grid of scores."""
        shares = (target - self.low) / (self.high - self.low)
        return np.rint(np.clip(2 * shares - 1, -1, 1) * 2.0**RESIDUAL_BITS)

    def places(self, target: NDArray[Any]) -> NDArray[np.int64]:
        """Equal cells of the range."""
        shares = (target - self.low) / (self.high - self.low)
        return np.clip(np.floor(shares * self.cells), 0, self.cells - 1).astype(np.int64)

    def begin(self, counts: Floats) -> InitialScores:
        """The mean for all; the clip is two standard deviations of the target."""
        at = (np.arange(self.cells) + 0.5) * 2 / self.cells - 1
        weights = np.maximum(counts, 0) + 1e-9
        weights /= weights.sum()
        mean = float(weights @ at)
        spread = max(float(weights @ (at - mean) ** 2), (0.5 / self.cells) ** 2)
        clip = min(2.0, 2 * float(np.sqrt(spread)))
        return InitialScores(np.array([mean]), clip, np.ones(1), np.array([spread / 2]), clip / 2)

    def residuals(self, target: NDArray[Any], scores: Sequence[Steps], clip: float) -> list[Floats]:
        """By how much the target is above the score."""
        above = self.units(target) - scores[0] * 2.0 ** (RESIDUAL_BITS - SCORE_BITS)
        return [np.rint(np.clip(above / clip, -ONE, ONE))]

    def curvatures(self, scores: Sequence[Steps]) -> list[Floats]:
        """Every record counts one."""
        return [np.full(len(scores[0]), float(ONE))]


def width(aim: Target | None) -> int:
    """How many scores a target has; it may be open."""
    return of(aim).width if isinstance(aim, ClassTarget) else 1


def of(aim: Target | None) -> Residuals:
    """Those of a target."""
    if isinstance(aim, ClassTarget):
        return ClassResiduals(len(aim.labels))
    if isinstance(aim, NumberTarget):
        return NumberResiduals(aim.low, aim.high)
    raise InvalidInput("target", aim, "must be classes, or numbers in a range")


def number(scores: Floats, aim: Target | None) -> Floats:
    """Scores from -1 to 1 [rows, 1] as numbers of the range of the target."""
    assert isinstance(aim, NumberTarget)
    return np.asarray(aim.low + (np.clip(scores[:, 0], -1, 1) + 1) / 2 * (aim.high - aim.low))


def begun(score: Floats, records: int) -> list[Steps]:
    """The scores of records before the first round."""
    return [np.full(records, first, np.int32) for first in steps(score)]


def steps(scores: Floats) -> Steps:
    """Scores in whole steps; those beyond +-16 count as +-16."""
    return np.rint(np.clip(scores * 2.0**SCORE_BITS, -FAR, FAR)).astype(np.int32)


@cache
def _logistic() -> Floats:
    """The probability at each score in steps."""
    return np.asarray(1 / (1 + np.exp(-np.arange(-FAR, FAR + 1) * 2.0**-SCORE_BITS)))


@cache
def _logistic_table(clip: float) -> Floats:
    """The clipped residual for each label and each score in steps."""
    found: Floats = np.stack(
        [np.rint(np.clip((y - _logistic()) / clip, -1, 1) * ONE) for y in (0, 1)]
    )
    return found


@cache
def _curvature_table() -> Floats:
    return np.asarray(np.rint(_logistic() * (1 - _logistic()) / 0.25 * ONE))


@cache
def _exponentials() -> Floats:
    return np.exp(-np.arange(2 * FAR + 1) * 2.0**-SCORE_BITS)


def _shares(scores: Sequence[Steps]) -> list[Floats]:
    """Probabilities. Sums are made class after class, so that they are rounded alike for every
    record, wherever it stands.
    """
    top = np.max(np.stack([*scores]), axis=0)
    parts = [_exponentials()[np.minimum(top - s, 2 * FAR)] for s in scores]
    whole = np.zeros(len(top))
    for part in parts:
        whole += part
    return [part / whole for part in parts]


def _softmax_residuals(target: NDArray[Any], scores: Sequence[Steps], clip: float) -> list[Floats]:
    """Shortened to the clip and rounded towards zero, which leaves no norm longer."""
    found, norm = [], np.zeros(len(target))
    for k, share in enumerate(_shares(scores)):
        found.append((target == k) - share)
        norm += found[-1] ** 2
    shorten = ONE / np.maximum(np.sqrt(norm), clip) * (1 - 2.0**-40)
    return [np.trunc(r * shorten) for r in found]
