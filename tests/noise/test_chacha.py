"""Noise made on a GPU: against ChaCha written out word by word, on a GPU or with
``TRITON_INTERPRET=1`` and triton installed.
"""

from __future__ import annotations

import math
import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.noise import chacha, gaussian
from dpfy.noise.coordinate_slice import CoordinateSlice
from dpfy.noise.lattice import Lattice
from dpfy.noise.strategy import Recurrence

CUDA = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
needs_kernel = pytest.mark.skipif(
    chacha.triton is None or not (CUDA or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs triton, and a CUDA device or TRITON_INTERPRET=1",
)
DEVICE = "cuda" if CUDA else "cpu"
SECRET = bytes(range(100, 132))
FINE = Lattice(2.0**-20, 2.0**19, 0.3)
"""So fine that noise of standard deviation 1/2 is as good as continuous on it."""


def rotated(x: int, by: int) -> int:
    return ((x << by) | (x >> (32 - by))) & 0xFFFFFFFF


def words(block: int, key: bytes, nonce: int = 0, rounds: int = chacha.ROUNDS) -> list[int]:
    """One block of ChaCha, as Bernstein (2008) defines it: constants, key, 64-bit counter, 64-bit
    nonce.
    """
    start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574]
    start += [int.from_bytes(key[i : i + 4], "little") for i in range(0, 32, 4)]
    start += [block & 0xFFFFFFFF, block >> 32, nonce & 0xFFFFFFFF, nonce >> 32]
    x = list(start)
    columns = [(i, 4 + i, 8 + i, 12 + i) for i in range(4)]
    diagonals = [(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4) for i in range(4)]
    for _ in range(rounds // 2):
        for a, b, c, d in columns + diagonals:
            for first, second, third, by in (
                (a, b, d, 16),
                (c, d, b, 12),
                (a, b, d, 8),
                (c, d, b, 7),
            ):
                x[first] = (x[first] + x[second]) & 0xFFFFFFFF
                x[third] = rotated(x[third] ^ x[first], by)
    return [(a + b) & 0xFFFFFFFF for a, b in zip(x, start, strict=True)]


def expected(sizes: list[int], key: bytes) -> list[np.ndarray]:
    """The values of tensors of these sizes, one block at a time."""
    made, tile = [], 0
    for size in sizes:
        tiles = -(-size // chacha.TILE)
        values = np.zeros(tiles * chacha.TILE)
        for block in range(tile * chacha.LANES, (tile + tiles) * chacha.LANES):
            at = (block // chacha.LANES - tile) * chacha.TILE + block % chacha.LANES
            c = words(block, key)
            for i in range(0, 16, 2):
                radius = math.sqrt(
                    max(0.0, -2 * math.log((c[i] + ((c[i + 1] & 0xFFFF) + 0.5) / 2**16) / 2**32))
                )
                quarter, rest = c[i + 1] >> 30, (c[i + 1] << 2) & 0xFFFFFFFF
                x = (
                    (rest - (rest >> 31 << 32)) / 2**31 * math.pi / 4
                )  # thirty bits with a sign: -pi/4 to pi/4
                angle = {0: x, 1: math.pi / 2 - x, 2: math.pi + x, 3: -math.pi / 2 - x}[quarter]
                values[at + i * chacha.LANES] = radius * math.cos(angle)
                values[at + (i + 1) * chacha.LANES] = radius * math.sin(angle)
        made.append(values[:size])
        tile += tiles
    return made


def test_the_definition_gives_the_block_of_rfc_8439() -> None:
    """Section 2.3.2: counter 1, nonce 00000009 0000004a 00000000, whose first word lies where ours
    has the counter's upper half.
    """
    found = words(1 | 0x09000000 << 32, bytes(range(32)), nonce=0x4A000000, rounds=20)
    assert found[:4] == [0xE4E7F110, 0x15593BD1, 0x1FDD0F50, 0xC47120A3]
    assert found[12:] == [0xD19C12B5, 0xB94E16DE, 0xE883D0CB, 0x4E3C50A2]


@needs_kernel
@pytest.mark.parametrize("sizes", [[1], [5, 4096, 3, 0, 5000], [4097] + [7] * 12])
def test_every_value_is_the_definition(sizes: list[int]) -> None:
    before = [torch.randn(n, device=DEVICE) for n in sizes]
    drawn, after = [t.clone() for t in before], [t.clone() for t in before]
    chacha.draw_(drawn, SECRET)
    chacha.add_(after, FINE, [SECRET])
    for d, a, b, z in zip(drawn, after, before, expected(sizes, SECRET), strict=True):
        np.testing.assert_allclose(d.cpu().numpy(), z, atol=3e-6)
        np.testing.assert_allclose((a.double() - b.double()).cpu().numpy(), 0.5 * z, atol=3e-6)


@needs_kernel
def test_another_secret_gives_other_values() -> None:
    first, second, again = (torch.zeros(300, device=DEVICE) for _ in range(3))
    chacha.draw_([first], SECRET)
    chacha.draw_([second], SECRET[:31] + b"\0")
    chacha.draw_([again], SECRET)
    assert torch.equal(first, again)
    assert float((first - second).abs().min()) > 0


@needs_kernel
@pytest.mark.parametrize(
    "cuts", [[0, 3, 5000, 9104], [0, 5, 4101, 4104, 9104], [0, 600, 601, 9104]]
)
def test_parts_of_a_draw_are_its_values(cuts: list[int]) -> None:
    """Bit for bit: shards that begin and end inside of tiles, at their borders, and in other
    tensors; with a past, too.
    """
    sizes = [5, 4096, 3, 0, 5000]
    strategy = Recurrence(weights=(-0.5, 0.3), decay=(0.9, 0.4), gain=1.2)

    def made(sums: list[Tensor], part: CoordinateSlice | None) -> list[Tensor]:
        drawn, past = (
            [torch.zeros_like(t) for t in sums],
            torch.ones(2, sum(t.numel() for t in sums), device=DEVICE),
        )
        chacha.draw_(drawn, SECRET, part)
        chacha.add_(sums, FINE, [SECRET], 3.0, strategy, past, part=part)
        return [torch.cat(drawn), torch.cat(sums), *past]

    start = torch.randn(sum(sizes), device=DEVICE)
    whole = made(list(start.clone().split(sizes)), None)
    found = []
    for first, last in pairwise(cuts):
        part = CoordinateSlice.of([(first, last)], sizes)
        assert part.pieces is not None
        held = [b - a for a, b in part.pieces]
        found.append(made([t.clone() for t in start[first:last].split(held)], part))
    for mine, parts in zip(whole, zip(*found, strict=True), strict=True):
        assert torch.equal(torch.cat(parts), mine)
    with pytest.raises(InvalidInput, match="one piece of the size"):
        chacha.draw_([torch.zeros(4, device=DEVICE)], SECRET, CoordinateSlice.of([(2, 7)], [9]))


@pytest.mark.gpu
@needs_gpu
def test_the_law_is_gaussian() -> None:
    from scipy import stats

    z = torch.zeros(3_000_001, device="cuda")
    chacha.draw_([z], SECRET)
    values = z.cpu().double().numpy()
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert stats.kstest(values * 1.01, "norm").pvalue < 1e-6
    assert abs(np.corrcoef(values[:-256], values[256:])[0, 1]) < 5 / math.sqrt(len(values))
    assert 4.8 < np.abs(values).max() < 8.24


@pytest.mark.gpu
@needs_gpu
def test_adding_equals_drawing_first() -> None:
    like = {"a": torch.randn(70, 33, device="cuda"), "b": torch.randn(5, device="cuda")}
    randomness = Randomness.for_tests(3)
    unit = gaussian.draw(like, randomness, "noise", 7)
    sums: dict[str, Tensor] = {k: v.clone() for k, v in like.items()}
    gaussian.add_(sums, FINE, randomness, "noise", 7)
    for k in like:
        torch.testing.assert_close(sums[k], like[k] + 0.5 * unit[k], rtol=0, atol=1e-6)
