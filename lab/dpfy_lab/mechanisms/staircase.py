"""The staircase mechanism: the least expected error that pure differential privacy allows for one
number (Geng & Viswanath 2014).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from dpfy.core import events
from dpfy.core.errors import Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, Permit, Private
from dpfy.mechanisms.exact import Bits, below, bernoulli, geometric
from dpfy.mechanisms.grid import Grid, Laid
from dpfy.mechanisms.mechanism import Stated


@dataclass(frozen=True)
class Staircase(Stated):
    """One number with noise x of probability proportional to exp(-epsilon * stair(|x|)), in steps
    of a grid.

    With a sensitivity of D steps, stair(m) counts the edges r, r + D, r + 2D, ... that are at most
    m: moving by at most D crosses at most one, so that probabilities change by at most
    exp(epsilon). The larger epsilon, the more it gains on Laplace noise.
    """

    @property
    def event(self) -> events.Event:
        """Pure epsilon."""
        return events.EpsilonDelta(self.epsilon)

    def grid(self, bound: Bound, coordinates: int = 1) -> Grid:
        """Where contributions of this bound are best summed."""
        return Grid.of(bound.finite("linf", "staircase noise") * self.moves, coordinates)

    def release(
        self,
        total: Bounded[Any],
        permit: Permit,
        randomness: Randomness | None = None,
        step: int = 0,
    ) -> Private[float]:
        """The number with noise. Guarantees: as
        :meth:`dpfy.mechanisms.additive.Additive.release`.
        """
        laid = total if isinstance(total.value, Laid) else self.grid(total.bound).lay(total)
        if laid.value.counts.size != 1:
            raise Unsupported(
                f"staircase noise on {laid.value.counts.size} numbers",
                "use Laplace; the staircase is best for one",
            )
        bits = self._source(permit, randomness, step)
        width = max(
            1,
            math.floor(laid.value.grid.steps(laid.bound.finite("linf", "staircase noise")))
            * self.moves,
        )
        noisy = int(laid.value.counts.reshape(())) + draw(
            Fraction(self.epsilon), width, edge(self.epsilon, width), bits
        )
        return Private(math.ldexp(noisy, laid.value.grid.exponent))


def edge(epsilon: float, width: int) -> int:
    """The first edge r, from 1 to `width`: that of least expected size of the noise, at about 1 /
    (1 + exp(epsilon / 2)) of the width.

    Any edge is as private, so that floating-point arithmetic may choose.
    """
    near = math.floor(width / (1 + math.exp(min(epsilon, 700.0) / 2)))
    return min(
        (min(max(r, 1), width) for r in (near, near + 1)),
        key=lambda r: expected_size(epsilon, width, r),
    )


def expected_size(epsilon: float, width: int, r: int) -> float:
    """The mean of |x|, in steps."""
    b = math.exp(-epsilon)
    first, stairs = (
        r * (r - 1) / 2,
        b * width / (1 - b),
    )  # sums of m over the first stair; of weights of all others
    mean = r + (width - 1) / 2 + width * b / (1 - b)  # of m over all stairs but the first
    return 2 * (first + stairs * mean) / (2 * (r + stairs) - 1)


def draw(epsilon: Fraction, width: int, r: int, bits: Bits) -> int:
    """One draw: a stair by its weight, a place on it, a sign; the negative zero is thrown back."""
    while True:
        stair = geometric(epsilon, bits)
        if stair == 0 and not bernoulli(Fraction(r, width), bits):
            continue
        size = below(r, bits) if stair == 0 else r + (stair - 1) * width + below(width, bits)
        sign = below(2, bits)
        if size or not sign:
            return -size if sign else size
