"""Next tokens from many private models and a public one: every model is drawn to the public one
until its chances lie close enough.

For language models no class has most votes, and the answer is itself a draw. It can be the noise
(Flemings, Razaviyayn & Annavaram 2024: PMixED). Here the ball around the public model is one of
ratios, which makes the proof short.

Proof. Let p be the public chances and q_i those of member i of N after it was drawn to p: p exp(-b)
<= q_i <= p exp(b), for every token. A unit belongs to one member, say the first. With it and
without it, the chance of a token is (S + q_1) / N and (S + q_1') / N, S being the sum of all
others, at least (N - 1) p exp(-b). The ratio of the two is largest for q_1 = p exp(b) and q_1' = p
exp(-b), and S least: 1 + (exp(2 b) - 1) / N. So a token is epsilon-private with epsilon = log(1 +
(exp(2 b) - 1) / N), and so is any other draw, given it.

Rounding. Chances become whole weights out of 2^50. Every public chance is at least 2^-24, by mixing
with the uniform one, and b is at most 4, so that a weight is at least 2^20: rounding changes the
ratio of two by less than 1.1e-6, which epsilon includes (`SLACK`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput
from dpfy.mechanisms.exact import below
from dpfy.prediction.rules import ANSWER, Ask, PaidReleases, Rule

Chances = NDArray[np.float64]
LEAST = 2.0**-24
"""The least public chance of a token."""
WHOLE = 2.0**50
SLACK = 2e-6
MOST_TOKENS = 1 << 18
WIDEST = 4.0
"""Of the ball: a weight is then at least 2^20, so that rounding it changes it by less than 5e-7."""


@dataclass(frozen=True)
class MixedTokens(Rule):
    """One token, drawn from the mean of all members' chances, each within a ball around the public
    ones; `epsilon` a token.

    It is asked for rows of chances: the public ones first, then those of every member.
    """

    voters: int
    epsilon: float
    name: ClassVar[str] = "mixed"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("classes", self.classes, least=2, most=MOST_TOKENS)
        check.integer("voters", self.voters, least=2, most=1 << 24)
        if check.epsilon("epsilon", self.epsilon) <= 2 * SLACK:
            raise InvalidInput(
                "epsilon",
                self.epsilon,
                f"must be above {2 * SLACK:g} for each token, which rounding takes",
            )

    @property
    def radius(self) -> float:
        """b: the logarithm of the largest ratio of a member's chance and the public one."""
        return min(WIDEST, math.log1p(self.voters * math.expm1(self.epsilon - SLACK)) / 2)

    @property
    def kinds(self) -> Mapping[str, events.Event]:
        """Pure epsilon."""
        return {ANSWER: events.EpsilonDelta(self.epsilon)}

    def answer(self, ask: Ask, purse: PaidReleases) -> int | None:
        """The token."""
        rows = np.asarray(ask(None).value, dtype=np.float64)
        if (
            rows.shape != (self.voters + 1, self.classes)
            or not np.isfinite(rows).all()
            or (rows < 0).any()
        ):
            raise InvalidInput(
                "chances",
                f"an array of shape {rows.shape}",
                "must be the public chances, then each member's",
            )
        weights = np.maximum(1, np.rint(self.mixed(rows) * WHOLE)).astype(np.int64).tolist()
        place = below(sum(weights), purse.spend(ANSWER))
        for token, weight in enumerate(weights):
            place -= weight
            if place < 0:
                return token
        return self.classes - 1

    def mixed(self, rows: Chances) -> Chances:
        """The mean of all members, each drawn to the public chances by as little as the ball
        allows.
        """
        rows = rows / np.maximum(rows.sum(axis=1, keepdims=True), LEAST)
        floor = LEAST * self.classes
        public = (1 - floor) * rows[0] / max(float(rows[0].sum()), LEAST) + LEAST
        high, low = math.expm1(self.radius) * public, -math.expm1(-self.radius) * public
        apart = rows[1:] - public
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(apart > 0, high / apart, np.where(apart < 0, low / -apart, np.inf))
        share = np.clip(room.min(axis=1), 0.0, 1.0)
        return np.asarray(public + (share[:, None] * apart).mean(axis=0))

    @property
    def words(self) -> str:
        """In words."""
        return (
            f"a token drawn from the mean of {self.voters} models, each mixed with the public one "
            f"until no chance differs from the "
            f"public one by a factor above {math.exp(self.radius):.4g}"
        )
