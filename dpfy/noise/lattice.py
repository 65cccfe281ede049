"""One public lattice for what is released: the sum, rounded at random, and the noise meet on it,
whatever the data.

Floating-point numbers lie closer together near zero, so a sum that is not zero makes outputs
possible that are impossible without it, and one such output gives a record away (Mironov 2012).
Here every released value is (k + 1/2) times a public step, k a whole number, over a public divisor.
docs/decisions.md has the proof and what is left.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpfy.core.errors import Unsupported

FINENESS = 32
"""Steps in a standard deviation of a step's own noise: at least as many, and less than twice as
many.
"""

APART, FEW = 1 << 16, 3
"""Parts of so many coordinates, and parts of which there are so few, are worked on where they lie;
other ones are copied together: the calls cost less than the copies.
"""

LOST = 2.0
"""By how much the mean of a randomly moved sum can be off: in units of the last digit of 1, in
steps.
"""


@dataclass(frozen=True)
class Lattice:
    """Where the values of one release lie, half-odd multiples of a power of two (`step`), and how
    it meets them.

    `noise` is the standard deviation of noise at unit scale, in steps. `phase` is secret, random
    and uniform between -1/2 and 1/2: all sums are moved by so many steps before they are rounded,
    so that they are rounded up or down by chance.
    """

    step: float
    noise: float
    phase: float = field(repr=False)

    @classmethod
    def of(cls, stddev: float, dtype: torch.dtype, phase: float, fresh: float = 1.0) -> Lattice:
        """For noise of this standard deviation at unit scale, where a step's own draw has the
        weight `fresh`.
        """
        place = _place(stddev, dtype, fresh)
        return cls(math.ldexp(1.0, place), math.ldexp(stddev, -place), phase)


@lru_cache(maxsize=1024)
def _place(stddev: float, dtype: torch.dtype, fresh: float) -> int:
    """The exponent of the step."""
    place, largest = (
        math.frexp(stddev * fresh / FINENESS)[1] - 1,
        math.frexp(torch.finfo(dtype).max)[1],
    )
    if not 8 - largest <= place <= largest - 28:
        raise Unsupported(
            f"noise of standard deviation {stddev:.3g} in {dtype}",
            "choose another clip norm, or float64",
        )
    return place


@lru_cache(maxsize=1024)
def with_rounding(
    scale: float, bound: float, coordinates: int, dtype: torch.dtype, fresh: float = 1.0
) -> float:
    """The standard deviation that is `scale` times the bound of a contribution *and of its
    rounding*.

    Guarantees: the random move changes the difference of two neighbouring sums, in the mean, by at
    most LOST in each coordinate, so by at most that times the root of their number in length. The
    noise is at least `scale` times the sum of both lengths.
    """
    share = scale * LOST * torch.finfo(dtype).eps * fresh / FINENESS * math.sqrt(coordinates)
    if not share < 0.5:
        raise Unsupported(
            f"{coordinates} coordinates of {dtype} with noise of {scale:.3g} bounds",
            "use parameters in float64",
        )
    return scale * bound / (1 - share)


def lay_(sums: list[Tensor], noise: Iterable[Tensor], lattice: Lattice, divisor: float) -> None:
    """Turn `sums` into released values, in place: (floor(sum + phase + noise) + 1/2) steps, over
    the divisor.

    `noise` is that of all sums laid end to end, in steps, piece by piece; on a CPU pieces should
    fit into the cache. A sparse sum, which holds the rows of a table that are in use, gives its
    place in `sums` to a dense tensor.

    Guarantees: once a sum is moved, everything is a function of the exact value of moved sum +
    noise: the addition, which IEEE 754 rounds correctly, the floor, the product. At a given place
    the same k gives the same bits whatever the sum was, and whether it was sparse or not.
    """
    if not sums:
        return
    weight, inverse = lattice.step / divisor, 1 / lattice.step
    half, phase = _constants(sums[0], weight / 2, lattice.phase)
    tables = {
        place: _Table(t.coalesce(), phase, inverse) for place, t in enumerate(sums) if t.is_sparse
    }
    for place, found in tables.items():
        sums[place] = found.values
    rows = [t.view(-1) if t.is_contiguous() else t.flatten() for t in sums]
    sizes, held = tuple([row.numel() for row in rows]), tuple(tables)
    start = 0
    for piece in noise:
        end = start + piece.numel()
        groups = _groups(sizes, start, end, held)
        cuts = (
            [piece]
            if len(groups) == 1
            else piece.split_with_sizes([group.length for group in groups])
        )
        for group, part in zip(groups, cuts, strict=True):
            parts = [
                rows[row] if whole else rows[row][begin:stop]
                for row, begin, stop, whole in group.parts
            ]
            if group.table is not None:
                torch.add(
                    half,
                    tables[group.table].add_to_(part, group.parts[0].begin).floor_(),
                    alpha=weight,
                    out=parts[0],
                )
                continue
            values = parts[0] if len(parts) == 1 else torch.cat(parts)
            torch.add(phase, values, alpha=inverse, out=values)
            values.add_(part).floor_()
            torch.add(half, values, alpha=weight, out=values)
            if len(parts) > 1:
                torch._foreach_copy_(parts, values.split_with_sizes([t.numel() for t in parts]))
        start = end
    for t, row in zip(sums, rows, strict=True):
        if not t.is_contiguous():
            t.copy_(row.view(t.shape))


_HELD = threading.local()


def _constants(like: Tensor, first: float, second: float) -> tuple[Tensor, ...]:
    """Two numbers as tensors of the type and device of `like`: a product and a sum of them are one
    pass then.

    In memory that the next call of the thread overwrites: to make it takes as long as some thousand
    values.
    """
    name = "double" if like.dtype is torch.float64 else "single"
    if not hasattr(_HELD, name):
        memory = np.zeros(2, np.float64 if like.dtype is torch.float64 else np.float32)
        setattr(_HELD, name, (memory, torch.from_numpy(memory), torch.from_numpy(memory).unbind()))
    memory, tensor, parts = getattr(_HELD, name)
    memory[0], memory[1] = first, second
    return parts if like.device.type == "cpu" else tensor.to(like.device).unbind()


class _Table:
    """The sum of a table of which some rows are in use, moved, and memory for its values: the other
    rows are never written out before.
    """

    def __init__(self, sums: Tensor, phase: Tensor, inverse: float) -> None:
        real = np.float64 if sums.dtype is torch.float64 else np.float32
        self._rows, self._moved = (
            sums.indices()[0].numpy(),
            torch.add(phase, sums.values(), alpha=inverse).numpy(),
        )
        self._phase = phase
        self.values = torch.from_numpy(
            np.empty(sums.shape, real)
        )  # NumPy asks the system for large pages

    def add_to_(self, noise: Tensor, begin: int) -> Tensor:
        """Add the moved sum from coordinate `begin` on to `noise`, in place: a row that is not in
        use was moved by the phase alone.
        """
        flat, width, end = noise.numpy(), max(self.values.shape[1], 1), begin + noise.numel()
        first, last = begin // width, -(-end // width)
        rows = slice(*np.searchsorted(self._rows, [first, last]))
        used, moved = self._rows[rows], self._moved[rows]
        whole, stop = -(-begin // width), end // width
        cut = [
            k for k in {0, len(used) - 1} if used.size and not whole <= used[k] < stop
        ]  # rows that begin or end outside
        ends = [
            (
                max(used[k] * width, begin),
                min((used[k] + 1) * width, end),
                used[k] * width,
                moved[k],
            )
            for k in cut
        ]
        noisy = [flat[a - begin : b - begin] + row[a - at : b - at] for a, b, at, row in ends]
        inside = flat[whole * width - begin : max(whole, stop) * width - begin].reshape(-1, width)
        if cut:
            between = (used >= whole) & (used < stop)
            used, moved = used[between], moved[between]
        kept = inside[used - whole]
        kept += moved
        noise.add_(self._phase)
        inside[used - whole] = kept
        for (a, b, _, _), values in zip(ends, noisy, strict=True):
            flat[a - begin : b - begin] = values
        return noise


class _Part(NamedTuple):
    """Some coordinates of a row, from `begin` to before `stop`; `whole` where that is all of it."""

    row: int
    begin: int
    stop: int
    whole: bool


class _Group(NamedTuple):
    """Parts of rows that follow each other and are worked on together, and their length; or a part
    of one row that is a `table`.
    """

    parts: tuple[_Part, ...]
    length: int
    table: int | None = None

    def apart(self) -> list[_Group]:
        """The parts by themselves."""
        return [_Group((part,), part.stop - part.begin, self.table) for part in self.parts]


@lru_cache(maxsize=256)
def _groups(
    sizes: tuple[int, ...], start: int, end: int, tables: tuple[int, ...]
) -> tuple[_Group, ...]:
    """The coordinates from `start` to `end` of rows laid end to end, large parts and those of
    tables by themselves.

    Held, since every step of a run asks for the same.
    """
    groups: list[_Group] = []
    first = 0
    for row, size in enumerate(sizes):
        begin, stop = max(start - first, 0), min(end - first, size)
        first += size
        if begin >= stop:
            continue
        part, length, table = (
            _Part(row, begin, stop, stop - begin == size),
            stop - begin,
            row if row in tables else None,
        )
        if (
            groups
            and max(length, groups[-1].length) < APART
            and table is None
            and groups[-1].table is None
        ):
            groups[-1] = _Group((*groups[-1].parts, part), groups[-1].length + length)
        else:
            groups.append(_Group((part,), length, table))
    return tuple(
        each for group in groups for each in (group.apart() if len(group.parts) <= FEW else [group])
    )


def pieces(
    rows: Sequence[Tensor], sizes: Sequence[int], target: int, done: int, length: int
) -> tuple[list[Tensor], list[int], int, int]:
    """The next `length` coordinates, from `done` in row `target` on, as parts of rows with their
    lengths; and where the next begin.
    """
    parts: list[Tensor] = []
    lengths: list[int] = []
    while length or not parts:
        room = min(sizes[target] - done, length)
        parts.append(rows[target] if room == sizes[target] else rows[target][done : done + room])
        lengths.append(room)
        length, done = length - room, done + room
        if done == sizes[target] and target + 1 < len(rows):
            target, done = target + 1, 0
    return parts, lengths, target, done
