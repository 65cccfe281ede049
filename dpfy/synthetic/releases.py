"""The meter of a synthesis: every look at the counts goes through it. It knows what is left, and
holds the permit.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch

from dpfy.accounting.filters import noise_of, squares
from dpfy.core import events
from dpfy.core.errors import BudgetExceeded
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, Permit
from dpfy.mechanisms.additive import GaussianMechanism
from dpfy.mechanisms.choice import Exponential
from dpfy.synthetic.claim import Synthesis
from dpfy.synthetic.counts import Marginals
from dpfy.synthetic.domain import Clique
from dpfy.synthetic.estimate import Measurement

CHECK = Fraction(1, 200)
"""The share of the sum of squares that is kept for numbers that tell how far off the table is."""
ROUNDED = 1 + 2.0**-20
"""By this the bound of a score is raised: far more than sums of floats can be off."""


@dataclass(frozen=True)
class PartOfGaussian(GaussianMechanism):
    """One of several Gaussian releases that are charged together, as `whole`."""

    whole: events.Event = field(default_factory=events.Nothing)

    @property
    def event(self) -> events.Event:
        """All of them."""
        return self.whole


@dataclass(frozen=True)
class PartOfChoices(Exponential):
    """One of several choices that are charged together, as `whole`."""

    whole: events.Event = field(default_factory=events.Nothing)

    @property
    def event(self) -> events.Event:
        """All of them."""
        return self.whole


def no_binding(name: str, content: bytes) -> None:
    """For rehearsals, which cannot be resumed."""


@dataclass
class MarginalReleases:
    """Measurements and choices on the counts of a table, within what its claim may spend.

    Guarantees: nothing is released beyond the sum of squares and the number of choices of the
    claim, whatever is asked, and in whatever order; what a release depends on is bound before its
    noise is drawn. `left` (of `whole`) and `kept` are exact.
    """

    claim: Synthesis
    marginals: Marginals
    permit: Permit
    randomness: Randomness | None = None
    bind: Callable[[str, bytes], None] = no_binding
    released: list[Measurement] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.whole: Fraction = squares(self.claim.noise_multiplier) * (1 - CHECK)
        self.left = self.whole
        self.kept = squares(self.claim.noise_multiplier) - self.whole
        self.choices = self.claim.choices
        self.step = 0

    def deviation(self, noise_multiplier: float) -> float:
        """The standard deviation of the noise in a cell."""
        return noise_multiplier * self.claim.length

    def measure(self, clique: Clique, noise_multiplier: float) -> Measurement:
        """A marginal with Gaussian noise of this multiple of what a unit adds."""
        cost = squares(noise_multiplier)
        if cost > self.left:
            raise BudgetExceeded(
                f"noise {noise_multiplier:g} for {clique} is more than what is left of the sum of "
                f"squares"
            )
        counts, length = self.marginals.tables[clique], self.claim.length
        self._bind("measure", clique, noise_multiplier, counts.tobytes())
        most = float(self.claim.unit.most_records)
        mechanism = PartOfGaussian(noise_multiplier, whole=self.claim.event)
        total = Bounded(counts, Bound(length, most, most), self.claim.unit)
        noisy = mechanism.release(total, self.permit, self.randomness, self.step).value
        self.left, self.step = self.left - cost, self.step + 1
        self.released.append(
            Measurement(
                clique,
                torch.from_numpy(np.asarray(noisy, np.float64)),
                self.deviation(noise_multiplier),
            )
        )
        return self.released[-1]

    def number(self, value: float, share: Fraction) -> tuple[float, float]:
        """A number that a record changes by at most 1, with noise that takes `share` of what is
        kept for such; and its deviation.
        """
        noise = noise_of(self.kept * share)
        most = self.claim.unit.most_records * ROUNDED
        self._bind("number", (), noise, struct.pack("<d", value))
        mechanism = PartOfGaussian(noise, whole=self.claim.event)
        found = mechanism.release(
            Bounded(value, Bound.scalar(most), self.claim.unit),
            self.permit,
            self.randomness,
            self.step,
        ).value
        self.kept, self.step = self.kept - squares(noise), self.step + 1
        return float(found), noise * most

    def measure_all(
        self, cliques: Sequence[Clique], share: Fraction, weights: Sequence[float] | None = None
    ) -> list[Measurement]:
        """Several marginals that take `share` of the sum together, in proportion to the weights."""
        parts = weights or [1.0] * len(cliques)
        whole = sum(Fraction(part) for part in parts)
        return [
            self.measure(c, noise_of(share * Fraction(part) / whole))
            for c, part in zip(cliques, parts, strict=True)
        ]

    def choose(self, scores: Sequence[float], most: float = 1.0) -> int:
        """The index of a high score, by the exponential mechanism; a record changes every score by
        at most `most`.
        """
        if not self.choices:
            raise BudgetExceeded("no choice is left")
        values = np.asarray(scores, np.float64)
        self._bind("choose", (), self.claim.width, values.tobytes())
        linf = most * self.claim.unit.most_records * ROUNDED
        mechanism = PartOfChoices(
            self.claim.width, adjacency=self.claim.adjacency, whole=self.claim.event
        )
        index = mechanism.release(
            Bounded(values, Bound(linf=linf), self.claim.unit),
            self.permit,
            self.randomness,
            self.step,
        ).value
        self.choices, self.step = self.choices - 1, self.step + 1
        return index

    def _bind(self, what: str, clique: Clique, size: float, content: bytes) -> None:
        self.bind(
            f"{self.claim.name} {self.step}",
            f"{what} {clique}".encode() + struct.pack("<d", size) + content,
        )
