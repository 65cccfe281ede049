"""The reader: from the numbers of records to a batch, here or in a worker process. What a record draws at random, it draws again."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, default_collate

from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.data.batch import Batch, Draw, plain

Collate = Callable[[list[Any]], Any]

RECORD, BATCH, COLLATE = range(3)
"""What is seeded: the reading of one record in one view, of a whole batch, or the collating of it."""

_address = Struct("<BQQ").pack


@dataclass(frozen=True)
class Failed:
    """An error on its way from a worker process."""

    error: Exception


@dataclass(repr=False)
class Reader(Dataset[Any]):
    """Reads the records of a draw, `views` times each, and collates them.

    A dataset with a method ``rows(indices)`` gives whole batches by itself, unless there is a `collate` function; one with
    ``many(indices)`` gives a list of records. Both are for data without augmentation.

    Guarantees: before each record is read, the global generators of torch, NumPy and Python are seeded by the draw's key, the record
    and the view: a record's augmentation depends on nothing else, and the same draw gives it again. They are left as they were found.
    """

    dataset: Any
    collate: Collate | None
    views: int
    drawn: set[str] = field(default_factory=set)
    """The generators that a record drew from. Only these are seeded for each: that takes as long as a tenth of a small image."""

    def __getitem__(self, draw: Draw) -> Batch | Failed:
        try:
            return self.batch(draw)
        except Exception as error:
            return Failed(_portable(error))

    def batch(self, draw: Draw) -> Batch:
        """The batch of a draw; with several views its tensors are [records, views, ...]."""
        rows = [(int(index), view) for index in draw.indices for view in range(self.views)]
        with _borrowed_generators():
            if self.collate is None and hasattr(self.dataset, "rows"):
                _seed(draw.key, BATCH, draw.place)
                found = self.dataset.rows([index for index, _ in rows])
            else:
                items = self._items(rows, draw)
                _seed(draw.key, COLLATE, draw.place)
                found = _stacked(items) if self.collate is None else self.collate(items)
        batch = plain("batch", found, len(rows))
        if self.views == 1:
            return batch
        return pytree.tree_map_only(Tensor, lambda t: t.unflatten(0, (len(draw.indices), self.views)), batch)

    def _items(self, rows: list[tuple[int, int]], draw: Draw) -> list[Any]:
        """The records. If one draws from a generator that is not seeded for each, it is from now on, and all are read again."""
        if hasattr(self.dataset, "many"):
            _seed(draw.key, BATCH, draw.place)
            return list(self.dataset.many([index for index, _ in rows]))
        while True:
            _seed(draw.key, BATCH, draw.place)
            before = _generators()
            items = [self._item(*row, draw.key) for row in rows]
            moved = {name for name, place in _generators().items() if place != before[name]} - self.drawn
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
        rule = "they must be tensors, arrays or numbers of one shape, in one structure; else give dpfy.lazy(..., collate=...)"
        raise InvalidInput("train", "records that do not stack to a batch", rule) from None


def _seed(key: bytes, kind: int, number: int, view: int = 0, *, slow: bool = True) -> None:
    """Seed the global generators for one address of the draw's key."""
    digest = hashlib.blake2b(_address(kind, number, view), key=key, digest_size=16).digest()
    seed = int.from_bytes(digest[:8], "little")
    torch.default_generator.manual_seed(seed)
    if slow:
        random.seed(seed)
        np.random.seed(int.from_bytes(digest[8:12], "little"))


def _generators() -> dict[str, object]:
    """Where torch's generator stands, and where those stand that are slow to seed, Python's and NumPy's."""
    held = np.random.get_state(legacy=False)
    others = (random.getstate(), held["state"]["key"].tobytes(), held["state"]["pos"], held["has_gauss"], held["gauss"])
    return {"torch": torch.get_rng_state().numpy().tobytes(), "others": others}


@contextmanager
def _borrowed_generators() -> Iterator[None]:
    """The global generators, given back as they were."""
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
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
