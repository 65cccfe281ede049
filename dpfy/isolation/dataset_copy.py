"""A copy of a data set object with other records in its tables, that notes which records it is asked
for.
"""

from __future__ import annotations

import operator
import sys
import types
from abc import ABCMeta
from collections.abc import Callable
from typing import Any, Generic, Protocol

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpfy.isolation.inspection import ALONE, Mixing
from dpfy.isolation.lines import LIBRARIES

READS = "a data set whose items are made of several records"

DEPTH, WIDE = 3, 64
"""How deep objects are looked into, and how many entries a container has at most to be looked
into.
"""


class Unchanged(Exception):
    """Nothing could be replaced."""


class DatasetCopy:
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
            kind = _logging(kind, asked, self._size)
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
            return AccessLog(value, asked, self._size)
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


class AccessLog:
    """Stands for an object with an item for each record, and notes which are asked for."""

    def __init__(self, value: Any, asked: set[int], size: int) -> None:
        self._value, self._asked, self._size = value, asked, size

    def __len__(self) -> int:
        return self._size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)

    def __getitem__(self, index: Any) -> Any:
        _log(self._asked, index, self._size)
        return self._value[index]


def _logging(kind: type, asked: set[int], size: int) -> type:
    """A class like `kind` whose objects note which items they are asked for."""

    of_kind: Callable[[Any, Any], Any] = getattr(kind, "__getitem__")  # noqa: B009

    def getitem(self: Any, index: Any) -> Any:
        _log(asked, index, size)
        return of_kind(self, index)

    return type(kind.__name__, (kind,), {"__getitem__": getitem, "__module__": kind.__module__})


def _log(asked: set[int], index: Any, size: int) -> None:
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
