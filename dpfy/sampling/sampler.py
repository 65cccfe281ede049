"""The sampler protocol, and the splitting of a logical batch into physical ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from dpfy.core import check
from dpfy.core.participation import Participation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Sampler(Protocol):
    """Picks the records of a step.

    Guarantees: `batch` is a pure function of (step, records, rng), with rng the generator at
    `address(step)`: the same step of a resumed run picks the same records, and what it picks has
    the distribution that `participation` promises to the accountant.
    """

    @property
    def participation(self) -> Participation:
        """The promise that accounting relies on."""

    def expected_batch(self, records: int) -> float:
        """The mean number of records in a batch: the divisor of the noisy sum."""

    def address(self, step: int) -> int:
        """Which of the run's generators the step draws from: its own, or one shared by the steps of
        a schedule.
        """

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Indices of the records that take part in `step`; may be empty."""


def physical(
    indices: NDArray[np.int64], most: int, *, row_multiple: int = 1
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Split a logical batch into pieces of at most `most` records, each with a mask of the rows
    that count.

    The rows of a piece are filled up to a multiple of `row_multiple`, or to `most`: work prepared
    for a shape then serves again, and with a multiple of `most` there is one shape only. Added rows
    repeat record 0 and are masked out, so they contribute exactly zero. An empty logical batch has
    no pieces: the step still happens, noise alone.
    """
    import numpy as np

    check.integer("max_physical_batch", most)
    check.integer("row_multiple", row_multiple)
    for start in range(0, len(indices), most):
        piece = indices[start : start + most]
        mask = np.ones(len(piece), dtype=bool)
        missing = min(most, -row_multiple * (-len(piece) // row_multiple)) - len(piece)
        if missing:
            piece = np.concatenate([piece, np.zeros(missing, dtype=piece.dtype)])
            mask = np.concatenate([mask, np.zeros(missing, dtype=bool)])
        yield piece, mask
