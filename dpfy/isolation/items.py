"""The check of a data set's items: read again while every other record is replaced, item i must be
the same.

What is replaced: tensors, arrays, lists, tuples, dicts and frames that the data set object holds
and that have a row for each record, also inside of containers and of objects that it holds. Which
records it asks of itself, or of an object with as many items, is noted. Not seen: what it reads
through a closure, a global name, another process or a file whose name does not come from such a
list, and what its constructor computed from all records.
"""

from __future__ import annotations

import bisect
import operator
import sys
import types
from abc import ABCMeta
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Generic, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from dpfy.isolation.collate import same_bits
from dpfy.isolation.inspection import AGAIN, ALONE, Mixing
from dpfy.isolation.lines import LIBRARIES

READS = "a data set whose items are made of several records"
CHANGES = "a data set whose items depend on which were read before"

MOST_BYTES, MOST_ROWS = 1 << 27, 1 << 20
"""A table larger than this is replaced by one row alone, not by a mixture of two."""

DEPTH, WIDE = 3, 64
"""How deep objects are looked into, and how many entries a container has at most to be looked
into.
"""

OURS = ("dpfy.data.given", "dpfy.data.mapped", "dpfy.data.shards")
"""Modules with data sets that read the record they are asked for, and no other."""

ReadItem = Callable[[Any, int, int], tuple[Any, bool]]
"""Item `index` of a data set, with the random generators in a state of this number (0: the one of
the batch that goes out), and whether it drew from them.
"""


class Unchanged(Exception):
    """Nothing could be replaced."""


def look_into(dataset: Any, index: int) -> tuple[Any, int] | None:
    """The data set below torch's own wrappers, and the number of the record there; None for one
    that reads nothing but its own record.
    """
    while True:
        if type(dataset) is Subset:
            dataset, index = dataset.dataset, int(dataset.indices[index])
        elif type(dataset) is ConcatDataset:
            part = bisect.bisect_right(dataset.cumulative_sizes, index)
            index -= dataset.cumulative_sizes[part - 1] if part else 0
            dataset = dataset.datasets[part]
        else:
            break
    known = (
        isinstance(dataset, list | tuple | np.ndarray | Tensor) or type(dataset) is TensorDataset
    )
    module = type(dataset).__module__
    return None if known or module.startswith("datasets.") or module in OURS else (dataset, index)


def check_item(dataset: Any, index: int, item: Any, read: ReadItem, tries: Iterable[int]) -> int:
    """Refuse a data set whose item `index`, read as `item`, depends on another record; how many
    pairs of readings were compared.

    A data set that finds its row through a table of its own (a permutation) is accepted: each table
    may matter in one row. Sorted whole numbers are offsets, and may matter in more.

    Raises: Unchanged, where there is nothing that can be replaced.
    """
    compared = 0
    for number in tries:
        mine, draws = read(dataset, index, number)
        if number == 0 and not same(item, mine):
            raise Mixing(CHANGES, AGAIN)
        twin = Twin(dataset, {})
        _require_alone(
            Twin(dataset, {name: _row(table, index) for name, table in twin.tables.items()}),
            index,
            number,
            mine,
            read,
        )
        if not twin.tables and len(twin.noted) == 1:
            raise Unchanged
        compared += 1
        if not draws and number:
            break
    return compared


def _require_alone(changed: Twin, index: int, number: int, mine: Any, read: ReadItem) -> None:
    """Compare an item with that of a data set whose tables hold this record alone; if it differs,
    find which rows it needs.
    """

    def item(dataset: Any) -> tuple[Any] | None:
        try:
            return (read(dataset, index, number)[0],)
        except Exception:  # any error, as it is the user's code on changed tables
            return None

    found = item(changed.dataset)
    changed.require_one_each(index)
    if found is not None and same(mine, found[0]):
        return
    for name, table in Twin(changed.original, {}).tables.items():

        def replaced(new: Any, name: tuple[Any, ...] = name) -> tuple[Any] | None:
            return item(Twin(changed.original, {name: new}).dataset)

        found = replaced(_row(table, index))
        if (found is None or not same(mine, found[0])) and not _offsets(table):
            _require_one_row(replaced, table, mine)


def _require_one_row(replaced: Callable[[Any], tuple[Any] | None], table: Any, mine: Any) -> None:
    """Refuse an item that needs more than one row of a table. `replaced` gives it from another
    table, None if that failed.
    """
    size, donor = len(table), len(table) // 2

    def with_rows(first: int, end: int) -> tuple[Any] | None:
        rows = np.full(size, donor, np.int64)
        rows[first:end] = np.arange(first, end)
        return replaced(_mixture(table, rows))

    def holds(first: int, end: int) -> bool:
        found = with_rows(first, end)
        return found is not None and same(mine, found[0])

    if not holds(0, size):
        raise Unchanged  # a copy of the table is not the table
    if holds(0, 0):
        return
    low, high = 0, size  # rows before `low` are not enough, rows before `high` are
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(0, middle) else (middle, high)
    found = with_rows(high - 1, high)
    if found is None:
        raise Unchanged
    if not same(mine, found[0]):
        raise Mixing(READS, ALONE)


class Twin:
    """A data set object made again, with some of its tables replaced, that notes which records it
    is asked for.

    Guarantees: the data set itself is not changed, nor are the containers that it holds.
    """

    def __init__(self, dataset: Any, replaced: dict[tuple[Any, ...], Any]) -> None:
        self.original, self._size, self._replaced = dataset, len(dataset), replaced
        self.tables: dict[tuple[Any, ...], Any] = {}
        self.noted: list[set[int]] = []
        self._copies: dict[int, Any] = {}
        made = self._object(dataset, (), DEPTH)
        if made is dataset:
            raise Unchanged
        self.dataset = made

    def require_one_each(self, index: int) -> None:
        """Refuse a data set that asked itself for another item, or one with as many items for
        several.
        """
        own, *others = self.noted
        if own - {index} or any(len(asked) > 1 for asked in others):
            raise Mixing(READS, ALONE)

    def _object(self, value: Any, path: tuple[Any, ...], depth: int) -> Any:
        """A copy of an object with copies of what it holds; the object itself where it cannot be
        made again.
        """
        kind = type(value)
        plain = hasattr(value, "__dict__") and not isinstance(
            value, nn.Module | type | types.ModuleType | types.FunctionType
        )
        if not plain or not _simple(kind):
            return value
        asked: set[int] | None = None
        if path == () or self._sized(value):
            asked = set()
            self.noted.append(asked)
            kind = _noting(kind, asked, self._size)
        try:
            made = object.__new__(kind)
        except TypeError:  # of a class that C code makes
            return value
        self._copies[id(value)] = made
        for name, part in vars(value).items():
            made.__dict__[name] = self._part(part, (*path, name), depth)
        return made

    def _part(self, value: Any, path: tuple[Any, ...], depth: int) -> Any:
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, Tensor | np.ndarray) or hasattr(value, "iloc"):
            return self._table(value, path) if value.ndim and len(value) == self._size else value
        if type(value) in (list, tuple, dict):
            if len(value) == self._size and not all(_nests(part) for part in _first(value)):
                return self._table(value, path)
            return self._container(value, path, depth)
        if isinstance(value, set | bytearray) or (
            isinstance(value, dict | list) and hasattr(value, "copy")
        ):
            return value.copy()
        if depth and (self._sized(value) if isinstance(value, Dataset) else _owned(type(value))):
            made = self._object(value, path, depth - 1)
            if made is not value:
                return made
        if (
            not isinstance(value, str | bytes | range)
            and hasattr(value, "__getitem__")
            and self._sized(value)
        ):
            asked: set[int] = set()
            self.noted.append(asked)
            return Noting(value, asked, self._size)
        return value

    def _container(self, value: Any, path: tuple[Any, ...], depth: int) -> Any:
        deep = depth and len(value) <= WIDE
        if isinstance(value, dict):
            return {
                key: self._part(part, (*path, key), depth - 1) if deep else part
                for key, part in value.items()
            }
        return type(value)(
            self._part(part, (*path, place), depth - 1) if deep else part
            for place, part in enumerate(value)
        )

    def _table(self, value: Any, path: tuple[Any, ...]) -> Any:
        self.tables[path] = value
        value = self._replaced.get(path, value)
        return value.copy() if isinstance(value, list | dict) else value

    def _sized(self, value: Any) -> bool:
        try:
            return len(value) == self._size
        except (TypeError, AttributeError, NotImplementedError):
            return False


class Noting:
    """Stands for an object with an item for each record, and notes which are asked for."""

    def __init__(self, value: Any, asked: set[int], size: int) -> None:
        self._value, self._asked, self._size = value, asked, size

    def __len__(self) -> int:
        return self._size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)

    def __getitem__(self, index: Any) -> Any:
        _note(self._asked, index, self._size)
        return self._value[index]


def _noting(kind: type, asked: set[int], size: int) -> type:
    """A class like `kind` whose objects note which items they are asked for."""

    of_kind: Callable[[Any, Any], Any] = getattr(kind, "__getitem__")  # noqa: B009

    def getitem(self: Any, index: Any) -> Any:
        _note(asked, index, size)
        return of_kind(self, index)

    return type(kind.__name__, (kind,), {"__getitem__": getitem, "__module__": kind.__module__})


def _note(asked: set[int], index: Any, size: int) -> None:
    """Note the records that an index names; of a slice the first and the last."""
    if isinstance(index, slice):
        rows = range(size)[index]
        asked.update({rows[0], rows[-1]} if rows else ())
        return
    try:
        asked.add(operator.index(index) % size)
    except TypeError:
        found = np.asarray(index.cpu() if isinstance(index, Tensor) else index)
        if found.dtype.kind in "iu":
            asked.update(int(row) % size for row in found.reshape(-1)[:WIDE])


def _owned(kind: type) -> bool:
    """Whether objects of a class are the user's own, and no transforms."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None) or ""
    called = any("__call__" in vars(base) for base in kind.__mro__)
    return (
        module is not None
        and kind.__module__ != "builtins"
        and not file.startswith(LIBRARIES)
        and not called
    )


def _simple(kind: type) -> bool:
    """Whether an object of a class can be made again from its fields, and go again, without anybody
    noticing.
    """
    theirs = [base for base in kind.__mro__ if base not in (object, Generic, Protocol)]
    special = any(
        vars(base).get(name)
        for base in theirs
        for name in ("__slots__", "__del__", "__init_subclass__")
    )
    return (
        not special and type(kind) in (type, ABCMeta) and kind.__reduce_ex__ is object.__reduce_ex__
    )


def _first(value: Any) -> list[Any]:
    """The first entries of a container."""
    return list(value.values() if isinstance(value, dict) else value)[:1]


def _nests(part: Any) -> bool:
    """Whether an entry of a container is a table by itself, or a data set: then the container is no
    table.
    """
    return isinstance(part, Dataset)


def _row(table: Any, row: int) -> Any:
    """A table of the same length whose rows are all this one; of tensors and arrays without memory
    of its own.
    """
    if isinstance(table, Tensor):
        return table[row : row + 1].clone().expand(table.shape)
    if type(table) in (np.ndarray, np.memmap):
        one = np.array(table[row : row + 1])
        return np.lib.stride_tricks.as_strided(one, table.shape, (0, *one.strides[1:]))
    if isinstance(table, list | tuple):
        return type(table)([table[row]]) * len(table)
    if isinstance(table, dict):
        return dict.fromkeys(table, next(islice(table.values(), row, None)))
    return _mixture(table, np.full(len(table), row, np.int64))


def _mixture(table: Any, rows: NDArray[np.int64]) -> Any:
    """A table with these rows of the old one."""
    if isinstance(table, Tensor | np.ndarray):
        if table.nbytes > MOST_BYTES:
            raise Unchanged
        return (
            table[torch.from_numpy(rows).to(table.device)]
            if isinstance(table, Tensor)
            else table[rows]
        )
    if len(table) > MOST_ROWS:
        raise Unchanged
    if isinstance(table, dict):
        held = list(table.values())
        return {key: held[row] for key, row in zip(table, rows, strict=True)}
    if isinstance(table, list | tuple):
        return type(table)(table[row] for row in rows)
    made = table.iloc[rows]
    made.index = table.index
    return made


def _offsets(table: Any) -> bool:
    """Whether a table holds whole numbers in ascending order."""
    try:
        numbers = table.cpu().numpy() if isinstance(table, Tensor) else np.asarray(table)
    except Exception:  # whatever a list holds that is no array
        return False
    return (
        numbers.ndim == 1
        and numbers.dtype.kind in "iu"
        and bool((numbers[1:] >= numbers[:-1]).all())
    )


def same(one: Any, other: Any) -> bool:
    """Whether two items hold the same values.

    Raises: Unchanged, where they cannot be compared.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and same_bits(one, other)
    if isinstance(one, np.ndarray):
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same(part, other[key]) for key, part in one.items()
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one == other or (one != one and other != other)
    if type(one).__eq__ is object.__eq__:
        if not hasattr(one, "__dict__"):
            raise Unchanged
        return same(vars(one), vars(other))
    return bool(one == other)
