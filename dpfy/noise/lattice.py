"""One public lattice for what is released: the sum, rounded at random, and the noise meet on it, whatever the data.

Floating-point numbers lie closer together near zero, so a sum that is not zero makes outputs possible that are impossible without it,
and one such output gives a record away (Mironov 2012). Here every released value is (k + 1/2) times a public step, k a whole number,
over a public divisor. docs/decisions.md has the proof and what is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dpfy.core.errors import Unsupported

FINENESS = 32
"""Steps in a standard deviation of a step's own noise: at least as many, and less than twice as many."""

LOST = 2.0
"""By how much the mean of a randomly moved sum can be off: in units of the last digit of 1, in steps."""


@dataclass(frozen=True)
class Lattice:
    """Where the values of one release lie, half-odd multiples of a power of two (`step`), and how it meets them.

    `noise` is the standard deviation of noise at unit scale, in steps. `phase` is secret, random and uniform between -1/2 and 1/2: all
    sums are moved by so many steps before they are rounded, so that they are rounded up or down by chance.
    """

    step: float
    noise: float
    phase: float = field(repr=False)

    @classmethod
    def of(cls, stddev: float, dtype: torch.dtype, phase: float, fresh: float = 1.0) -> Lattice:
        """For noise of this standard deviation at unit scale, where a step's own draw has the weight `fresh`."""
        place = _place(stddev, dtype, fresh)
        return cls(math.ldexp(1.0, place), math.ldexp(stddev, -place), phase)


@lru_cache(maxsize=1024)
def _place(stddev: float, dtype: torch.dtype, fresh: float) -> int:
    """The exponent of the step."""
    place, largest = math.frexp(stddev * fresh / FINENESS)[1] - 1, math.frexp(torch.finfo(dtype).max)[1]
    if not 8 - largest <= place <= largest - 28:
        raise Unsupported(f"noise of standard deviation {stddev:.3g} in {dtype}", "choose another clip norm, or float64")
    return place


@lru_cache(maxsize=1024)
def with_rounding(scale: float, bound: float, coordinates: int, dtype: torch.dtype, fresh: float = 1.0) -> float:
    """The standard deviation that is `scale` times the bound of a contribution *and of its rounding*.

    Guarantees: the random move changes the difference of two neighbouring sums, in the mean, by at most LOST in each coordinate, so by at
    most that times the root of their number in length. The noise is at least `scale` times the sum of both lengths.
    """
    share = scale * LOST * torch.finfo(dtype).eps * fresh / FINENESS * math.sqrt(coordinates)
    if not share < 0.5:
        raise Unsupported(f"{coordinates} coordinates of {dtype} with noise of {scale:.3g} bounds", "use parameters in float64")
    return scale * bound / (1 - share)


def lay_(sums: Sequence[Tensor], noise: Iterable[Tensor], lattice: Lattice, divisor: float) -> None:
    """Turn `sums` into released values, in place: (floor(sum + phase + noise) + 1/2) steps, over the divisor.

    `noise` is that of all sums laid end to end, in steps, piece by piece; on a CPU pieces should fit into the cache.

    Guarantees: once a sum is moved, everything is a function of the exact value of moved sum + noise: the addition, which IEEE 754
    rounds correctly, the floor, the product. At a given place the same k gives the same bits whatever the sum was.
    """
    if not sums:
        return
    rows = [t.view(-1) if t.is_contiguous() else t.flatten() for t in sums]
    sizes, weight = [row.numel() for row in rows], lattice.step / divisor
    real = np.float64 if rows[0].dtype is torch.float64 else np.float32
    half, phase = torch.from_numpy(np.array([weight / 2, lattice.phase], real)).to(rows[0].device).unbind()
    target, done = 0, 0
    for piece in noise:
        parts, lengths, target, done = pieces(rows, sizes, target, done, piece.numel())
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        torch.add(phase, values, alpha=1 / lattice.step, out=values)
        values.add_(piece).floor_()
        torch.add(half, values, alpha=weight, out=values)
        if len(parts) > 1:
            torch._foreach_copy_(parts, torch.split_with_sizes(values, lengths))
    for t, row in zip(sums, rows, strict=True):
        if not t.is_contiguous():
            t.copy_(row.view(t.shape))


def pieces(
    rows: Sequence[Tensor], sizes: Sequence[int], target: int, done: int, length: int
) -> tuple[list[Tensor], list[int], int, int]:
    """The next `length` coordinates, from `done` in row `target` on, as parts of rows with their lengths; and where the next begin."""
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
