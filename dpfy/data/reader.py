"""The reader: from the numbers of records to a batch, here or in a worker process. What a record
draws at random, it draws again.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, default_collate

from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.data.batch import Batch, Draw, Look, leaves, plain
from dpfy.isolation.collate import Made, check_batch, fresh
from dpfy.isolation.inspection import ASKED_TRIES, LEAST_TRIES, Inspected, Inspection
from dpfy.isolation.items import OURS, check_item, look_into

Collate = Callable[[list[Any]], Any]

RECORD, BATCH, COLLATE, TRY = range(4)
"""What is seeded: the reading of one record in one view, of a whole batch, the collating of it, or
a try of a check.
"""

OTHERS = 64
"""Numbers of records drawn to take the place of some, where the data set makes whole batches."""

_address = Struct("<BQQ").pack


@dataclass(frozen=True)
class Failed:
    """An error on its way from a worker process."""

    error: Exception


class CheckedBatch(NamedTuple):
    """A batch, and what was checked when it was made."""

    batch: Batch
    inspected: Inspected

    def __repr__(self) -> str:
        """What was checked: never a record."""
        return f"Read({self.inspected})"


@dataclass(repr=False)
class Reader(Dataset[Any]):
    """Reads the records of a draw, `views` times each, and collates them.

    A dataset with a method ``rows(indices)`` gives whole batches by itself, unless there is a
    `collate` function; one with ``many(indices)`` gives a list of records. Both are for data
    without augmentation.

    Guarantees: before each record is read, the global generators of torch, NumPy and Python are
    seeded by the draw's key, the record and the view: a record's augmentation depends on nothing
    else, and the same draw gives it again. They are left as they were found.
    """

    dataset: Any
    collate: Collate | None
    views: int
    drawn: set[str] = field(default_factory=set)
    """The generators that a record drew from. Only these are seeded for each: that takes as long as
    a tenth of a small image.
    """

    inspection: Inspection = field(default_factory=Inspection)

    def __getitem__(self, draw: Draw) -> CheckedBatch | Failed:
        try:
            return self.read(draw)
        except Exception as error:
            return Failed(_portable(error))

    def batch(self, draw: Draw) -> Batch:
        """The batch of a draw; with several views its tensors are [records, views, ...]."""
        return self.read(draw).batch

    def read(self, draw: Draw) -> CheckedBatch:
        """The batch of a draw, checked for records that mix where the draw or the inspection says
        so.

        Guarantees: a check changes no bit of the batch, and leaves the generators as they were.
        """
        rows = [(int(index), view) for index in draw.indices for view in range(self.views)]
        with _borrowed_generators():
            if draw.look is Look.NEVER:
                batch, inspected = self._batch(self._parts(rows, draw), draw), Inspected()
            else:
                batch, inspected = self._inspected(rows, draw)
        if self.views > 1:
            batch = pytree.tree_map_only(
                Tensor, lambda t: t.unflatten(0, (len(draw.indices), self.views)), batch
            )
        return CheckedBatch(batch, inspected)

    def _inspected(self, rows: list[tuple[int, int]], draw: Draw) -> CheckedBatch:
        """The batch, and what was checked of it."""
        look, joins, single = self.inspection, self._joins, self._single
        due = (joins or single) and look.due(len(draw.indices), draw.look is Look.ALWAYS)
        with look.reading.followed(single):
            parts = self._parts(rows, draw)
        mine = [_copied(part) for part in parts] if due else []
        with look.collating.followed(joins):
            batch = self._batch(parts, draw)
        if not (due or ((look.reading.new or look.collating.new) and len(draw.indices) > 1)):
            return CheckedBatch(batch, Inspected())
        batch = pytree.tree_map_only(
            Tensor, torch.clone, batch
        )  # a function may use its memory again
        mine = mine or self._parts(rows, draw)  # collating may have changed them
        rng = np.random.Generator(
            np.random.Philox(key=int.from_bytes(_digest(draw.key, TRY, draw.place, 0), "little"))
        )
        places = (
            {0, int(rng.integers(1, len(mine)))} if look.first else {int(rng.integers(len(mine)))}
        )
        if look.reading.new:
            places.add(look.reading.where)
        of_items = [
            partial(self._check_item, rows[place], mine[place], draw, look)
            for place in sorted(places)
            if single
        ]
        of_batch = partial(self._check_batch, mine, rows, batch, draw, rng) if joins else None
        return CheckedBatch(batch, look.check(len(draw.indices), of_batch, of_items))

    def _check_batch(
        self,
        parts: list[Any],
        rows: list[tuple[int, int]],
        batch: Batch,
        draw: Draw,
        rng: np.random.Generator,
    ) -> int:
        """See :func:`dpfy.isolation.collate.check_batch`."""
        others: list[Any] | None = None
        starts: dict[int, object] = {}
        least = ASKED_TRIES if draw.look is Look.ALWAYS else LEAST_TRIES
        if self._whole or hasattr(self.dataset, "many"):
            parts = [index for index, _ in rows]
            others = [int(index) for index in rng.integers(len(self.dataset), size=OTHERS)]

        def make(items: list[Any], number: int) -> Made:
            if others is not None and not self._whole:
                _seed(draw.key, BATCH, draw.place, number)
                items = list(self.dataset.many(items))
            if number not in starts:
                self._seed_batch(draw, number)
                starts[number] = _next()
            self._seed_batch(draw, number)
            found = self._joined([_copied(item) for item in items])
            return Made(
                tuple(t.clone() for t in leaves(found)),
                after := _next(),
                after != starts[number],
            )

        return check_batch(
            make,
            parts,
            others,
            self.views,
            leaves(batch),
            self.inspection.tries(least),
            rng,
        )

    def _check_item(self, row: tuple[int, int], item: Any, draw: Draw, look: Inspection) -> int:
        """See :func:`dpfy.isolation.items.check_item`."""
        inner = look_into(self.dataset, row[0])
        assert inner is not None
        starts: dict[int, object] = {}

        def read(dataset: Any, index: int, number: int) -> tuple[Any, bool]:
            seed = partial(
                _seed, draw.key, *((RECORD, *row) if number == 0 else (TRY, row[0], number))
            )
            if number not in starts:
                seed()
                starts[number] = _next()
            seed()
            return dataset[index], _next() != starts[number]

        return check_item(*inner, item, read, look.tries())

    @cached_property
    def _whole(self) -> bool:
        """Whether the data set gives whole batches."""
        return self.collate is None and hasattr(self.dataset, "rows")

    @cached_property
    def _joins(self) -> bool:
        """Whether code of the user's makes one batch of several records."""
        ours = type(self.dataset).__module__ in OURS
        return self.collate is not None or (
            not ours and (hasattr(self.dataset, "rows") or hasattr(self.dataset, "many"))
        )

    @cached_property
    def _single(self) -> bool:
        """Whether code of the user's reads records one by one."""
        return (
            not (self._whole or hasattr(self.dataset, "many"))
            and look_into(self.dataset, 0) is not None
        )

    def _parts(self, rows: list[tuple[int, int]], draw: Draw) -> list[Any]:
        """The items of a batch, or the numbers of its records where the data set makes the
        batch.
        """
        return [index for index, _ in rows] if self._whole else self._items(rows, draw)

    def _batch(self, parts: list[Any], draw: Draw) -> Batch:
        self._seed_batch(draw, 0)
        return self._joined(parts)

    def _joined(self, parts: list[Any]) -> Batch:
        """The batch of these items, or of the records of these numbers."""
        if self._whole:
            return plain("batch", self.dataset.rows(parts), len(parts))
        return plain(
            "batch", _stacked(parts) if self.collate is None else self.collate(parts), len(parts)
        )

    def _seed_batch(self, draw: Draw, number: int) -> None:
        """Seed what a whole batch draws; `number` is that of a try, 0 is the batch itself."""
        _seed(draw.key, BATCH if self._whole else COLLATE, draw.place, number)

    def _items(self, rows: list[tuple[int, int]], draw: Draw) -> list[Any]:
        """The records. If one draws from a generator that is not seeded for each, it is from now
        on, and all are read again.
        """
        if hasattr(self.dataset, "many"):
            _seed(draw.key, BATCH, draw.place)
            return list(self.dataset.many([index for index, _ in rows]))
        while True:
            _seed(draw.key, BATCH, draw.place)
            before = _generators()
            items = []
            for place, row in enumerate(rows):
                self.inspection.reading.at = place
                items.append(self._item(*row, draw.key))
            moved = {
                name for name, place in _generators().items() if place != before[name]
            } - self.drawn
            if not moved:
                return items
            self.drawn |= moved

    def _item(self, index: int, view: int, key: bytes) -> Any:
        if self.drawn:
            _seed(key, RECORD, index, view, slow="others" in self.drawn)
        try:
            return self.dataset[index]
        except Exception as error:
            error.add_note(f"while record {index} was read")
            raise


def _stacked(items: list[Any]) -> Batch:
    """torch's own collate; what does not stack is refused without the sizes of anybody's record."""
    try:
        return default_collate(items)
    except (TypeError, RuntimeError, KeyError, AttributeError, ValueError, IndexError):
        rule = (
            "they must be tensors, arrays or numbers of one shape, in one structure; else give "
            "dpfy.lazy(..., collate=...)"
        )
        raise InvalidInput("train", "records that do not stack to a batch", rule) from None


def _seed(key: bytes, kind: int, number: int, view: int = 0, *, slow: bool = True) -> None:
    """Seed the global generators for one address of the draw's key."""
    digest = _digest(key, kind, number, view)
    seed = int.from_bytes(digest[:8], "little")
    torch.default_generator.manual_seed(seed)
    if slow:
        random.seed(seed)
        np.random.seed(int.from_bytes(digest[8:12], "little"))


def _digest(key: bytes, kind: int, number: int, view: int) -> bytes:
    return hashlib.blake2b(_address(kind, number, view), key=key, digest_size=16).digest()


def _copied(part: Any) -> Any:
    """A copy, or the item itself where it cannot be copied."""
    try:
        return fresh(part)
    except Exception:  # an item of any class may refuse to be copied
        return part


def _generators() -> dict[str, object]:
    """Where torch's generator stands, and where those stand that are slow to seed, Python's and
    NumPy's.
    """
    held = np.random.get_state(legacy=False)
    others = (
        random.getstate(),
        held["state"]["key"].tobytes(),
        held["state"]["pos"],
        held["has_gauss"],
        held["gauss"],
    )
    return {"torch": torch.get_rng_state().numpy().tobytes(), "others": others}


def _next() -> tuple[object, ...]:
    """What torch's generator, Python's and NumPy's give next: the same if and only if they stand at
    the same place.
    """
    torch_state = torch.get_rng_state().numpy().tobytes()
    return (
        torch_state,
        random.gauss(0, 1),
        random.random(),
        np.random.standard_normal(),
        np.random.random_sample(),
    )


@contextmanager
def _borrowed_generators() -> Iterator[None]:
    """The global generators, given back as they were."""
    torch_state, python_state, numpy_state = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(),
    )
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _portable(error: Exception) -> Exception:
    """The error as it can leave a process: itself, or its words."""
    if isinstance(error, DpfyError):
        return error
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # an error of any class may refuse to be stored, in any way
        pass
    told = RuntimeError(f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", []):
        told.add_note(note)
    return told
