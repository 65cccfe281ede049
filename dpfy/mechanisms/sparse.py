"""Sparse vector: of many questions, which answers lie above a threshold; only those that do are
paid for.

With noise of scale b1 on the threshold and b2 on every answer, neighbours' answers differing by at
most D: moving the threshold's noise by D and that of each answer above by 2 D turns every outcome
on one data set into the same outcome on its neighbour. That costs D / b1 + 2 c D / b2 for c answers
above, however many lie below. Where all answers move in one direction, D instead of 2 D is enough.
The threshold's noise is drawn once, the answers' noise grows with c, and numbers get noise of their
own. Reference: Lyu, Su & Li 2017.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, Permit, Private
from dpfy.mechanisms import integers
from dpfy.mechanisms.choice import refuse_monotone
from dpfy.mechanisms.exact import Bits
from dpfy.mechanisms.grid import Grid
from dpfy.mechanisms.mechanism import Stated, agree, drawable, source


@dataclass(frozen=True)
class SparseVector(Stated):
    """Up to `answers` questions whose answer is above `threshold`, in a stream of questions that
    one unit moves by at most `most` each.

    `numeric` is the part of epsilon that pays for the numbers of those answers; 0 tells that they
    are above and nothing else. `monotone`: adding a unit raises all answers or lowers all.
    """

    threshold: float
    most: float = 1.0
    answers: int = 1
    numeric: float = 0.0
    monotone: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check.real("threshold", self.threshold)
        check.positive("most", self.most)
        check.integer("answers", self.answers, most=1 << 20)
        check.below_one("numeric", self.numeric)
        refuse_monotone(self)
        for scale in self.scales():
            drawable("epsilon", self.epsilon, scale or Fraction(1))

    @property
    def event(self) -> events.Event:
        """Pure epsilon for the whole stream."""
        return events.EpsilonDelta(self.epsilon)

    @property
    def split(self) -> tuple[Fraction, Fraction, Fraction]:
        """Epsilon of the threshold, of the comparisons and of the numbers, which add up; the first
        two in the ratio of least variance.
        """
        total, numbers = Fraction(self.epsilon), Fraction(self.epsilon) * Fraction(self.numeric)
        ratio = (self.answers * (1 if self.monotone else 2)) ** (2 / 3)
        first = (total - numbers) * Fraction(1 / (1 + ratio))
        return first, total - numbers - first, numbers

    @property
    def grid(self) -> Grid:
        """Where answers and threshold are laid."""
        return Grid.of(self.most * self.moves)

    def scales(self) -> tuple[Fraction, Fraction, Fraction | None]:
        """The noise of threshold, comparisons and numbers, in steps of the grid. A step more than
        the bound pays for rounding.
        """
        width = (math.floor(self.grid.steps(self.most)) + 1) * self.moves
        first, second, third = self.split
        each = width * self.answers
        return (
            width / first,
            each * (1 if self.monotone else 2) / second,
            each / third if third else None,
        )

    def open(self, permit: Permit, randomness: Randomness | None = None) -> Stream:
        """Begin to ask: as many questions as the permit has releases. A resumed run asks the same
        questions again, from the first.
        """
        agree(self.adjacency, permit)
        permit.check(0, self.event)
        return Stream(self, permit, Randomness.from_os() if randomness is None else randomness)


class Stream:
    """The questions asked under one permit, in their order."""

    def __init__(self, mechanism: SparseVector, permit: Permit, randomness: Randomness) -> None:
        self.mechanism, self.permit, self.asked, self.left = mechanism, permit, 0, mechanism.answers
        self._randomness, self._scales = randomness, mechanism.scales()
        threshold = mechanism.grid.lay(
            Bounded(float(mechanism.threshold), Bound.scalar(1.0))
        ).value.counts
        # Questions have the addresses 0, 1, ...; the threshold the one after the last.
        bits = Bits(randomness, permit.name, permit.releases)
        self._threshold = int(threshold) + _noise(self._scales[0], bits)

    def ask(self, answer: Bounded[Any]) -> Private[Any]:
        """Whether the answer is above the threshold, or its number with noise of its own (None if
        it is not above).

        Guarantees: the whole stream costs the mechanism's epsilon. After the last answer above the
        threshold nothing is answered any more; that it was the last is no secret.
        """
        if not self.left:
            rule = (
                f"the stream has given the {self.mechanism.answers} answers above the threshold "
                f"that were paid for"
            )
            raise InvalidInput("question", self.asked, rule)
        if answer.bound.finite("linf", "a question") > self.mechanism.most:
            raise InvalidInput(
                "bound.linf",
                answer.bound.linf,
                f"must be at most {self.mechanism.most:g}, which is charged",
            )
        grid, (_, each, number) = self.mechanism.grid, self._scales
        count = int(grid.lay(answer).value.counts.reshape(()))
        bits = source(self.mechanism.event, self.permit, self._randomness, self.asked)
        self.asked += 1
        above = count + _noise(each, bits) >= self._threshold
        self.left -= above
        if number is None:
            return Private(above)
        return Private(math.ldexp(count + _noise(number, bits), grid.exponent) if above else None)


def _noise(scale: Fraction, bits: Bits) -> int:
    return int(integers.laplace(1, scale, bits)[0])
