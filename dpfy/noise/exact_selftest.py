"""Before the kernel of exact noise is trusted on a device it shows there that its cells are those
of real numbers.

Both halves of it are shown: a few hundred values that are all decided by numbers of two doubles,
and some thousand of which single precision decides most, against real arithmetic; and radius,
cosine and sine of a million words in single precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from dpfy.core.errors import Unsupported
from dpfy.noise import arbitrary_precision, chacha, exact_kernel, kernel_selftest
from dpfy.noise.lattice import Lattice

FEW, MANY = (5, 290, 0, 3), (7, chacha.TILE + 13)
GAIN, DIVISOR = 1.25, 3.0
LATTICE = Lattice.of(0.7, torch.float32, 0.0)
KEY = bytes((37 * i + 11) % 256 for i in range(chacha.KEY_BYTES))
WORDS = 1 << 20
LONG = 2.0**-85
"""By how much numbers of two doubles may be off."""
EDGES = (0, 1, 2**29 - 1, 2**29, 2**30, 2**31, 2**32 - 1, 3 * 2**30)


@lru_cache(maxsize=16)
def require(device: torch.device, kind: torch.dtype = torch.float32) -> None:
    """Refuse to go on if the kernel, with results of such a type, does not find the cells of real
    numbers on `device`.
    """
    wrong = disagreements(device, FEW, kind, 1.0) + disagreements(device, MANY, kind)
    single, double = single_error(device, 977, 4093), long_error(device)
    if wrong or single > exact_kernel.ERROR / 2 or double > LONG:
        gaps = f"single precision is off by {single:.1e}, two doubles by {double:.1e}"
        what = (
            f"the kernel of exact noise on {device}: {wrong} values are not in the cells where "
            f"they should be; {gaps}"
        )
        raise Unsupported(what, 'train on a CPU, or with noise="float", and report this')


def disagreements(
    device: torch.device, sizes: Sequence[int], kind: torch.dtype, error: float = exact_kernel.ERROR
) -> int:
    """How many values the kernel does not release as real arithmetic would."""
    random = np.random.default_rng(1)
    sums = [
        (random.standard_normal(n) * 10.0 ** random.uniform(-9, 3, n)).astype(np.float32)
        for n in sizes
    ]
    found = [torch.from_numpy(part.copy()).to(device) for part in sums]
    out = found if kind is torch.float32 else [torch.empty_like(part, dtype=kind) for part in found]
    exact_kernel.launch(found, LATTICE, GAIN, KEY, DIVISOR, out, error)
    expected = torch.from_numpy(cells(sums, LATTICE, GAIN, KEY)).float().to(device)
    values = ((expected + 0.5) * LATTICE.step / DIVISOR).to(kind)
    near = (
        torch.finfo(kind).eps * values.abs().float()
    )  # a device's quotient may be off by a last digit, and is always the same
    return int(((torch.cat(out).float() - values.float()).abs() > near).sum())


def cells(
    sums: Sequence[NDArray[np.float32]], lattice: Lattice, gain: float, key: bytes
) -> NDArray[np.float64]:
    """floor(sum / step + noise) for each value, in real numbers: by double precision first, and by
    as many digits as it takes.
    """
    made, tile = [], 0
    for values in sums:
        tiles = -(-len(values) // chacha.TILE)
        blocks = np.arange(tile * chacha.LANES, (tile + tiles) * chacha.LANES, dtype=np.uint64)
        words = np.stack(
            [kernel_selftest.words_of(blocks, key, nonce) for nonce in range(3)]
        )  # [nonce, word, block]
        made.append(
            np.array([_cell(float(x), words, i, lattice, gain) for i, x in enumerate(values)])
        )
        tile += tiles
    return np.concatenate(made)


def _cell(x: float, words: NDArray[np.uint32], place: int, lattice: Lattice, gain: float) -> float:
    """The cell of one value, from its place in its tensor."""
    tile, inside = divmod(place, chacha.TILE)
    word, lane = divmod(inside, chacha.LANES)
    first, second = (
        words[:, word - word % 2 + i, tile * chacha.LANES + lane].tolist() for i in range(2)
    )
    noise = lattice.noise * gain
    near = x / lattice.step + noise * _roughly(
        first[0] + first[1] / 2**32, second[0] + second[1] / 2**32, word % 2
    )
    if abs(near - round(near)) > 1e-6 and 1000 < first[0] < 2**32 - 1000:
        return float(math.floor(near))
    with localcontext(arbitrary_precision.CONTEXT):
        return float(
            arbitrary_precision.floor(
                [x / lattice.step], [(Decimal(noise), value(first, second)[word % 2])]
            )
        )


def _roughly(a: float, b: float, second: int) -> float:
    """One of a pair in double precision."""
    quarter, rest = divmod(b / 2**30, 1)
    angle = (rest - round(rest)) * math.pi / 2
    radius = math.sqrt(-2 * math.log(a / 2**32)) * (-1 if quarter >= 2 else 1)
    return radius * (math.sin(angle) if second != quarter % 2 else math.cos(angle))


def value(first: Sequence[int], second: Sequence[int]) -> tuple[Decimal, Decimal]:
    """The pair of the two words and of two further words behind each of them, as real numbers."""
    with localcontext(arbitrary_precision.CONTEXT):
        u, b = (
            (Decimal((w[0] << 64) + (w[1] << 32) + w[2]) + Decimal("0.5")) / (1 << 64)
            for w in (first, second)
        )
        quarter = second[0] >> 30
        signed = b - (quarter << 30)
        if signed >= 1 << 29:
            signed -= 1 << 30
        x, y = arbitrary_precision.polar(u / (1 << 32), signed / (1 << 31))
        x, y = (y, x) if quarter % 2 else (x, y)
        return (-x, -y) if quarter >= 2 else (x, y)


def single_error(device: torch.device, begin: int, stride: int, count: int = WORDS) -> float:
    """The largest error of a unit draw that the words begin, begin + stride, ... can cause in
    single precision, where it is trusted.
    """
    radius, cosine, sine = (torch.empty(count, device=device) for _ in range(3))
    exact_kernel._measure[(count // 1024,)](radius, cosine, sine, begin, stride, WIDTH=1024)
    word = (begin + stride * torch.arange(count, device=device)) % 2**32
    low, high = ((word + digit).double() / 2**32 for digit in (0, 1))
    known = radius.isfinite()
    gaps = [(radius.double() - (-2 * u.log()).clamp(min=0).sqrt()).abs() for u in (low, high)]
    apart = [torch.where(known, gap, 0.0).max() for gap in gaps]
    quarter, rest = word >> 30, ((word << 34) >> 34).double()
    turned = []
    for digit in (0.0, 1.0):
        angle = (rest + digit) * (math.pi / 2**31)
        right = (
            torch.where(quarter % 2 == 1, angle.sin(), angle.cos()),
            torch.where(quarter % 2 == 1, angle.cos(), angle.sin()),
        )
        turned += [(cosine.double() - right[0]).abs().max(), (sine.double() - right[1]).abs().max()]
    largest = float(torch.where(known, radius, 0.0).max())
    return float(max(apart)) + largest * float(max(turned))


def long_error(device: torch.device) -> float:
    """The largest error of numbers of two doubles, over words at the edges and at random."""
    random = np.random.default_rng(2)
    words = random.integers(0, 2**32, (6, 64))
    words[0, :8] = words[3, 8:16] = EDGES
    words[0, 16:20], words[1, 16:20], words[3, 20:24], words[4, 20:24] = (
        0,
        (0, 1, 5, 2**31),
        2**29,
        (0, 1, 5, 2**31),
    )
    found = exact_kernel.exhibit(torch.from_numpy(words).to(device)).cpu().numpy()
    largest = 0.0
    for i, (a, b) in enumerate(zip(words[:3].T.tolist(), words[3:].T.tolist(), strict=True)):
        for second, exactly in enumerate(value(a, b)):
            with localcontext(arbitrary_precision.CONTEXT):
                gap = (
                    sum(
                        (Decimal(float(part)) for part in found[2 * second : 2 * second + 2, i]),
                        Decimal(0),
                    )
                    - exactly
                )
            largest = max(largest, abs(float(gap)) if gap.is_finite() else math.inf)
    return largest
