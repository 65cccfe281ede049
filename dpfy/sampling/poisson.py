"""Poisson sampling: every record tosses its own coin at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpfy.core import check, participation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class PoissonSampler:
    """Each record is in each batch independently with probability `rate`. Rate 1 is full batch.

    Guarantees: inclusion is independent across records and steps with probability exactly `rate`
    (up to double precision), which is what :class:`dpfy.core.participation.Poisson` promises.
    """

    rate: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", check.rate("sampling_rate", self.rate))

    @property
    def participation(self) -> participation.Poisson:
        """Independent inclusion at `rate`."""
        return participation.Poisson(self.rate)

    def expected_batch(self, records: int) -> float:
        """rate times records."""
        return self.rate * records

    def address(self, step: int) -> int:
        """A generator for each step."""
        return step

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Indices in increasing order, found by geometric gaps: the cost grows with the batch, not
        with the data set.
        """
        import numpy as np

        if self.rate == 1:
            return np.arange(records, dtype=np.int64)
        pieces: list[NDArray[np.int64]] = []
        last = -1
        while last < records:
            left = max(1.0, (records - last) * self.rate)
            gaps = rng.geometric(self.rate, size=int(left + 4 * left**0.5) + 8)
            # A gap longer than the data ends the batch; cutting it keeps the running sum far from
            # overflow.
            places = last + np.cumsum(np.minimum(gaps, records + 1))
            pieces.append(places)
            last = int(places[-1])
        found = np.concatenate(pieces)
        return found[found < records].astype(np.int64)
