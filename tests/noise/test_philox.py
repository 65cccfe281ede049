"""Noise made on a GPU: against Philox written out word by word, on a GPU or with ``TRITON_INTERPRET=1`` and triton installed."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from torch import Tensor

from dpfy.core.random import Randomness
from dpfy.noise import gaussian, philox

CUDA = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
needs_kernel = pytest.mark.skipif(
    philox.triton is None or not (CUDA or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs triton, and a CUDA device or TRITON_INTERPRET=1",
)
DEVICE = "cuda" if CUDA else "cpu"
SECRET = bytes(range(100, 116))


def words(counter: int, secret: bytes) -> list[int]:
    """Philox 4x32-10 of one counter: the definition of Salmon et al. (2011)."""
    key = [int.from_bytes(secret[i : i + 4], "little") for i in (0, 4)]
    c = [counter & 0xFFFFFFFF, counter >> 32, *[int.from_bytes(secret[i : i + 4], "little") for i in (8, 12)]]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ key[0], second & 0xFFFFFFFF, (first >> 32) ^ c[3] ^ key[1], first & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def expected(sizes: list[int], secret: bytes) -> list[np.ndarray]:
    """The values of tensors of these sizes, one counter at a time."""
    made, tile = [], 0
    for size in sizes:
        tiles = -(-size // philox.TILE)
        values = np.zeros(tiles * philox.TILE)
        for counter in range(tile * philox.LANES, (tile + tiles) * philox.LANES):
            at = (counter // philox.LANES - tile) * philox.TILE + counter % philox.LANES
            c = words(counter, secret)
            for i in (0, 2):
                radius = math.sqrt(max(0.0, -2 * math.log((c[i] + 0.5) / 2**32)))
                quarter, rest = c[i + 1] >> 30, (c[i + 1] << 2) & 0xFFFFFFFF
                x = (rest - (rest >> 31 << 32)) / 2**31 * math.pi / 4  # thirty bits with a sign: -pi/4 to pi/4
                angle = {0: x, 1: math.pi / 2 - x, 2: math.pi + x, 3: -math.pi / 2 - x}[quarter]
                values[at + i * philox.LANES] = radius * math.cos(angle)
                values[at + (i + 1) * philox.LANES] = radius * math.sin(angle)
        made.append(values[:size])
        tile += tiles
    return made


def test_the_words_are_those_of_the_published_test_vectors() -> None:
    # known answers of the Random123 distribution for zero and for all-ones input
    assert words(0, bytes(16)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words((1 << 64) - 1, b"\xff" * 16) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@needs_kernel
@pytest.mark.parametrize("sizes", [[1], [5, 4096, 3, 0, 5000], [4097] + [7] * 40])
def test_every_value_is_the_definition(sizes: list[int]) -> None:
    before = [torch.randn(n, device=DEVICE) for n in sizes]
    after = [t.clone() for t in before]
    philox.add_(after, 0.5, SECRET)
    for a, b, z in zip(after, before, expected(sizes, SECRET), strict=True):
        np.testing.assert_allclose((a.double() - b.double()).cpu().numpy(), 0.5 * z, atol=3e-6)


@needs_kernel
def test_another_secret_gives_other_values() -> None:
    first, second, again = (torch.zeros(300, device=DEVICE) for _ in range(3))
    philox.add_([first], 1.0, SECRET)
    philox.add_([second], 1.0, SECRET[:15] + b"\0")
    philox.add_([again], 1.0, SECRET)
    assert torch.equal(first, again)
    assert float((first - second).abs().min()) > 0


@pytest.mark.gpu
@needs_gpu
def test_the_law_is_gaussian() -> None:
    from scipy import stats

    z = torch.zeros(3_000_001, device="cuda")
    philox.add_([z], 1.0, SECRET)
    values = z.cpu().double().numpy()
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert stats.kstest(values * 1.01, "norm").pvalue < 1e-6
    assert abs(np.corrcoef(values[:-1024], values[1024:])[0, 1]) < 5 / math.sqrt(len(values))
    assert 4.8 < np.abs(values).max() < 6.77


@pytest.mark.gpu
@needs_gpu
def test_adding_equals_drawing_first() -> None:
    like = {"a": torch.randn(70, 33, device="cuda"), "b": torch.randn(5, device="cuda")}
    randomness = Randomness.for_tests(3)
    unit = gaussian.draw(like, randomness, "noise", 7)
    sums: dict[str, Tensor] = {k: v.clone() for k, v in like.items()}
    gaussian.add_(sums, 2.0, randomness, "noise", 7)
    for k in like:
        torch.testing.assert_close(sums[k], like[k] + 2.0 * unit[k], rtol=0, atol=1e-6)
