# mypy: disable-error-code="no-untyped-def, assignment"
"""Exact noise on a GPU: the cells of :mod:`dpfy.noise.exact`, found in single precision where its
error cannot matter.

One launch makes the noise where it is added, as :mod:`dpfy.noise.chacha` does, and lists the few
values, one in a thousand, whose noisy sum lies so near to the border of a cell that single
precision cannot tell. A second launch decides these with numbers of two doubles (a hundred bits)
and further digits of the cipher.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from contextlib import nullcontext
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dpfy.noise import chacha
from dpfy.noise.chacha import KINDS, LANES, ROUNDS, WIDTH, triton
from dpfy.noise.lattice import Lattice
from dpfy.noise.series import single_up

ERROR = 2.0**-17
"""By how much a unit draw, and its sum with a fraction of a step, can be off in single precision,
in standard deviations.
"""
LISTS, WORKERS, ROOM = 256, 16, 64
"""Lists of undecided values, programs that work on each of them, and rows that a program takes at a
time.
"""
REGISTERS: int | None = 56
"""Of a thread of the first launch: with fewer there are more programs under way; with these nothing
is spilled (None: as it comes).
"""
LOGARITHM, TURN = 23, 14
"""Terms of the series of the logarithm, and of sine and cosine, for a hundred bits."""


def usable(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernel can release these tensors."""
    return chacha.usable(tensors)


def add_(
    tensors: Sequence[Tensor],
    lattice: Lattice,
    gain: float,
    key: bytes,
    divisor: float,
    into: Sequence[Tensor] | None,
) -> None:
    """Release all `tensors` with `gain` times independent noise, exactly, in place; with `into`,
    rounded to the types of these, and there.

    Guarantees: those of :func:`dpfy.noise.exact.lay_`, for draws from the keystream of
    :mod:`dpfy.noise.chacha`: u = (a + V) / 2^32, and an angle of a quarter of the circle and a
    rest, for the two words of a pair and 64 further digits of each. The kernel has shown on this
    device that it does what it says (:mod:`dpfy.noise.exact_selftest`).
    """
    if not tensors:
        return
    out = tensors if into is None or not chacha.writes(into, tensors[0].device) else into
    if tensors[0].is_cuda:
        from dpfy.noise import exact_selftest

        chacha.not_recorded()
        exact_selftest.require(tensors[0].device, out[0].dtype)
    launch(tensors, lattice, gain, key, divisor, out)
    if into is not None and out is tensors:
        torch._foreach_copy_(list(into), list(tensors))


def launch(
    tensors: Sequence[Tensor],
    lattice: Lattice,
    gain: float,
    key: bytes,
    divisor: float,
    out: Sequence[Tensor],
    error: float = ERROR,
) -> Tensor | None:
    """What :func:`add_` does, without asking for proof; how many rows of each list held values that
    numbers of two doubles decided.

    With an `error` of 1 all are decided so.
    """
    addresses, sizes = tuple([t.data_ptr() for t in tensors]), tuple([t.numel() for t in tensors])
    ends = addresses if out is tensors else tuple([t.data_ptr() for t in out])
    if not any(sizes):
        return None
    device, kind = tensors[0].device, KINDS[out[0].dtype]
    fused = device.type == "cuda"
    away = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if away else nullcontext():
        queue = chacha.queue_of(device) if device.type == "cuda" else 0
        at, words = chacha.places(addresses, ends, sizes, device, queue), chacha.key_words(key)
        programs, noise = at.tiles * (LANES // WIDTH), lattice.noise * gain
        room = -(-programs // LISTS) * WIDTH  # for all rows of all programs of a list
        counts, rows = (
            torch.zeros(LISTS, dtype=torch.int32, device=device),
            torch.empty(LISTS * room, dtype=torch.int64, device=device),
        )
        scalars = (1 / lattice.step, lattice.step, divisor)
        _find[(programs,)](
            at.table, at.owners, *words, single_up(noise), *scalars, noise * error if error < 1 else 1.0, counts, rows, room,  # noqa: E501
            LANES=LANES, WIDTH=WIDTH, ROUNDS=ROUNDS, OUT=kind, LISTS=LISTS, num_warps=WIDTH // 32,
            **({"maxnreg": REGISTERS} if REGISTERS and fused else {}),
        )  # fmt: skip
        _decide[(LISTS * WORKERS,)](
            at.table, at.owners, *words, struct.unpack("<q", struct.pack("<d", noise))[0], *scalars, counts, rows, room,
            _constants(device, queue), LANES=LANES, WIDTH=WIDTH, ROUNDS=ROUNDS, OUT=kind, LISTS=LISTS, WORKERS=WORKERS, ROOM=ROOM,  # noqa: E501
            LOGARITHM=LOGARITHM, TURN=TURN, FUSED=fused, num_warps=ROOM // 32, **({"enable_fp_fusion": False} if fused else {}),  # noqa: E501
        )  # fmt: skip
    return counts


@lru_cache(maxsize=16)
def _constants(device: torch.device, queue: int) -> Tensor:
    """Of the series, each as two doubles: log 2, pi / 4, 1 / (2 k + 1), then (-1)^k / (2 k + 1)!
    and (-1)^k / (2 k)!.
    """
    from dpfy.noise.arbitrary_precision import pi

    logarithm = sum(Fraction(2, (2 * k + 1) * 3 ** (2 * k + 1)) for k in range(60))
    wanted = [logarithm, Fraction(pi()) / 4, *(Fraction(1, 2 * k + 1) for k in range(LOGARITHM))]
    wanted += [
        Fraction((-1) ** k, math.factorial(2 * k + one)) for one in (1, 0) for k in range(TURN)
    ]
    pairs = [(float(x), float(x - Fraction(float(x)))) for x in wanted]
    return chacha.sent(
        torch.tensor([part for pair in pairs for part in pair], dtype=torch.float64), device
    )


def exhibit(words: Tensor) -> Tensor:
    """The pairs of [6, n] words, n a power of two: first, second and third word of each number; as
    [4, n] doubles, of two each.
    """
    out = torch.empty(4, words.shape[1], dtype=torch.float64, device=words.device)
    fused = words.is_cuda
    _exhibit[(1,)](
        words, out, _constants(words.device, 0), COUNT=words.shape[1], LOGARITHM=LOGARITHM, TURN=TURN, FUSED=fused,
        **({"enable_fp_fusion": False} if fused else {}),
    )  # fmt: skip
    return out


_find: Any = None
_decide: Any = None
_measure: Any = None
_exhibit: Any = None

if triton is not None:
    import triton.language as tl

    from dpfy.noise.chacha import joined, keystream, tile_of

    @triton.jit
    def _radius(a):
        """The radius for the first word of a pair; infinite where single precision, or the word,
        has too few digits for it.
        """
        u = (a.to(tl.float32) + 0.5) * 2.3283064365386963e-10
        square = -2.0 * tl.log(u)
        return tl.where(tl.abs(square - 10.375244140625) < 10.375, tl.sqrt(square), float("inf"))

    @triton.jit
    def _turn(b):
        """Cosine and sine of the angle for the second word, up to the sign of both."""
        x = (b << 2).to(tl.int32, bitcast=True).to(tl.float32) * 3.6572951981678995e-10
        s = x * x
        sine = x + x * s * (-1.0 / 6 + s * (1.0 / 120 + s * (-1.0 / 5040 + s * (1.0 / 362880))))
        cosine = 1.0 + s * (-0.5 + s * (1.0 / 24 + s * (-1.0 / 720 + s * (1.0 / 40320))))
        swap = (b & 0x40000000) != 0
        return tl.where(swap, sine, cosine), tl.where(swap, cosine, sine)

    @triton.jit
    def _pair(a, b):
        """Two standard Gaussian values from two words; infinite, or no numbers, where they are not
        known up to `ERROR`.
        """
        radius = _radius(a)
        radius = tl.where((b & 0x80000000) != 0, -radius, radius)
        cosine, sine = _turn(b)
        return radius * cosine, radius * sine

    @triton.jit
    def _lay(
        y, target, out, scale, inverse, step, divisor, error, word, inside, MASKED: tl.constexpr
    ):
        """Release the values whose cells are known; a bit for each of the others, row by row, which
        stay what they were.
        """
        moved = (tl.load(target, mask=inside, other=0.0) if MASKED else tl.load(target)) * inverse
        whole = tl.floor(moved)
        t = (moved - whole) + scale * y
        cell = tl.floor(t)
        sure = tl.abs(t - cell - 0.5) < 0.5 - error  # not so where something is not a number
        tl.store(out, (whole + cell + 0.5) * step / divisor, mask=inside & sure if MASKED else sure)
        unsure = inside & ~sure if MASKED else ~sure
        return tl.sum(tl.where(unsure, (word * 0 + 1) << word, 0), 1)

    @triton.jit(do_not_specialize=["k0", "k1", "k2", "k3", "room"])
    def _find(
        table, owners, k0: tl.int64, k1: tl.int64, k2: tl.int64, k3: tl.int64, scale, inverse, step, divisor, error, counts, rows,  # noqa: E501
        room: tl.int64, LANES: tl.constexpr, WIDTH: tl.constexpr, ROUNDS: tl.constexpr, OUT: tl.constexpr, LISTS: tl.constexpr,  # noqa: E501
    ):  # fmt: skip
        """WIDTH lanes of one tile of one tensor: cells where they are known; rows that hold others
        are listed, with a bit for each.
        """
        part, block, _, left, target, out, _ = tile_of(table, owners, LANES, WIDTH, OUT)
        words = keystream(
            k0.to(tl.int64), k1.to(tl.int64), k2.to(tl.int64), k3.to(tl.int64), block, 0, ROUNDS
        )
        z = ()
        for i in tl.static_range(8):
            z = z + _pair(words[2 * i], words[2 * i + 1])
        y = tl.reshape(joined(joined(joined(joined(z, 8), 4), 2), 1)[0], (WIDTH, 16))
        word = tl.arange(0, 16)[None, :]
        place = (block % LANES).to(tl.int32)[:, None] + word * LANES
        if (
            left >= 16 * LANES
        ):  # apart, because so many masks are more than there are registers for them
            bits = _lay(
                y,
                target + place,
                out + place,
                scale,
                inverse,
                step,
                divisor,
                error,
                word,
                None,
                False,
            )
        else:
            inside = place < left.to(tl.int32)
            bits = _lay(
                y,
                target + place,
                out + place,
                scale,
                inverse,
                step,
                divisor,
                error,
                word,
                inside,
                True,
            )
        listed = part % LISTS
        slot = tl.atomic_add(counts + (listed + bits * 0), 1, mask=bits != 0, sem="relaxed")
        tl.store(rows + listed * room + slot, block * 65536 + bits, mask=bits != 0)

    # --- numbers of two doubles, of which the first is the nearer
    # -----------------------------------------------------------

    @triton.jit
    def _sum(a, b):
        s = a + b
        t = s - a
        return s, (a - (s - t)) + (b - t)

    @triton.jit
    def _ordered(a, b):
        s = a + b
        return s, b - (s - a)

    @triton.jit
    def _product(a, b, FUSED: tl.constexpr):
        p = a * b
        if FUSED:
            e = tl.fma(a, b, -p)
        else:
            c, d = a * 134217729.0, b * 134217729.0
            high, other = c - (c - a), d - (d - b)
            low, rest = a - high, b - other
            e = low * rest - (((p - high * other) - low * other) - high * rest)
        return p, e

    @triton.jit
    def _times(a, a2, b, b2, FUSED: tl.constexpr):
        p, e = _product(a, b, FUSED)
        return _ordered(p, e + (a * b2 + a2 * b))

    @triton.jit
    def _plus(a, a2, b, b2):
        s, e = _sum(a, b)
        return _ordered(s, e + (a2 + b2))

    @triton.jit
    def _series(x, x2, constants, TERMS: tl.constexpr, FUSED: tl.constexpr):
        """The sum of TERMS constants times powers of x."""
        y, y2 = (
            x * 0.0 + tl.load(constants + 2 * TERMS - 2),
            x * 0.0 + tl.load(constants + 2 * TERMS - 1),
        )
        for k in tl.static_range(TERMS - 2, -1, -1):
            y, y2 = _times(y, y2, x, x2, FUSED)
            y, y2 = _plus(y, y2, tl.load(constants + 2 * k), tl.load(constants + 2 * k + 1))
        return y, y2

    @triton.jit
    def _long(first, second, third, MOST: tl.constexpr):
        """A number of three words of which MOST is the weight of a unit of the first; half a unit
        of the last is added.
        """
        a, a2 = _sum(first * MOST, second * (MOST * 2.3283064365386963e-10))
        return _plus(a, a2, (third + 0.5) * (MOST * 5.421010862427522e-20), 0.0 * first)

    @triton.jit
    def _long_radius(u, u2, constants, LOGARITHM: tl.constexpr, FUSED: tl.constexpr):
        """sqrt(-2 log u), by 2^e m with m between 3/4 and 3/2, and log m by the series in (m - 1) /
        (m + 1).
        """
        e = (u.to(tl.int64, bitcast=True) >> 52) - 1023
        e = tl.where(u * ((1023 - e) << 52).to(tl.float64, bitcast=True) >= 1.5, e + 1, e)
        power = ((1023 - e) << 52).to(tl.float64, bitcast=True)
        m, m2 = u * power, u2 * power
        n, n2 = _plus(m, m2, m * 0.0 - 1.0, m * 0.0)
        d, d2 = _plus(m, m2, m * 0.0 + 1.0, m * 0.0)
        s = n / d
        p, p2 = _times(d, d2, s, s * 0.0, FUSED)
        r, r2 = _plus(n, n2, -p, -p2)
        s, s2 = _ordered(s, (r + r2) / d)
        q, q2 = _times(s, s2, s, s2, FUSED)
        f, f2 = _series(q, q2, constants + 4, LOGARITHM, FUSED)
        f, f2 = _times(s, s2, f, f2, FUSED)
        times = e.to(tl.float64)
        g, g2 = _times(
            times,
            times * 0.0,
            tl.load(constants) + times * 0.0,
            tl.load(constants + 1) + times * 0.0,
            FUSED,
        )
        g, g2 = _plus(-2.0 * g, -2.0 * g2, -4.0 * f, -4.0 * f2)
        x = tl.sqrt(g)
        p, p2 = _product(x, x, FUSED)
        return _ordered(x, ((g - p) - p2 + g2) / (2.0 * x))

    @triton.jit
    def _long_value(
        a0, a1, a2, b0, b1, b2, second, constants, LOGARITHM: tl.constexpr, TURN: tl.constexpr, FUSED: tl.constexpr,
    ):  # fmt: skip
        """The first or the `second` value of the pair of two words, each with two further words
        behind it.
        """
        u, u2 = _long(
            a0.to(tl.float64), a1.to(tl.float64), a2.to(tl.float64), 2.3283064365386963e-10
        )
        r, r2 = _long_radius(u, u2, constants, LOGARITHM, FUSED)
        signed = (b0 << 2).to(tl.int32, bitcast=True).to(tl.float64) * 0.25
        x, x2 = _long(signed, b1.to(tl.float64), b2.to(tl.float64), 1.862645149230957e-09)
        x, x2 = _times(
            x, x2, tl.load(constants + 2) + x * 0.0, tl.load(constants + 3) + x * 0.0, FUSED
        )
        q, q2 = _times(x, x2, x, x2, FUSED)
        tables = constants + 4 + 2 * LOGARITHM
        s, s2 = _series(q, q2, tables, TURN, FUSED)
        s, s2 = _times(s, s2, x, x2, FUSED)
        c, c2 = _series(q, q2, tables + 2 * TURN, TURN, FUSED)
        cosine = ((b0 & 0x40000000) != 0) == (second != 0)
        z, z2 = _times(r, r2, tl.where(cosine, c, s), tl.where(cosine, c2, s2), FUSED)
        negative = (b0 & 0x80000000) != 0
        return tl.where(negative, -z, z), tl.where(negative, -z2, z2)

    @triton.jit
    def _picked(words, pair, ODD: tl.constexpr):
        """Of sixteen words, the first or second of each lane's pair, as an unsigned number."""
        found = words[ODD]
        for i in tl.static_range(1, 8):
            found = tl.where(pair == i, words[2 * i + ODD], found)
        return found

    @triton.jit(do_not_specialize=["k0", "k1", "k2", "k3", "noise", "room"])
    def _decide(
        table, owners, k0: tl.int64, k1: tl.int64, k2: tl.int64, k3: tl.int64, noise: tl.int64, inverse, step, divisor, counts, rows,  # noqa: E501
        room: tl.int64, constants, LANES: tl.constexpr, WIDTH: tl.constexpr, ROUNDS: tl.constexpr, OUT: tl.constexpr,
        LISTS: tl.constexpr, WORKERS: tl.constexpr, ROOM: tl.constexpr, LOGARITHM: tl.constexpr, TURN: tl.constexpr,
        FUSED: tl.constexpr,
    ):  # fmt: skip
        """The cells of the listed values, in numbers of two doubles."""
        listed, worker = tl.program_id(0) // WORKERS, tl.program_id(0) % WORKERS
        count = tl.load(counts + listed)
        q0, q1, q2, q3 = k0.to(tl.int64), k1.to(tl.int64), k2.to(tl.int64), k3.to(tl.int64)
        scale = noise.to(tl.int64).to(tl.float64, bitcast=True)
        for begin in range(worker * ROOM, count, WORKERS * ROOM):
            at = begin + tl.arange(0, ROOM)
            row = tl.load(rows + listed.to(tl.int64) * room + at, mask=at < count, other=0)
            block, bits = row // 65536, (row % 65536).to(tl.int32)
            tile = block // LANES
            mine = table + 5 * tl.load(owners + tile, mask=bits != 0, other=0)
            start = (tile - tl.load(mine + 1)) * (16 * LANES) + block % LANES
            target = tl.load(mine).to(tl.pointer_type(tl.float32)) + start
            out = tl.load(mine + 4).to(tl.pointer_type(OUT)) + start
            first = keystream(q0, q1, q2, q3, block, 0, ROUNDS)
            second = keystream(q0, q1, q2, q3, block, 1, ROUNDS)
            third = keystream(q0, q1, q2, q3, block, 2, ROUNDS)
            while tl.max(bits, 0) != 0:
                some = bits != 0
                low = bits & -bits
                word = bits * 0
                for i in tl.static_range(1, 16):
                    word = tl.where(low == (1 << i), i, word)
                pair = word // 2
                z, z2 = _long_value(
                    _picked(first, pair, 0), _picked(second, pair, 0), _picked(third, pair, 0),
                    _picked(first, pair, 1), _picked(second, pair, 1), _picked(third, pair, 1),
                    word % 2, constants, LOGARITHM, TURN, FUSED,
                )  # fmt: skip
                z, z2 = _times(z, z2, scale + z * 0.0, z * 0.0, FUSED)
                moved = tl.load(target + word * LANES, mask=some, other=0.0) * inverse
                whole = tl.floor(moved)
                fraction = moved.to(tl.float64) - whole.to(tl.float64)
                t, t2 = _plus(z, z2, fraction, fraction * 0.0)
                cell = tl.floor(t)
                cell = tl.where((cell == t) & (t2 < 0.0), cell - 1.0, cell)
                tl.store(
                    out + word * LANES,
                    (whole + cell.to(tl.float32) + 0.5) * step / divisor,
                    mask=some,
                )
                bits = bits & (bits - 1)

    @triton.jit(do_not_specialize=["begin", "stride"])
    def _measure(radii, cosines, sines, begin: tl.int64, stride: tl.int64, WIDTH: tl.constexpr):
        """Radius, cosine and sine of words at even distances: what single precision makes of
        them.
        """
        place = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
        word = (begin.to(tl.int64) + place * stride.to(tl.int64)).to(tl.uint32)
        cosine, sine = _turn(word)
        tl.store(radii + place, _radius(word))
        tl.store(cosines + place, cosine)
        tl.store(sines + place, sine)

    @triton.jit
    def _exhibit(
        words,
        out,
        constants,
        COUNT: tl.constexpr,
        LOGARITHM: tl.constexpr,
        TURN: tl.constexpr,
        FUSED: tl.constexpr,
    ):
        """The pairs of some words and of the words behind them, [6, COUNT], as numbers of two
        doubles, [4, COUNT].
        """
        at = tl.arange(0, COUNT)
        a0, a1, a2 = (
            tl.load(words + at),
            tl.load(words + COUNT + at),
            tl.load(words + 2 * COUNT + at),
        )
        b0, b1, b2 = (
            tl.load(words + 3 * COUNT + at),
            tl.load(words + 4 * COUNT + at),
            tl.load(words + 5 * COUNT + at),
        )
        for second in tl.static_range(2):
            z, z2 = _long_value(
                a0.to(tl.uint32), a1.to(tl.uint32), a2.to(tl.uint32), b0.to(tl.uint32), b1.to(tl.uint32), b2.to(tl.uint32),  # noqa: E501
                at * 0 + second, constants, LOGARITHM, TURN, FUSED,
            )  # fmt: skip
            tl.store(out + 2 * second * COUNT + at, z)
            tl.store(out + (2 * second + 1) * COUNT + at, z2)
