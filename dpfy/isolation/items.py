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
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from dpfy.isolation.collate import same_bits
from dpfy.isolation.dataset_copy import READS, DatasetCopy, Unchanged
from dpfy.isolation.inspection import AGAIN, ALONE, Mixing

CHANGES = "a data set whose items depend on which were read before"

MOST_BYTES, MOST_ROWS = 1 << 27, 1 << 20
"""A table larger than this is replaced by one row alone, not by a mixture of two."""

OURS = ("dpfy.data.given", "dpfy.data.mapped", "dpfy.data.shards")
"""Modules with data sets that read the record they are asked for, and no other."""

ReadItem = Callable[[Any, int, int], tuple[Any, bool]]
"""Item `index` of a data set, with the random generators in a state of this number (0: the one of
the batch that goes out), and whether it drew from them.
"""


def look_into(dataset: Any, index: int) -> tuple[Any, int] | None:
    """The data set below torch's own wrappers, and the number of the record there; None for one
    that reads only its own record.
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
        copied = DatasetCopy(dataset, {})
        _require_alone(
            DatasetCopy(
                dataset, {name: _row(table, index) for name, table in copied.tables.items()}
            ),
            index,
            number,
            mine,
            read,
        )
        if not copied.tables and len(copied.noted) == 1:
            raise Unchanged
        compared += 1
        if not draws and number:
            break
    return compared


def _require_alone(
    changed: DatasetCopy, index: int, number: int, mine: Any, read: ReadItem
) -> None:
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
    for name, table in DatasetCopy(changed.original, {}).tables.items():

        def replaced(new: Any, name: tuple[Any, ...] = name) -> tuple[Any] | None:
            return item(DatasetCopy(changed.original, {name: new}).dataset)

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
