# mypy: disable-error-code="no-untyped-def, assignment"
"""Gaussian noise on a GPU, made where it is added: counters in, noisy sums out, one launch for all
parameters.

The bits are a ChaCha keystream of 12 rounds (Bernstein 2008) under a secret key of 256 bits: a
cipher, so that anyone who sees some of the noise learns nothing about the rest. The transform is that
of Box & Muller (1958). Of what has the size of the model, only the sums and the rows of past noise
that a strategy remembers are read, and only the sums and the rows that change are written, each
once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.noise.coordinate_slice import CoordinateSlice
from dpfy.noise.lattice import Lattice
from dpfy.noise.series import single, single_up
from dpfy.noise.strategy import FRESH, Recurrence

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only installation
    triton = None

ROUNDS = 12
LANES = 256
TILE = 16 * LANES
"""Values of one tile: value 256 i + j comes from word i of the keystream block 256 * tile + j. A
tensor begins a new tile.
"""

WIDTH = 128
"""Blocks that one program makes, one a thread: with fewer threads there are more programs, and some
compute while others wait.
"""

KEY_BYTES = 32


def usable(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernel can add to these tensors."""
    return triton is not None and all(
        t.is_cuda and t.dtype is torch.float32 and t.is_contiguous() for t in tensors
    )


def writes(into: Sequence[Tensor], device: torch.device) -> bool:
    """Whether the kernel can write its results to these tensors."""
    kind = into[0].dtype
    return kind in KINDS and all(
        t.dtype is kind and t.device == device and t.is_contiguous() for t in into
    )


def add_(
    tensors: Sequence[Tensor],
    lattice: Lattice,
    keys: Sequence[bytes],
    divisor: float = 1.0,
    recurrence: Recurrence = FRESH,
    past: Tensor | None = None,
    into: Sequence[Tensor] | None = None,
    part: CoordinateSlice | None = None,
) -> None:
    """Add the noise of `recurrence` to all `tensors`, on `lattice`, and divide by `divisor`, in
    place; the rows of `past` move on.

    With `into` the results are rounded to the types of these tensors and written there, and
    `tensors` are only read where that is the shorter way.

    `keys`: 32 bytes for the step's own draw, then for each earlier draw that is taken again, the
    last step's first. The values of a draw are a function of its key and of the sizes of the
    tensors; with a `part` they are those that these coordinates have in the draw for all of its
    tensors. `past` holds the rows that the recurrence reads, the tensors side by side in each.

    Guarantees: those of :func:`dpfy.noise.lattice.lay_`. No two values of a draw use the same word
    of the keystream, but for the two of a pair, which share two words; u = (k + (m + 1/2) / 2^16) /
    2^32 for the first word k and the last 16 bits m of the second, which is also the angle, so that
    small u, which make the tail, keep their full precision; a pair has at most radius 8.24. Weights
    of the past are rounded toward zero, that of the step's own draw and the scale up. Noise and
    rows equal those of the portable
    :func:`dpfy.noise.noise_buffers.noise` for the same draws, up to float32 rounding. The kernel
    has shown on this device that it does
    what it says (:mod:`dpfy.noise.kernel_selftest`). Noise is added in float32, before anything is
    rounded to another type.
    """
    if not tensors:
        return
    out = tensors if into is None or not writes(into, tensors[0].device) else into
    if tensors[0].is_cuda:
        from dpfy.noise import kernel_selftest

        not_recorded()  # before the proof, which cannot be had there
        r = recurrence
        form = bool(r.again), bool(r.weights) and not r.decay, len(r.decay)
        kernel_selftest.require(tensors[0].device, *form, out[0].dtype, part is not None)
    launch(tensors, lattice, keys, divisor, recurrence, past, out, part)
    if into is not None and out is tensors:
        torch._foreach_copy_(list(into), list(tensors))


def draw_(tensors: Sequence[Tensor], key: bytes, part: CoordinateSlice | None = None) -> None:
    """Overwrite `tensors` with the draw of `key`, or a `part` of it: standard Gaussian noise by
    itself, on no lattice. Never for sums.
    """
    if tensors and tensors[0].is_cuda:
        from dpfy.noise import kernel_selftest

        not_recorded()
        kernel_selftest.require_draw(tensors[0].device, part is not None)
    launch(tensors, None, [key], 1.0, FRESH, None, tensors, part)


def launch(
    tensors: Sequence[Tensor],
    lattice: Lattice | None,
    keys: Sequence[bytes],
    divisor: float,
    recurrence: Recurrence,
    past: Tensor | None,
    out: Sequence[Tensor],
    part: CoordinateSlice | None = None,
) -> None:
    """What :func:`add_` does, without asking for proof; without a lattice, the noise alone. Results
    go to `out`, which may be `tensors`.
    """
    addresses, sizes = tuple([t.data_ptr() for t in tensors]), tuple([t.numel() for t in tensors])
    ends = addresses if out is tensors else tuple([t.data_ptr() for t in out])
    if not any(sizes):
        return
    device, r = tensors[0].device, recurrence
    away = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if away else nullcontext():
        queue = queue_of(device) if device.type == "cuda" else 0
        at = places(addresses, ends, sizes, device, queue, part)
        weights = _weights(r.again, r.weights, r.decay, device, queue)
        again = (
            sent(torch.tensor([word for key in keys[1:] for word in key_words(key)]), device)
            if r.again
            else at.table
        )
        rows = at.table if past is None else past
        on = lattice or Lattice(1.0, 1.0, 0.0)
        _add[(at.tiles * (LANES // WIDTH),)](
            at.table, at.owners, at.before, *key_words(keys[0]), single_up(1 / single(r.first)), single_up(on.noise * r.gain),  # noqa: E501
            1 / on.step, on.phase, on.step, divisor,
            again, len(r.again), weights, rows, at.length, len(r.weights), r.keep, LATTICE=lattice is not None,
            LANES=LANES, WIDTH=WIDTH, ROUNDS=ROUNDS, PIECES=_pieces(len(r.decay)), OUT=KINDS[out[0].dtype], PLACED=part is not None,  # noqa: E501
            AGAIN=bool(r.again), RING=bool(r.weights) and not r.decay, BUFFERS=len(r.decay), num_warps=WIDTH // 32,
        )  # fmt: skip


def queue_of(device: torch.device) -> int:
    """The current queue of `device`, which is the current one; never one whose work is being
    recorded.
    """
    not_recorded()
    return torch._C._cuda_getCurrentRawStream(device.index)


def not_recorded() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            "noise inside a CUDA graph, where every replay would add the same",
            "release outside of the graph",
        )


def _pieces(buffers: int) -> int:
    """In how many pieces a program works: with all of its buffers in registers at once, too few
    programs would be under way.
    """
    return 1 if not buffers else 2 if buffers <= 3 else 4


class _Places(NamedTuple):
    """Where the tensors lie: (address, first tile, size, place in a row of the past, address of the
    result) of each, and whose each tile is, on the device. Of parts: by how many blocks of the
    keystream each is behind, and values of its first tile it does not hold.
    """

    table: Tensor
    owners: Tensor
    before: Tensor
    tiles: int
    length: int


@lru_cache(maxsize=64)
def places(
    addresses: tuple[int, ...],
    ends: tuple[int, ...],
    sizes: tuple[int, ...],
    device: torch.device,
    queue: int,
    part: CoordinateSlice | None = None,
) -> _Places:
    """Kept, because addresses repeat from step to step in training: then nothing is sent. A table
    belongs to the queue it was sent on.
    """
    skipped = (
        (0,) * len(sizes)
        if part is None
        else tuple([first % TILE for first, _ in _pieces_of(part, sizes)])
    )
    tiles = tuple(
        [
            -(-(skip + size) // TILE) if size else 0
            for skip, size in zip(skipped, sizes, strict=True)
        ]
    )
    firsts, offsets = list(accumulate(tiles, initial=0)), accumulate(sizes, initial=0)
    rows = zip(addresses, firsts, sizes, offsets, ends, strict=False)
    table = sent(torch.tensor([number for row in rows for number in row]), device)
    owners = before = _owners(tiles, device, queue)
    if part is not None:
        whole = accumulate((-(-size // TILE) for size in part.sizes), initial=0)
        tile = [
            start + first // TILE
            for start, (first, _) in zip(whole, _pieces_of(part, sizes), strict=False)
        ]
        shifts = [
            ((t - f) * LANES, skip) for t, f, skip in zip(tile, firsts, skipped, strict=False)
        ]
        before = sent(torch.tensor([number for shift in shifts for number in shift]), device)
    return _Places(table, owners, before, len(owners), sum(sizes))


def _pieces_of(part: CoordinateSlice, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Where each tensor's coordinates lie in the tensor that they are a part of."""
    pieces = part.pieces
    if pieces is None or tuple([last - first for first, last in pieces]) != sizes:
        raise InvalidInput(
            "part",
            part.runs[:3],
            f"must hold, of each tensor, one piece of the size that is given ({sizes[:3]})",
        )
    return pieces


@lru_cache(maxsize=16)
def _owners(tiles: tuple[int, ...], device: torch.device, queue: int) -> Tensor:
    return sent(
        torch.repeat_interleave(torch.arange(len(tiles), dtype=torch.int32), torch.tensor(tiles)),
        device,
    )


@lru_cache(maxsize=1024)
def _weights(
    again: tuple[float, ...],
    weights: tuple[float, ...],
    decay: tuple[float, ...],
    device: torch.device,
    queue: int,
) -> Tensor:
    return sent(
        torch.tensor([single(w) for w in (*again, *weights, *decay)] or [0.0], dtype=torch.float32),
        device,
    )


def sent(here: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for it."""
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def key_words(key: bytes) -> tuple[int, ...]:
    return struct.unpack("<4q", key)


_add: Any = None
KINDS: dict[torch.dtype, Any] = {}

if triton is not None:
    KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

    @triton.jit
    def _quarter(a, b, c, d):
        """The quarter round of ChaCha."""
        a += b
        d ^= a
        d = (d << 16) | (d >> 16)
        c += d
        b ^= c
        b = (b << 12) | (b >> 20)
        a += b
        d ^= a
        d = (d << 8) | (d >> 24)
        c += d
        b ^= c
        b = (b << 7) | (b >> 25)
        return a, b, c, d

    @triton.jit
    def _pair(a, b):
        """Two standard Gaussian values from two random words.

        The angle: two bits of `b` choose a quarter of the circle, the other thirty an angle x
        between -pi/4 and pi/4 in it, where a few terms of the series of sine and cosine are exact
        to the last digit. Where `a` is so small that float32 has digits left below it, u goes on
        with the last 16 bits of `b`, whose weight in the angle is below a millionth.
        """
        below = ((b & 0xFFFF).to(tl.float32) + 0.5) * 1.52587890625e-05
        u = (a.to(tl.float32) + below) * 2.3283064365386963e-10
        radius = tl.sqrt(-2.0 * tl.log(tl.minimum(u, 1.0)))
        x = (b << 2).to(tl.int32, bitcast=True).to(tl.float32) * 3.6572951981678995e-10
        s = x * x
        sine = x + x * s * (-1.0 / 6 + s * (1.0 / 120 + s * (-1.0 / 5040 + s * (1.0 / 362880))))
        cosine = 1.0 + s * (-0.5 + s * (1.0 / 24 + s * (-1.0 / 720 + s * (1.0 / 40320))))
        swap = (b & 0x40000000) != 0
        radius = tl.where((b & 0x80000000) != 0, -radius, radius)
        return radius * tl.where(swap, sine, cosine), radius * tl.where(swap, cosine, sine)

    @triton.jit
    def keystream(k0, k1, k2, k3, block, nonce, ROUNDS: tl.constexpr):
        """The sixteen words of the keystream blocks with these numbers, as vectors."""
        zero = tl.zeros_like(block).to(tl.uint32)
        c0, c1, c2, c3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
        c4, c5 = zero + k0.to(tl.uint32), zero + (k0 >> 32).to(tl.uint32)
        c6, c7 = zero + k1.to(tl.uint32), zero + (k1 >> 32).to(tl.uint32)
        c8, c9 = zero + k2.to(tl.uint32), zero + (k2 >> 32).to(tl.uint32)
        c10, c11 = zero + k3.to(tl.uint32), zero + (k3 >> 32).to(tl.uint32)
        c12, c13, c14 = block.to(tl.uint32), (block >> 32).to(tl.uint32), zero + nonce
        x0, x1, x2, x3, x4, x5, x6, x7 = c0, c1, c2, c3, c4, c5, c6, c7
        x8, x9, x10, x11, x12, x13, x14, x15 = c8, c9, c10, c11, c12, c13, c14, zero
        for _ in tl.static_range(ROUNDS // 2):
            x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
            x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
            x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
            x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
            x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
            x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
            x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
            x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
        x0, x1, x2, x3, x4, x5, x6, x7 = (
            x0 + c0,
            x1 + c1,
            x2 + c2,
            x3 + c3,
            x4 + c4,
            x5 + c5,
            x6 + c6,
            x7 + c7,
        )
        x8, x9, x10, x11, x12, x13, x14 = (
            x8 + c8,
            x9 + c9,
            x10 + c10,
            x11 + c11,
            x12 + c12,
            x13 + c13,
            x14 + c14,
        )
        return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15

    @triton.jit
    def _draw(k0, k1, k2, k3, block, ROUNDS: tl.constexpr):
        """Sixteen vectors of standard Gaussian values, one for each word of the keystream blocks
        with these numbers.
        """
        x = keystream(k0, k1, k2, k3, block, 0, ROUNDS)
        z = ()
        for i in tl.static_range(8):
            z = z + _pair(x[2 * i], x[2 * i + 1])
        return z

    @triton.jit
    def _plus(y, weight, z):
        """y + weight z, vector by vector."""
        out = ()
        for i in tl.static_range(16):
            out = out + (y[i] + weight * z[i],)
        return out

    @triton.jit
    def joined(y, HALF: tl.constexpr):
        """Each of the first HALF tensors joined with its partner in the second half."""
        out = ()
        for i in tl.static_range(HALF):
            out = out + (tl.join(y[i], y[i + HALF]),)
        return out

    @triton.jit
    def _load(at, inside, MASKED: tl.constexpr):
        return tl.load(at, mask=inside, other=0.0) if MASKED else tl.load(at)

    @triton.jit
    def _finish(
        y, target, out, scale, inverse, phase, step, divisor, weights, past, stride, rows, keep, inside,
        RING: tl.constexpr, BUFFERS: tl.constexpr, LATTICE: tl.constexpr, MASKED: tl.constexpr,
    ):  # fmt: skip
        """Correlate with the past, add to the sums on the lattice, divide, and round to the type of
        the result.
        """
        if RING:
            for r in range(rows):
                # A row's number times its length can pass 2^31.
                y += tl.load(weights + r) * _load(
                    past + tl.cast(r, tl.int64) * stride, inside, MASKED
                )
            tl.store(past + tl.cast(keep, tl.int64) * stride, y, mask=inside)
        if LATTICE:
            moved = _load(target, inside, MASKED) * inverse + phase
        held = ()  # all buffers are read before one is written
        for j in tl.static_range(BUFFERS):
            held = held + (_load(past + j * stride, inside, MASKED),)
        for j in tl.static_range(BUFFERS):
            y += tl.load(weights + j) * held[j]
        for j in tl.static_range(BUFFERS):
            tl.store(past + j * stride, tl.load(weights + BUFFERS + j) * held[j] + y, mask=inside)
        if LATTICE:
            y = (tl.floor(moved + scale * y) + 0.5) * step / divisor
        tl.store(out, y, mask=inside)

    @triton.jit
    def tile_of(table, owners, LANES: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr):
        """What a program works on, WIDTH lanes of a tile of a tensor: its number, the blocks of its
        keystream, where in the tensor the tile begins and how much is left from there, where sums
        are read and where values go; and where the table says what its past is.
        """
        part = tl.program_id(0).to(tl.int64)
        tile = part // (LANES // WIDTH)
        mine = table + 5 * tl.load(owners + tile)
        block = part * WIDTH + tl.arange(0, WIDTH)
        start = (tile - tl.load(mine + 1)) * (16 * LANES)
        left = tl.load(mine + 2) - start
        target = tl.load(mine).to(tl.pointer_type(tl.float32)) + start
        out = tl.load(mine + 4).to(tl.pointer_type(OUT)) + start
        return part, block, start, left, target, out, mine + 3

    @triton.jit(do_not_specialize=["k0", "k1", "k2", "k3", "draws", "stride", "rows", "keep"])
    def _add(
        table, owners, before, k0: tl.int64, k1: tl.int64, k2: tl.int64, k3: tl.int64, own, scale, inverse, phase, step, divisor,  # noqa: E501
        again, draws, weights, past, stride: tl.int64, rows, keep, LATTICE: tl.constexpr,
        LANES: tl.constexpr, WIDTH: tl.constexpr, ROUNDS: tl.constexpr,
        PIECES: tl.constexpr, OUT: tl.constexpr, PLACED: tl.constexpr, AGAIN: tl.constexpr, RING: tl.constexpr, BUFFERS: tl.constexpr,  # noqa: E501
    ):  # fmt: skip
        """WIDTH lanes of one tile of one tensor.

        `weights`: of the draws taken again, of the rows of the past, then how much of themselves
        buffers keep. `before`: where PLACED, of each tensor, how much further on in the keystream
        it is, and how many values of its first tile are not its own.
        """
        part, block, start, left, target, out, behind = tile_of(table, owners, LANES, WIDTH, OUT)
        if PLACED:
            mine = before + 2 * tl.load(owners + part // (LANES // WIDTH))
            block += tl.load(mine)
            skipped = tl.load(mine + 1)
            start -= skipped
            left += skipped
            target -= skipped
            out -= skipped
        past += tl.load(behind) + start
        z = _draw(k0.to(tl.int64), k1.to(tl.int64), k2.to(tl.int64), k3.to(tl.int64), block, ROUNDS)
        if AGAIN:
            for d in range(draws):
                key = again + 4 * d
                old = _draw(
                    tl.load(key),
                    tl.load(key + 1),
                    tl.load(key + 2),
                    tl.load(key + 3),
                    block,
                    ROUNDS,
                )
                z = _plus(z, tl.load(weights + d), old)
        weights += draws
        # As matrices, column c of piece k for word PIECES c + k: a thread keeps its row, and memory
        # is met in few, wide operations.
        pieces = joined(joined(z, 8), 4)
        if PIECES <= 2:
            pieces = joined(pieces, 2)
        if PIECES == 1:
            pieces = joined(pieces, 1)
        for k in tl.static_range(PIECES):
            y = own * tl.reshape(pieces[k], (WIDTH, 16 // PIECES))
            place = (block % LANES).to(tl.int32)[:, None] + (
                PIECES * tl.arange(0, 16 // PIECES) + k
            )[None, :] * LANES
            whole = left >= 16 * LANES
            if PLACED:
                whole = whole & (start >= 0)
            if whole:  # apart, because so many masks are more than there are registers for them
                _finish(
                    y, target + place, out + place, scale, inverse, phase, step, divisor, weights, past + place, stride,
                    rows, keep, None, RING, BUFFERS, LATTICE, False,
                )  # fmt: skip
            else:
                if (
                    PLACED
                ):  # what is left may be far more than a tile, which then begins before the tensor
                    inside = (place < tl.minimum(left, 16 * LANES).to(tl.int32)) & (
                        place >= tl.maximum(-start, 0).to(tl.int32)
                    )
                else:
                    inside = place < left.to(tl.int32)
                _finish(
                    y, target + place, out + place, scale, inverse, phase, step, divisor, weights, past + place, stride,
                    rows, keep, inside, RING, BUFFERS, LATTICE, True,
                )  # fmt: skip
