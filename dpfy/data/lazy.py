"""Records that are read when they are drawn: any map-style dataset, in this process or by workers
that read ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dpfy.core import check
from dpfy.core.randomness import Randomness
from dpfy.data import repeatable
from dpfy.data.batch import Batch, Draw, leaves, placed
from dpfy.data.reader import CheckedBatch, Collate, Failed, Reader
from dpfy.isolation.inspection import Inspected
from dpfy.isolation.replacements import TrainingRecords

PREFETCH = 2
"""Batches that each worker reads ahead, as torch does."""


class RecordSource(TrainingRecords, Protocol):
    """What training reads: records by number, in memory or not."""

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """Fields as a model takes them, with one record in each row; of some records at least."""

    @property
    def records_each(self) -> int:
        """How many records of one unit a row holds."""

    def to(self, device: torch.device | str) -> RecordSource:
        """The same records for another device."""

    def take(self, indices: Tensor) -> Batch:
        """The records at `indices`."""

    def read(self, draws: Iterable[Draw], device: torch.device) -> Generator[Batch]:
        """The batches of these draws, in their order, on `device`."""

    def fingerprint(self, randomness: Randomness) -> str:
        """What recognises the records again at a resume."""


@dataclass(frozen=True, eq=False)
class LazyRecords:
    """The records of a map-style dataset, read when they are drawn. Made by :func:`dpfy.lazy`.

    Guarantees: at most the batches that workers read ahead are in memory; which records, and what
    each draws at random, is decided by the run's secret, however many workers there are and in
    whatever order they end.
    """

    dataset: Any
    collate: Collate | None = None
    workers: int = 0
    pin_memory: bool | None = None
    prefetch: int = PREFETCH
    views: int = 1
    worker_init: Callable[[int], None] | None = None
    context: Any = None
    timeout: float = 0.0
    inspected: Inspected = field(default_factory=Inspected, init=False)

    def __post_init__(self) -> None:
        for name, least in (("workers", 0), ("prefetch", 1), ("views", 1)):
            check.integer(f"lazy.{name}", getattr(self, name), least=least)
        object.__setattr__(
            self, "_size", check.integer("records", len(self.dataset), most=check.RECORDS)
        )

    def __len__(self) -> int:
        """How many there were at the beginning: what a dataset says later changes nothing."""
        size: int = self._size  # type: ignore[attr-defined]
        return size

    def __repr__(self) -> str:
        """The number of records and the class that reads them: never one of them."""
        return f"LazyRecords({type(self.dataset).__name__}, {self.workers} workers)"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """None: a pool of records is not in memory."""
        return ()

    @property
    def held(self) -> tuple[Tensor, ...]:
        """Tensors that the dataset holds in its fields."""
        return tuple(
            value
            for value in getattr(self.dataset, "__dict__", {}).values()
            if isinstance(value, Tensor)
        )

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """The tensors of record 0."""
        return tuple(
            t.flatten(0, 1) if self.views > 1 else t
            for t in leaves(self.take(torch.zeros(1, dtype=torch.int64)))
        )

    @property
    def records_each(self) -> int:
        """One: the views are of one record."""
        return 1

    @property
    def rows_each(self) -> int:
        """A row for each view."""
        return self.views

    def to(self, device: torch.device | str) -> LazyRecords:
        """Itself: batches are moved when they are read."""
        return self

    def note(self, inspected: Inspected) -> None:
        """Add what a reader checked to what was checked since these records were made."""
        object.__setattr__(self, "inspected", self.inspected.joined(inspected))

    def take(self, indices: Tensor) -> Batch:
        """The records at `indices`, read here and now; what they draw at random is the same each
        time.
        """
        return self._reader.batch(Draw(indices.cpu().numpy(), 0, bytes(32)))

    def read(self, draws: Iterable[Draw], device: torch.device) -> Generator[Batch]:
        """The batches of these draws, in their order: read ahead by the workers, or one by one
        here.

        Guarantees: closing the iterator ends the workers.
        """
        for read in (
            self._read_ahead(draws, device)
            if self.workers
            else map(self._reader.__getitem__, draws)
        ):
            if isinstance(read, Failed):
                raise read.error
            self.note(read.inspected)
            yield placed(read.batch, device)

    def _read_ahead(
        self, draws: Iterable[Draw], device: torch.device
    ) -> Iterator[CheckedBatch | Failed]:
        loader = DataLoader(
            self._reader,
            batch_size=None,
            sampler=draws,
            collate_fn=_as_it_is,
            num_workers=self.workers,
            pin_memory=device.type == "cuda" if self.pin_memory is None else self.pin_memory,
            prefetch_factor=self.prefetch,
            worker_init_fn=self.worker_init,
            multiprocessing_context=self.context,
            timeout=self.timeout,
            generator=torch.Generator().manual_seed(
                0
            ),  # torch's own would lose a number that a resumed run has
        )
        yield from loader

    def fingerprint(self, randomness: Randomness) -> str:
        """See :mod:`dpfy.data.repeatable`."""
        return repeatable.fingerprint(self, randomness)

    @property
    def _reader(self) -> Reader:
        return Reader(self.dataset, self.collate, self.views)


def _as_it_is(read: Any) -> Any:
    return read
