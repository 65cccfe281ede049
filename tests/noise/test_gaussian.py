"""Gaussian draws by address: the bits are the cipher's, the transform is the formula, adding equals
drawing, on any number of threads.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import KEYSTREAM_BYTES, Randomness
from dpfy.noise import gaussian
from dpfy.noise.lattice import Lattice

RANDOMNESS = Randomness.for_tests(3)
DTYPES = [torch.float32, torch.float64]


def one(count, dtype=torch.float32, step=0):
    return gaussian.draw({"x": torch.empty(count, dtype=dtype)}, RANDOMNESS, "noise", step)["x"]


def fine(scale, dtype=torch.float32):
    """A lattice for noise of this scale, so fine that it is as good as continuous."""
    step = 2.0 ** (math.frexp(scale)[1] - (20 if dtype == torch.float32 else 48))
    return Lattice(step, scale / step, 0.3)


def filled(scratch, value):
    memory = np.frombuffer(scratch.bits, np.uint8)
    memory[:] = value
    return scratch.transform()


def test_the_bits_are_aes_256_in_counter_mode():
    """The keystream is the cipher applied to the numbers 2, 3, ..., whatever the sizes of the
    calls.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    buffer = bytearray(160)
    fill = RANDOMNESS.keystream("noise", 5)
    for start, stop in [(0, 48), (48, 49), (49, 160)]:
        fill(memoryview(buffer)[start:stop])
    block = Cipher(algorithms.AES(RANDOMNESS.key("noise", 5, 32)), modes.ECB()).encryptor()
    assert bytes(buffer) == b"".join(block.update(i.to_bytes(16, "big")) for i in range(2, 12))
    later = bytearray(64)
    RANDOMNESS.keystream("noise", 5, 96)(memoryview(later))
    assert later == buffer[96:]
    with pytest.raises(InvalidInput, match="multiple of 16"):
        RANDOMNESS.keystream("noise", 5, 8)
    with pytest.raises(Unsupported, match="64 GiB"):
        RANDOMNESS.keystream("noise", 5, KEYSTREAM_BYTES - 32)(memoryview(later))


@pytest.mark.parametrize(
    ("dtype", "whole", "tolerance"),
    [(torch.float32, np.int32, 4e-6), (torch.float64, np.int64, 1e-13)],
)
def test_values_are_the_formula(dtype, whole, tolerance):
    """Against Box-Muller in long double, from the same bits."""
    count, places = 1000, 8 * np.dtype(whole).itemsize - 1
    memory = bytearray(count * np.dtype(whole).itemsize)
    RANDOMNESS.keystream("noise", 0)(memoryview(memory))
    first, second = np.frombuffer(memory, whole).reshape(2, -1).astype(np.longdouble)
    radius = np.sqrt(-2 * np.log(np.abs(first) / np.longdouble(2) ** places))
    angle = second / np.longdouble(2) ** places * np.longdouble(math.pi)
    expected = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    found = one(count, dtype).numpy()
    assert np.abs(found - expected).max() < tolerance * radius.max()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("dtype", "radius"), [(torch.float32, 8.158), (torch.float64, 9.42)])
def test_extreme_bits_give_finite_values_inside_the_stated_radius(monkeypatch, dtype, radius, fast):
    monkeypatch.setattr(gaussian, "_NUMPY_IS_FAST", fast)
    scratch = gaussian.Scratch.held(dtype, gaussian.CHUNK).part(8)
    least = filled(scratch, 0).clone()
    assert least.abs().max() <= radius
    assert least.abs().max() > radius - 0.01
    for value in (0xFF, 0x80, 0x7F, 0x01):
        found = filled(scratch, value)
        assert found.isfinite().all()
        assert found.abs().max() <= radius
    for integer in (
        np.iinfo(scratch.integers.dtype).min,
        np.iinfo(scratch.integers.dtype).max,
        -1,
        1,
    ):
        scratch.integers[:] = integer
        found = scratch.transform()
        assert found.isfinite().all()
        assert found.abs().max() <= radius


def test_both_sources_of_functions_agree(monkeypatch):
    found = []
    for fast in (True, False):
        monkeypatch.setattr(gaussian, "_NUMPY_IS_FAST", fast)
        found.append(one(100_001))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divisor", [1.0, 256.0, 0.37])
def test_adding_is_drawing(dtype, divisor):
    """Over chunk boundaries, odd sizes, empty and non-contiguous tensors."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "a": (7,),
        "none": (0, 3),
        "b": (gaussian.CHUNK + 5,),
        "c": (31, 17),
        "scalar": (),
        "d": (gaussian.LARGE_CHUNK,),
    }
    sums = {
        name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()
    }
    sums["c"] = sums["c"].t().contiguous().t()
    unit = gaussian.draw(sums, RANDOMNESS, "noise", 4)
    expected = {name: torch.add(sums[name], unit[name], alpha=0.3) / divisor for name in sums}
    apart = {name: t.clone() for name, t in sums.items()}
    gaussian.add_(sums, fine(0.3, dtype), RANDOMNESS, "noise", 4, divisor)
    gaussian.add_drawn_(apart, unit, fine(0.3, dtype), divisor)
    tolerance = 4e-6 if dtype == torch.float32 else 1e-12
    for name in sums:
        torch.testing.assert_close(sums[name], expected[name], rtol=1e-6, atol=tolerance / divisor)
        torch.testing.assert_close(apart[name], expected[name], rtol=1e-6, atol=tolerance / divisor)


def test_many_values_are_made_in_large_chunks_of_the_same_kind():
    from scipy.stats import kstest

    count = 4 * gaussian.LARGE_CHUNK + 5
    unit, sums = one(count), {"x": torch.zeros(count)}
    gaussian.add_(sums, fine(2.0), RANDOMNESS, "noise", 0)
    torch.testing.assert_close(sums["x"], 2 * unit, rtol=1e-6, atol=5e-5)
    assert kstest(unit.double().numpy(), "norm").pvalue > 1e-7
    assert len(unit.unique()) > 0.8 * count  # nothing is repeated from chunk to chunk
    halves = unit[: 4 * gaussian.LARGE_CHUNK].double().view(-1, 2, gaussian.LARGE_CHUNK // 2)
    for a, b in [(halves[:, 0], halves[:, 1]), (halves[0], halves[1]), (halves[0], halves[3])]:
        assert abs((a * b).mean()) * math.sqrt(a.numel()) < 5.5


@pytest.mark.parametrize("scale", [1e-30, 0.1, 1.1, 3.0, 1e20])
@pytest.mark.parametrize("divisor", [1.0, 3.0, 1e5, 0.7])
def test_noise_is_never_smaller_than_asked(monkeypatch, scale, divisor):
    """Against the same draw at unit scale, in steps, before the floor: rounding may only enlarge
    it, and by a millionth at most.
    """
    lattice, seen = Lattice.of(scale, torch.float32, 0.3), []
    sums = {"x": torch.zeros(1000)}
    monkeypatch.setattr(
        gaussian, "lay_", lambda sums, noise, *rest: seen.extend([t.clone() for t in noise])
    )
    gaussian.add_(sums, lattice, RANDOMNESS, "noise", 0, divisor)
    unit = gaussian.draw(sums, RANDOMNESS, "noise", 0)
    gaussian.add_drawn_(sums, unit, lattice, divisor)
    for steps in seen:
        ratio = steps.double().norm() * lattice.step / one(1000).double().norm() / scale
        assert 1 <= ratio < 1 + 1e-6


def test_no_two_steps_share_an_address():
    """However far they are apart: an address that wraps after 2^8, 2^16 or 2^32 steps would use
    noise twice.
    """
    steps = sorted(
        {0, 1, *(2**b + extra for b in (7, 8, 15, 16, 24, 31, 32, 48, 63) for extra in (-1, 0, 1))}
    )
    streams = ["noise", "noise rounding", "noise shard 1 of 2", "sampling"]
    keys = [
        RANDOMNESS.key(stream, step, size)
        for stream in streams
        for step in steps
        for size in (8, 16, 32, 64)
    ]
    assert len({key[:8] for key in keys}) == len(keys)
    assert not torch.equal(one(8, step=3), one(8, step=3 + 2**16))
    draws = [RANDOMNESS.generator("sampling", step).integers(2**62) for step in steps]
    assert len(set(draws)) == len(steps)


def test_threads_and_company_do_not_change_the_sequence():
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(one(300_001))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    split = gaussian.draw({"a": torch.empty(300_000), "b": torch.empty(1)}, RANDOMNESS, "noise", 0)
    assert torch.equal(torch.cat(list(split.values())), found[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_independent_normal(dtype):
    """Distribution of values, of the squares of pairs and of neighbours; false alarms below 1e-6 in
    all.
    """
    from scipy.stats import kstest

    values = one(2_000_000, dtype).double().numpy()
    n = values.size
    assert kstest(values, "norm").pvalue > 1e-7
    assert kstest(values * 1.01, "norm").pvalue < 1e-7
    assert abs(values.mean()) * math.sqrt(n) < 5.5
    assert abs((values**2).mean() - 1) * math.sqrt(n / 2) < 5.5
    assert abs((values**4).mean() - 3) * math.sqrt(n / 96) < 5.5
    assert abs((values**3).mean()) * math.sqrt(n / 15) < 5.5
    size = gaussian.LARGE_CHUNK
    whole = values[: n // size * size].reshape(-1, 2, size // 2)
    for a, b in [(whole[:, 0], whole[:, 1]), (values[:-1], values[1:])]:
        assert abs(np.mean(a * b)) * math.sqrt(a.size) < 5.5
        assert abs(np.mean((a**2 - 1) * (b**2 - 1))) * math.sqrt(a.size) / 2 < 5.5
    beyond = (np.abs(values) > 4).sum()
    assert abs(beyond - n * 6.334e-5) < 5.5 * math.sqrt(n * 6.334e-5)
