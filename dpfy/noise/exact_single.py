"""Exact independent noise for float32 sums on a CPU: cells by single precision, where that cannot
tell by double, then by real numbers.

The same cells as those of :mod:`dpfy.noise.exact`, from words of 32 bits: for half of its time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfy.core.errors import Unsupported
from dpfy.core.randomness import Randomness
from dpfy.noise import arbitrary_precision
from dpfy.noise.exact import Draws, held
from dpfy.noise.gaussian import Scratch
from dpfy.noise.lattice import Lattice, pieces
from dpfy.noise.schedule import Term

ERROR = 2.0**-16
"""By how much a unit draw can be off in single precision, if its radius lies between the next
two.
"""
NEAREST, FARTHEST = 0.05, 4.05
SMALL = 512.0
"""Steps up to which a sum is added to the noise as it is."""
FEWEST = 16
"""Words below this have too few digits for any decision in floating point."""

Words = NDArray[np.int32]


def lay_(sums: Sequence[Tensor], on: Lattice, term: Term, draws: Draws, divisor: float) -> None:
    """Turn float32 `sums` into released values, in place. Guarantees: those of
    :func:`dpfy.noise.exact.lay_`.
    """
    require()
    rows = [t.view(-1) if t.is_contiguous() else t.flatten() for t in sums]
    sizes, target, done = [row.numel() for row in rows], 0, 0
    scale, factor = term[0] * on.noise, None
    for chunk, (scratch, length) in enumerate(draws.words(term[1])):
        factor = scratch.squared(scale) if factor is None else factor
        words = held("words", 2 * scratch.integers.shape[1], torch.int32).numpy().reshape(2, -1)
        np.copyto(words, scratch.integers)
        noise = scratch.transform(factor).numpy()
        parts, lengths, target, done = pieces(rows, sizes, target, done, length)
        values = (parts[0] if len(parts) == 1 else torch.cat(parts)).numpy()
        cells, unsure = _found(values, noise[:length], scale, on, _unknown(scratch, scale, length))
        if len(unsure):
            cells[unsure] = _decided(values[unsure], unsure, words, term, draws, chunk, on)
        np.add(cells, np.float32(0.5), values)
        np.multiply(values, np.float32(on.step / divisor), values)  # functions of the cell alone
        if len(parts) > 1:
            torch._foreach_copy_(parts, torch.split_with_sizes(torch.from_numpy(values), lengths))
    for t, row in zip(sums, rows, strict=True):
        if not t.is_contiguous():
            t.copy_(row.view(t.shape))


def _unknown(scratch: Scratch, scale: float, length: int) -> NDArray[np.intp]:
    """Values of pairs whose radius is so near, or so far, that single precision does not know
    them.
    """
    pairs = _outside(
        np.subtract(scratch.radius, np.float32(scale * NEAREST), scratch.radius),
        scale * (FARTHEST - NEAREST),
    )
    both = np.concatenate([pairs, pairs + len(scratch.radius)])
    return both[both < length]


def _outside(numbers: NDArray[np.float32], most: float) -> NDArray[np.intp]:
    """Which numbers do not lie between 0 and `most`: as whole numbers, negative ones and what is no
    number are larger than any other.
    """
    return np.flatnonzero(numbers.view(np.uint32) > np.float32(most).view(np.uint32))


@np.errstate(invalid="ignore")
def _found(
    values: NDArray[np.float32],
    noise: NDArray[np.float32],
    scale: float,
    on: Lattice,
    unknown: NDArray[np.intp],
) -> tuple[NDArray[np.float32], NDArray[np.intp]]:
    """floor(value / step + noise) in single precision, and where it is not certain."""
    t, cells = (held(name, len(values), torch.float32).numpy() for name in ("t", "single cells"))
    np.multiply(values, np.float32(1 / on.step), t)
    whole = None
    if (
        not max(-float(t.min()), float(t.max())) < SMALL
    ):  # long sums lose their fractions beside the noise: they are added later
        whole = np.floor(t)
        np.subtract(t, whole, t)
    np.add(t, noise, t)
    np.floor(t, cells)
    np.subtract(t, cells, t)
    error = np.float32(scale * ERROR + SMALL * 2.0**-23)
    t[unknown] = -1.0
    unsure = _outside(np.subtract(t, error, t), max(0.0, 1.0 - 2 * float(error)))
    if whole is not None:
        np.add(cells, whole, cells)
    return cells, unsure


@np.errstate(invalid="ignore")
def _decided(
    values: NDArray[np.float32],
    places: NDArray[np.intp],
    words: Words,
    term: Term,
    draws: Draws,
    chunk: int,
    on: Lattice,
) -> NDArray[np.float64]:
    """The cells of some values, by double precision and the words alone, or by as many digits as it
    takes.
    """
    scale = term[0] * on.noise
    z, error = unit(words, places)
    sums = values.astype(np.float64) / on.step
    t = sums + scale * z
    cells: NDArray[np.float64] = np.floor(t)
    certain = np.abs(t - cells - 0.5) < 0.5 - (scale * error + np.abs(t) * 2.0**-50)
    for i in np.flatnonzero(~certain & np.isfinite(sums)):
        drawn = draws.exactly(term[1], chunk, int(places[i]), words)
        cells[i] = arbitrary_precision.floor(
            [float(sums[i])], [(Decimal(term[0]) * Decimal(on.noise), drawn)]
        )
    return cells


def unit(words: Words, places: NDArray[np.intp]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The unit draws at some places of a chunk in double precision, in the middle of what their
    words leave open; and how much that is.
    """
    pairs = words.shape[1]
    first, second = words[:, places % pairs].astype(np.float64) + 0.5
    u = np.abs(first) / 2**31
    radius = np.sqrt(-2 * np.log(u))
    angle = second * (math.pi / 2**31)
    z = radius * np.where(places >= pairs, np.sin(angle), np.cos(angle))
    with np.errstate(divide="ignore"):
        error = 1.1 * 2.0**-32 / (u * radius) + radius * 2.0**-30 + 2.0**-40
    return z, np.where((np.abs(first) < FEWEST) | (radius < 2.0**-10), np.inf, error)


@cache
def require() -> None:
    """Show on this machine, before the first release, that single and double precision are as near
    to real numbers as is said here.
    """
    draws = Draws(Randomness(bytes(32)), "proof", 1 << 17, torch.float32)
    single, double = disagreement(draws)
    if single > ERROR / 2 or double > 1:
        what = (
            f"exact noise on this machine: single precision is off by {single:.1e}, double by "
            f"{double:.2f} of what it may be"
        )
        raise Unsupported(what, 'use noise="float", and report this')


def disagreement(draws: Draws, few: int = 200) -> tuple[float, float]:
    """The largest distance of single from double precision where it is trusted, over a chunk; and,
    in parts of the error that is said, of double precision from real numbers, over a few values.
    """
    scratch, length = next(draws.words(0))
    words = scratch.integers.copy()
    found = scratch.transform(scratch.squared(1.0)).numpy().astype(np.float64)[:length]
    trusted = np.setdiff1d(np.arange(length), _unknown(scratch, 1.0, length))
    z, error = unit(words, np.arange(length))
    single = float(np.abs(found - z)[trusted].max()) + float(error[trusted].max())
    known = [
        abs(float(Decimal(float(z[i])) - draws.exactly(0, 0, i, words))) / error[i]
        for i in range(0, length, max(1, length // few))
    ]
    return single, float(max(known))
