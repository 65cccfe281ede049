"""Batches of a fixed size: every step takes a fresh uniform subset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpfy.core import check, participation
from dpfy.core.errors import InvalidInput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class WithoutReplacementSampler:
    """Each batch is a uniform subset of exactly `batch_size` of `records` records, independent of
    all others.

    Whether one record is drawn depends on how many others there are: `records` is part of what is
    promised, and data of another size is refused.

    Guarantees: :class:`dpfy.core.participation.WithoutReplacement`.
    """

    batch_size: int
    records: int

    def __post_init__(self) -> None:
        check.integer("records", self.records, most=check.RECORDS)
        if check.integer("batch_size", self.batch_size) > self.records:
            raise InvalidInput(
                "batch_size",
                self.batch_size,
                f"must be at most the number of records ({self.records})",
            )

    @property
    def participation(self) -> participation.WithoutReplacement:
        """A fresh subset at every step."""
        return participation.WithoutReplacement(self.batch_size, self.records)

    def expected_batch(self, records: int) -> float:
        """The size of every batch."""
        return float(self.batch_size)

    def address(self, step: int) -> int:
        """A generator for each step."""
        return step

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Indices in increasing order. A small batch costs its own size, a large one that of the
        data set.
        """
        import numpy as np

        if records != self.records:
            raise InvalidInput(
                "records",
                records,
                f"must be {self.records}, the number that batches of a fixed size are billed for",
            )
        return np.sort(rng.choice(records, self.batch_size, replace=False, shuffle=False)).astype(
            np.int64
        )
