"""The meter of synthetic images: every look at the pictures goes through it. It knows what is left,
and holds the permit.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from dpfy.accounting.filters import noise_of, squares
from dpfy.core.errors import BudgetExceeded
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, Permit
from dpfy.synthetic.evolution import Array
from dpfy.synthetic.releases import PartOfGaussian, no_binding
from dpfy_lab.synthetic_images.claim import ImageSynthesis

ROUNDED = 1 + 2.0**-20
"""By this a bound is raised: more than the one multiplication after the exact sums can be off."""


@dataclass(frozen=True)
class BoundedSums:
    """Sums over pictures: one picture adds a vector of an L2 norm of at most `length`. A larger
    `weight` gives them less of the noise.
    """

    total: Array = field(repr=False)
    length: float
    weight: float = 1.0


@dataclass(frozen=True)
class NoisySums:
    """Released sums, and the standard deviation of the noise in each of their numbers."""

    values: Array = field(repr=False)
    deviation: float


@dataclass
class ImageReleases:
    """Sums over pictures, released within what their claim may spend.

    Guarantees: nothing is released beyond the sum of squares of the claim, whatever is asked; the
    bound of several sums is that of all together; what a release depends on is bound before its
    noise is drawn. `left` is exact.
    """

    claim: ImageSynthesis
    permit: Permit
    randomness: Randomness | None = None
    bind: Callable[[str, bytes], None] = no_binding
    released: dict[str, NoisySums] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.whole: Fraction = squares(self.claim.noise_multiplier)
        self.left = self.whole
        self.step = 0
        self.squares: list[Fraction] = []

    def release(self, share: Fraction, sums: dict[str, BoundedSums]) -> list[NoisySums]:
        """These sums with noise that takes `share` of what the claim allows: they are one Gaussian
        release.
        """
        cost = self.whole * share
        if cost > self.left:
            raise BudgetExceeded(
                f"{', '.join(sums)} would take more than what is left of the sum of squares"
            )
        noise = noise_of(cost)
        bound = ROUNDED * math.sqrt(
            math.fsum((part.weight * part.length) ** 2 for part in sums.values())
        )
        whole = np.concatenate([part.weight * part.total.ravel() for part in sums.values()])
        self.bind(
            f"{self.claim.name} {self.step}", struct.pack("<dd", noise, bound) + whole.tobytes()
        )
        mechanism = PartOfGaussian(noise, whole=self.claim.event)
        found = mechanism.release(
            Bounded(whole, Bound(l2=bound)), self.permit, self.randomness, self.step
        ).value
        self.left, self.step = self.left - squares(noise), self.step + 1
        self.squares.append(squares(noise))
        return self._kept(sums, np.asarray(found, np.float64), noise * bound)

    def _kept(
        self, sums: dict[str, BoundedSums], found: Array, deviation: float
    ) -> list[NoisySums]:
        """The released numbers as they were asked for; kept under their names."""
        ends: Sequence[int] = np.cumsum([part.total.size for part in sums.values()])[:-1].tolist()
        for (name, part), values in zip(sums.items(), np.split(found, ends), strict=True):
            self.released[name] = NoisySums(
                values.reshape(part.total.shape) / part.weight, deviation / part.weight
            )
        return [self.released[name] for name in sums]
