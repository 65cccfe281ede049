"""The check of a collate function: called again with other records in the place of some, it must
give the other rows as before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfy.isolation.inspection import AGAIN, APART, FEW, WHOLE, Mixing

MIXED = "a collate function by which one record changes the row of another"
STRUCTURE = "a collate function whose structure depends on the records"
COUNTED = "a collate function by which the number of records changes their rows"
KEPT = "a collate function that gives another batch when it is called again"


Tensors = tuple[Tensor, ...]
"""The tensors of a batch, in the order of its structure."""

ATOMS = frozenset({int, float, bool, str, bytes, type(None)})


class Made(NamedTuple):
    """The tensors of a batch as a collate function made it, where the random generators stood
    after it, and whether it drew from them.
    """

    tensors: Tensors
    after: object
    draws: bool

    def __repr__(self) -> str:
        """Nothing of the batch."""
        return f"Made(draws={self.draws})"


Make = Callable[[list[Any], int], Made]
"""From items, some of them several times, and the number of a random state (0: the one of the batch
that goes out) to the batch.
"""


def check_batch(
    make: Make,
    items: list[Any],
    others: Sequence[Any] | None,
    group: int,
    batch: Tensors,
    tries: Iterable[int],
    rng: np.random.Generator,
) -> int:
    """Refuse a collate function by which a record of `items` changes the row of another; how many
    pairs of calls were compared.

    `group` items make a record together; `others` may take their place (None: other items of the
    batch). One try in WHOLE takes the whole batch, the others FEW records. The record that is
    longest in any direction always stays, so that padding keeps its length. Where it does not, the
    part that both batches have is compared, unless the function draws at random.
    """
    records = [items[start : start + group] for start in range(0, len(items), group)]
    sizes = [_sizes(record[0]) for record in records]
    compared = 0
    for number in tries:
        order = rng.permutation(len(records))[: len(records) if number % WHOLE == 0 else FEW]
        chosen, longest = _longest_first(order, sizes)
        kept = (
            int(rng.integers(longest, max(longest, len(chosen) // 2) + 1))
            if longest < len(chosen)
            else len(chosen) - 1
        )
        compared += _compare(make, [records[place] for place in chosen], kept, others, number, rng)
    if not _equal(make(items, 0).tensors, batch):
        raise Mixing(KEPT, AGAIN)
    return compared


def _compare(
    make: Make,
    records: list[list[Any]],
    kept: int,
    others: Sequence[Any] | None,
    number: int,
    rng: np.random.Generator,
) -> bool:
    """Two calls: with `records`, and with only some of them and other ones. Whether they could be
    compared.

    Of a function that draws at random only calls that drew equally much are compared, with other
    records of the same sizes: either the first records stay, or all but one that stands anywhere.
    So no record draws other numbers because one before it drew more. One that draws as much for any
    number of records is also called with the first alone.
    """
    group, size = len(records[0]), len(records)
    scattered = bool(rng.random() < 0.5) and number % 6 != 2
    position = rng.permutation(size) if scattered else np.arange(size)
    first = make([item for place in position for item in records[place]], number)
    # The others are left out, and nothing takes their place: of a function that draws at random,
    # the last ones, if it draws as much for any number of records.
    alone = number % 3 == 2 and (
        not first.draws
        or (not scattered and _draws_alike(make, records, kept, number, first.after))
    )
    alike = first.draws and not alone
    donors = _donors(records, kept, others, alike=alike, mixed=number % 4 < 2, rng=rng)
    if first.draws and scattered:
        donors = dict(list(donors.items())[:1])
    after = position[position < kept] if alone else position
    second = make([item for place in after for item in donors.get(place, records[place])], number)
    if not donors or (first.draws and first.after != second.after):
        return False
    stay = np.array([place for place in range(size) if place not in donors])
    mine, new = _rows(position, stay, group), _rows(after, stay, group)
    for a, b in _pairs(first.tensors, second.tensors):
        if a.shape[1:] != b.shape[1:] and first.draws:
            return False
        if not _same_corner(a[mine], b[new]):
            again = make([item for place in position for item in records[place]], number)
            raise (
                Mixing(COUNTED if alone else MIXED, APART)
                if _equal(first.tensors, again.tensors)
                else Mixing(KEPT, AGAIN)
            )
    return True


def _draws_alike(
    make: Make, records: list[list[Any]], kept: int, number: int, after: object
) -> bool:
    """Whether the generators stand where they stood `after` all of `records`, if one is left out,
    and if only the first `kept` are there.
    """
    return all(
        make([item for record in records[:count] for item in record], number).after == after
        for count in {len(records) - 1, kept}
    )


def _donors(
    records: list[list[Any]],
    kept: int,
    others: Sequence[Any] | None,
    *,
    alike: bool,
    mixed: bool,
    rng: np.random.Generator,
) -> dict[int, list[Any]]:
    """What takes the place of each record after the first `kept`, from the last on: copies of one
    other, or several where they are `mixed`.

    With `alike` it has the same sizes; a record without its like stays.
    """
    pool = records[:kept] if others is None else [[other] * len(records[0]) for other in others]
    if not alike:
        one = int(rng.integers(len(pool)))
        return {
            place: pool[int(rng.integers(len(pool))) if mixed else one]
            for place in range(len(records) - 1, kept - 1, -1)
        }
    by_sizes: dict[tuple[int, ...], list[list[Any]]] = {}
    for record in pool if others is not None else records:
        by_sizes.setdefault(_sizes(record[0]), []).append(record)
    found = {}
    for place in range(len(records) - 1, kept - 1, -1):
        like = [
            record
            for record in by_sizes.get(_sizes(records[place][0]), [])
            if record is not records[place]
        ]
        if like:
            found[place] = like[int(rng.integers(len(like)))]
    return found


def _longest_first(order: NDArray[np.int64], sizes: list[tuple[int, ...]]) -> tuple[list[int], int]:
    """The places, those first that hold the greatest size in some direction, and how many these
    are.
    """
    first: list[int] = []
    for direction in range(min(len(sizes[place]) for place in order)):
        longest = max(order, key=lambda place: sizes[place][direction])
        if not any(sizes[place][direction] == sizes[longest][direction] for place in first):
            first.append(int(longest))
    return [*first, *[int(place) for place in order if place not in first]], max(1, len(first))


def _sizes(item: Any) -> tuple[int, ...]:
    """The lengths of the parts of an item, in all their directions."""
    kind = type(item)
    if kind is Tensor or kind is np.ndarray:
        return tuple(item.shape)
    if kind in ATOMS and kind is not str:
        return ()
    if isinstance(item, dict):
        return tuple([size for part in item.values() for size in _sizes(part)])
    if kind is list or kind is tuple:
        if not item or type(item[0]) in ATOMS:
            return (len(item),)
        return (len(item), *[size for part in item[:8] for size in _sizes(part)])
    if isinstance(size := getattr(item, "size", None), tuple):  # an image
        return size
    return (len(item),) if hasattr(item, "__len__") else ()


def _rows(position: NDArray[np.int64], stay: NDArray[np.int64], group: int) -> Tensor:
    """Where the rows of the records that stay are, in the order of the records, if these numbers
    stand in this order.
    """
    order = {int(record): place for place, record in enumerate(position)}
    where = np.array([order[int(record)] for record in stay])
    return torch.from_numpy((where[:, None] * group + np.arange(group)).reshape(-1))


def _pairs(one: Tensors, other: Tensors) -> list[tuple[Tensor, Tensor]]:
    """The tensors of two batches, one by one."""
    if len(one) != len(other) or any(
        a.dim() != b.dim() or a.dtype != b.dtype for a, b in zip(one, other, strict=True)
    ):
        raise Mixing(STRUCTURE, APART)
    return list(zip(one, other, strict=True))


def _same_corner(one: Tensor, other: Tensor) -> bool:
    corner = tuple(slice(0, min(a, b)) for a, b in zip(one.shape, other.shape, strict=True))
    return same_bits(one[corner], other[corner])


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape hold the same values; NaN is the same as NaN."""
    return torch.equal(one, other) or bool(
        ((one == other) | ((one != one) & (other != other))).all()
    )


def _equal(one: Tensors, other: Tensors) -> bool:
    return all(a.shape == b.shape and same_bits(a, b) for a, b in _pairs(one, other))


def fresh(value: Any) -> Any:
    """A copy that a collate function may change."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is Tensor:
        return value.clone()
    if kind is dict:
        return {key: fresh(part) for key, part in value.items()}
    if kind is list or kind is tuple:
        return kind([fresh(part) for part in value])
    return value.copy() if kind is np.ndarray else copy.deepcopy(value)
