"""Exact noise on a GPU: the kernel's cells are those of real numbers, on a GPU or with
``TRITON_INTERPRET=1`` and triton installed.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.noise import chacha, exact_kernel, exact_selftest
from dpfy.noise.lattice import Lattice
from dpfy.noise.strategy import Identity
from dpfy.noise.stream import NoiseStream
from dpfy.noise.toeplitz import Banded

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(
    chacha.triton is None or not (CUDA or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs triton, and a CUDA device or TRITON_INTERPRET=1",
)
DEVICE = torch.device("cuda" if CUDA else "cpu")


def test_numbers_of_two_doubles_have_a_hundred_bits():
    assert exact_selftest.long_error(DEVICE) < 2.0**-98


def test_single_precision_is_as_near_as_is_said():
    """Over words at even distances and at both ends; `benchmarks/exact_training.py --prove` takes
    them all.

    Half of what is trusted, as `exact_selftest.require` asks: over all 2^32 words an H200 is off by
    2^-18.99, and 2^-17 is trusted.
    """
    count = exact_selftest.WORDS if CUDA else 1 << 14
    for begin, stride in [
        (977, 2**32 // count),
        (0, 1),
        (2**32 - count, 1),
        (2**29 - count // 2, 1),
    ]:
        assert exact_selftest.single_error(DEVICE, begin, stride, count) < exact_kernel.ERROR / 2


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("sizes", "error"),
    [((5, 70, 0, 3), 1.0), ((7, 290), exact_kernel.ERROR), ((1, 4100), exact_kernel.ERROR)],
)
def test_cells_are_those_of_real_numbers(sizes, error, kind):
    assert exact_selftest.disagreements(DEVICE, sizes, kind, error) == 0


def test_a_kernel_that_is_off_is_found(monkeypatch):
    """Noise of another size, a sum that is moved: the cells tell."""
    honest = exact_kernel.launch
    for changed in (
        lambda on, gain: (on, gain * (1 + 2e-4)),
        lambda on, gain: (Lattice(2 * on.step, on.noise, 0.0), gain),
        lambda on, gain: (Lattice(on.step, -on.noise, 0.0), gain),
    ):
        monkeypatch.setattr(
            exact_kernel,
            "launch",
            lambda t, on, gain, *rest, change=changed: honest(t, *change(on, gain), *rest),
        )
        assert exact_selftest.disagreements(DEVICE, (7, 290), torch.float32) > 0


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_stream_releases_them():
    """By address, where the sums are or elsewhere, for any layout."""
    stream = NoiseStream(Identity(), 1.3, Randomness.for_tests(3), divisor=64.0, exact=True)
    sums = {
        "a": torch.randn(300, device="cuda"),
        "turned": torch.randn(7, 31, device="cuda").t(),
        "none": torch.zeros(0, device="cuda"),
    }
    stream.require_lattice(sums, 1.0)
    on = stream._lattice(sums, 1.0, torch.float32, 2)
    out = stream.release(Bounded(sums, Bound(l2=1.0)), 2, {}, mock_permit(stream.event, 9))[0].value
    flat = [t.contiguous().flatten().cpu().numpy() for t in sums.values()]
    cells = exact_selftest.cells(flat, on, 1.0, stream.randomness.key("noise", 2, chacha.KEY_BYTES))
    found = np.concatenate([t.contiguous().flatten().cpu().numpy() for t in out.values()])
    assert np.array_equal(
        found, ((cells.astype(np.float32) + 0.5) * on.step / 64.0).astype(np.float32)
    )
    into = {n: torch.empty_like(t, dtype=torch.bfloat16) for n, t in sums.items()}
    again = stream.release(Bounded(sums, Bound(l2=1.0)), 2, {}, mock_permit(stream.event, 9), into)[
        0
    ].value
    assert all(torch.equal(again[n].float(), out[n].bfloat16().float()) for n in sums)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_has_no_kernel_is_made_on_the_host_with_the_same_bits(dtype):
    for strategy in (
        (Banded((1.0, 0.5)), Identity()) if dtype is torch.float64 else (Banded((1.0, 0.5)),)
    ):
        seen = []
        for device in ("cpu", "cuda"):
            stream = NoiseStream(strategy, 1.3, Randomness.for_tests(3), exact=True)
            sums = {"w": torch.linspace(-1, 1, 301, dtype=dtype, device=device)}
            state = stream.init(sums)
            for step in range(3):
                out, state = stream.release(
                    Bounded(sums, Bound(l2=1.0)), step, state, mock_permit(stream.event, 9)
                )
            seen.append(out.value["w"].cpu())
        assert torch.equal(*seen)
