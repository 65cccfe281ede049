"""Before the noise kernel is trusted on a device it shows there that its noise is the right noise,
against plain arithmetic.

A compiler that gets a shift or a rounding wrong would leave training as it was and the guarantee
void. So each form of the kernel is run on a few thousand values with fixed keys before the first
release that uses it; ChaCha, the transform, the recurrence and the lattice are done again here,
word by word in NumPy, in double precision.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfy.core.errors import Unsupported
from dpfy.noise import chacha
from dpfy.noise.coordinate_slice import CoordinateSlice
from dpfy.noise.lattice import Lattice
from dpfy.noise.series import single, single_up
from dpfy.noise.strategy import FRESH, Recurrence

SIZES = (5, chacha.TILE + 13, 3)
PART = CoordinateSlice.of([(2, 5), (5 + 2 * chacha.LANES + 7, 5 + chacha.TILE + 11)], SIZES)
"""Of the first tensor the end, of the second a piece across two tiles that is not at either end of
them, of the third nothing.
"""
DIVISOR = 3.0
FINE, COARSE = Lattice(2.0**-20, 0.7 * 2**20, 5000.0), Lattice.of(0.7, torch.float32, 0.3)
"""The same noise on a lattice so fine that it hides nothing, with a phase that shows, and on one as
releases use it.
"""

TOLERANCE = 1e-4
"""Well above what float32 and a device's own logarithm do to values of this size, and below any
mistake that would matter.
"""

WEIGHTS = (-0.61, 0.37, -0.23, 0.19, -0.11, 0.07, 0.05, -0.03)


@lru_cache(maxsize=64)
def require(
    device: torch.device,
    again: bool,
    ring: bool,
    buffers: int,
    kind: torch.dtype = torch.float32,
    placed: bool = False,
) -> None:
    """Refuse to go on if the form of the kernel for such recurrences, with results of such a type,
    of whole tensors or of a part `placed` among them, does not give the noise it should on
    `device`.
    """
    if kind is not torch.float32:
        require(device, again, ring, buffers, placed=placed)  # where rounding hides nothing
    recurrence, part = _example(again, ring, buffers), PART if placed else None
    if (
        gap := max(
            disagreement(device, recurrence, kind, part),
            off_lattice(device, recurrence, kind, part),
        )
    ) > TOLERANCE:
        raise _untrusted(device, gap)


@lru_cache(maxsize=16)
def require_draw(device: torch.device, placed: bool = False) -> None:
    """The same for the form that draws noise by itself."""
    key, part = bytes(range(chacha.KEY_BYTES)), PART if placed else None
    found = [torch.zeros(size, device=device) for size in _sizes(part)]
    chacha.launch(found, None, [key], 1.0, FRESH, None, found, part)
    if (gap := _gap(torch.cat(found), _values(key, part))) > TOLERANCE:
        raise _untrusted(device, gap)


def _untrusted(device: torch.device, gap: float) -> Unsupported:
    what = (
        f"the noise kernel on {device}: it is off by {gap:.1e} where at most {TOLERANCE:.0e} is "
        f"rounding"
    )
    return Unsupported(what, "train on a CPU, or with parameters in float64, and report this")


def _example(again: bool, ring: bool, buffers: int) -> Recurrence:
    """A recurrence for which the same kernel is compiled."""
    if buffers:
        decay = tuple(0.9 - 0.11 * (i % 7) for i in range(buffers))
        return Recurrence(
            weights=tuple(WEIGHTS[i % 8] for i in range(buffers)), decay=decay, gain=1.3
        )
    rows = WEIGHTS[:5] if ring else ()
    return Recurrence(
        first=0.8,
        again=(-0.5, -0.3) if again else (),
        weights=rows,
        keep=2 if ring else 0,
        gain=1.3,
    )


def disagreement(
    device: torch.device,
    recurrence: Recurrence,
    kind: torch.dtype = torch.float32,
    part: CoordinateSlice | None = None,
) -> float:
    """The largest distance of the kernel's values and rows from those worked out here, beyond what
    rounding to `kind` may do.
    """
    out, exact, past, after = _tried(device, recurrence, kind, FINE, part)
    gap = _gap(out, exact * FINE.step / DIVISOR)
    return gap if past is None else max(gap, _gap(past, after))


def off_lattice(
    device: torch.device,
    recurrence: Recurrence,
    kind: torch.dtype = torch.float32,
    part: CoordinateSlice | None = None,
) -> float:
    """The largest distance of the kernel's values, on a lattice as releases use it, from the points
    of the cells in which those worked out here lie.
    """
    out, exact, _, _ = _tried(device, recurrence, kind, COARSE, part)
    weight, cell, gaps = COARSE.step / DIVISOR, np.floor(exact), []
    for k in (cell - 1, cell, cell + 1):
        beyond = (
            np.maximum(k - exact, exact - k - 1) * weight
        )  # from the cell of the value, where this is another one
        gaps.append(np.maximum(_gaps(out, (k + 0.5) * weight), beyond))
    return float(np.min(gaps, axis=0).max())


def _tried(
    device: torch.device,
    recurrence: Recurrence,
    kind: torch.dtype,
    lattice: Lattice,
    part: CoordinateSlice | None,
) -> tuple[Tensor, NDArray[np.float64], Tensor | None, NDArray[np.float64]]:
    """What the kernel releases, what it should release in steps and before the floor, the rows it
    leaves, and those it should leave.
    """
    keys = [
        bytes((37 * i + 11 * j) % 256 for i in range(chacha.KEY_BYTES))
        for j in range(1 + len(recurrence.again))
    ]
    draw = np.random.default_rng(1)
    sums = [draw.standard_normal(n).astype(np.float32) for n in _sizes(part)]
    rows = draw.standard_normal((len(recurrence.weights), sum(_sizes(part)))).astype(np.float32)
    found = [torch.from_numpy(part.copy()).to(device) for part in sums]
    past = torch.from_numpy(rows.copy()).to(device) if len(rows) else None
    out = found if kind is torch.float32 else [torch.empty_like(part, dtype=kind) for part in found]
    chacha.launch(found, lattice, keys, DIVISOR, recurrence, past, out, part)
    y = _values(keys[0], part) + sum(
        single(w) * _values(key, part) for w, key in zip(recurrence.again, keys[1:], strict=True)
    )
    y = y / single(recurrence.first)
    y = y + sum(
        single(w) * row.astype(np.float64) for w, row in zip(recurrence.weights, rows, strict=True)
    )
    exact = (
        np.concatenate(sums) / lattice.step
        + lattice.phase
        + single_up(lattice.noise * recurrence.gain) * y
    )
    after = rows.astype(np.float64)
    if recurrence.decay:
        after = after * np.array([[single(t)] for t in recurrence.decay]) + y
    elif past is not None:
        after[recurrence.keep] = y
    return torch.cat(out), exact, past, after


def _gap(found: Tensor, expected: NDArray[np.float64]) -> float:
    """The largest distance beyond rounding to the nearest."""
    return float(_gaps(found, expected).max())


def _gaps(found: Tensor, expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distances beyond rounding to the nearest; infinite where something is not a number."""
    kind = torch.finfo(found.dtype)
    rounding = 0.5 * kind.eps * 2 ** np.floor(np.log2(np.maximum(np.abs(expected), kind.tiny)))
    gap = np.abs(found.double().cpu().numpy() - expected) - rounding
    return np.where(np.isfinite(gap), gap, np.inf)


def _sizes(part: CoordinateSlice | None) -> tuple[int, ...]:
    """Of the tensors that the kernel is given."""
    return (
        SIZES
        if part is None or part.pieces is None
        else tuple(last - first for first, last in part.pieces)
    )


def _values(key: bytes, part: CoordinateSlice | None = None) -> NDArray[np.float64]:
    """The standard Gaussian values of tensors of these SIZES, or of a part of them."""
    made, tile = [], 0
    for size in SIZES:
        tiles = -(-size // chacha.TILE)
        blocks = np.arange(tile * chacha.LANES, (tile + tiles) * chacha.LANES, dtype=np.uint64)
        pairs = _pairs(
            words_of(blocks, key)
        )  # [16, blocks]: value i of a block lies i times LANES after its first
        made.append(pairs.reshape(16, tiles, chacha.LANES).transpose(1, 0, 2).reshape(-1)[:size])
        tile += tiles
    whole = np.concatenate(made)
    return (
        whole if part is None else np.concatenate([whole[first:last] for first, last in part.runs])
    )


def words_of(blocks: NDArray[np.uint64], key: bytes, nonce: int = 0) -> NDArray[np.uint32]:
    """The sixteen words of each block of the ChaCha keystream, as Bernstein (2008) defines it, with
    this first word of the nonce.
    """
    start = np.zeros((16, len(blocks)), dtype=np.uint32)
    start[:4] = np.frombuffer(b"expand 32-byte k", dtype="<u4")[:, None]
    start[4:12] = np.frombuffer(key, dtype="<u4")[:, None]
    start[12], start[13] = (
        (blocks & 0xFFFFFFFF).astype(np.uint32),
        (blocks >> np.uint64(32)).astype(np.uint32),
    )
    start[14] = nonce
    x = start.copy()
    quarters = [
        (i, 4 + (i + shift) % 4, 8 + (i + 2 * shift) % 4, 12 + (i + 3 * shift) % 4)
        for shift in (0, 1)
        for i in range(4)
    ]
    for _ in range(chacha.ROUNDS // 2):
        for a, b, c, d in quarters:
            for first, second, third, by in (
                (a, b, d, 16),
                (c, d, b, 12),
                (a, b, d, 8),
                (c, d, b, 7),
            ):
                x[first] += x[second]
                mixed = x[third] ^ x[first]
                x[third] = (mixed << np.uint32(by)) | (mixed >> np.uint32(32 - by))
    return x + start


def _pairs(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Box and Muller's pairs from words 2 i and 2 i + 1: radius and angle, the angle as a quarter
    of the circle and a rest.
    """
    below = ((words[1::2] & np.uint32(0xFFFF)) + 0.5) / 2.0**16
    radius = np.sqrt(np.maximum(0.0, -2.0 * np.log((words[0::2] + below) / 2.0**32)))
    quarter, rest = (
        words[1::2] >> np.uint32(30),
        (words[1::2] << np.uint32(2)).view(np.int32) / 2.0**31 * np.pi / 4,
    )
    angle = np.choose(quarter, [rest, np.pi / 2 - rest, np.pi + rest, -np.pi / 2 - rest])
    made = np.empty(words.shape, dtype=np.float64)
    made[0::2], made[1::2] = radius * np.cos(angle), radius * np.sin(angle)
    return made
