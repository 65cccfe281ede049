"""The proof of the noise kernel: its own arithmetic is the definition's, the kernel passes it, and
a kernel that is off does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from dpfy.core.errors import Unsupported
from dpfy.core.randomness import Randomness
from dpfy.noise import chacha, gaussian, kernel_selftest, noise_buffers
from dpfy.noise.coordinate_slice import CoordinateSlice
from dpfy.noise.lattice import Lattice, lay_
from dpfy.noise.strategy import Recurrence

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
needs_kernel = pytest.mark.skipif(
    chacha.triton is None or not (CUDA or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs triton, and a CUDA device or TRITON_INTERPRET=1",
)
needs_gpu = pytest.mark.skipif(
    not CUDA, reason="needs a CUDA device: the interpreter cuts digits off where a device rounds"
)
FORMS = [
    (False, False, 0),
    (True, False, 0),
    (False, True, 0),
    (False, False, 1),
    (False, False, 3),
    (False, False, 5),
]


def test_the_arithmetic_is_that_of_rfc_8439(monkeypatch: pytest.MonkeyPatch) -> None:
    """Appendix A.1, vectors 1 and 2: twenty rounds, a key and a nonce of zeros, counters 0 and
    1.
    """
    monkeypatch.setattr(chacha, "ROUNDS", 20)
    found = kernel_selftest.words_of(np.arange(2, dtype=np.uint64), bytes(32))
    assert found[:4, 0].tolist() == [0xADE0B876, 0x903DF1A0, 0xE56A5D40, 0x28BD8653]
    assert found[:4, 1].tolist() == [0xBEE7079F, 0x7A385155, 0x7C97BA98, 0x0D082D73]


def test_values_are_standard_normal() -> None:
    values = kernel_selftest._pairs(
        kernel_selftest.words_of(np.arange(40_000, dtype=np.uint64), bytes(32))
    ).reshape(-1)
    assert abs(values.mean()) < 5 / len(values) ** 0.5
    assert abs(values.var() - 1) < 5 * (2 / len(values)) ** 0.5
    assert abs((values**4).mean() - 3) < 5 * (96 / len(values)) ** 0.5


Round = Callable[[torch.Tensor, torch.dtype], torch.Tensor]


def portable(
    change: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
    rounded: Round = lambda t, kind: t.to(kind),
    laid: Callable[..., None] = lay_,
    at: Callable[[CoordinateSlice | None], CoordinateSlice | None] = lambda part: part,
) -> Callable[..., None]:
    """Stands in for the kernel: the portable route on the draws of the proof; `change` spoils the
    draws, `laid` what is done with them.
    """

    def launch(
        tensors: list[torch.Tensor],
        lattice: Lattice,
        keys: list[bytes],
        divisor: float,
        r: Recurrence,
        past: torch.Tensor | None,
        out: list[torch.Tensor],
        part: CoordinateSlice | None = None,
    ) -> None:
        like = {str(i): t for i, t in enumerate(tensors)}
        state = {} if past is None else {noise_buffers.PAST: past}

        def draw(step: int) -> dict[str, torch.Tensor]:
            flat = change(torch.from_numpy(kernel_selftest._values(keys[-step], at(part))).float())
            return noise_buffers.split(flat, like)

        noise = noise_buffers.noise(r, 0, draw, state)
        steps = noise_buffers.flat(noise) * lattice.noise
        laid(tensors, [steps], lattice, divisor)
        for end, t in zip(out, tensors, strict=True):
            end.copy_(rounded(t, end.dtype))

    return launch


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_portable_route_passes_and_small_mistakes_do_not(
    form: tuple[bool, bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    recurrence, cpu = kernel_selftest._example(*form), torch.device("cpu")
    monkeypatch.setattr(chacha, "launch", portable())
    assert kernel_selftest.disagreement(cpu, recurrence) < kernel_selftest.TOLERANCE
    spoils: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t * 0.9999,
        lambda t: t.roll(1),
        lambda t: torch.where(torch.arange(len(t)) == 4100, torch.zeros(()), t),
        lambda t: torch.where(torch.arange(len(t)) == 7, torch.tensor(float("nan")), t),
    ]
    assert kernel_selftest.off_lattice(cpu, recurrence) < kernel_selftest.TOLERANCE
    for spoil in spoils:
        monkeypatch.setattr(chacha, "launch", portable(spoil))
        assert kernel_selftest.disagreement(cpu, recurrence) > kernel_selftest.TOLERANCE
    kernel_selftest.require.cache_clear()
    with pytest.raises(Unsupported, match="the noise kernel on cpu"):
        kernel_selftest.require(cpu, *form)
    kernel_selftest.require.cache_clear()


def continuous(
    tensors: list[torch.Tensor], noise: list[torch.Tensor], lattice: Lattice, divisor: float
) -> None:
    """What the code did before there was a lattice."""
    for t, z in zip(tensors, noise[0].split([t.numel() for t in tensors]), strict=True):
        t.add_(z, alpha=lattice.step).div_(divisor)


def unmoved(
    tensors: list[torch.Tensor], noise: list[torch.Tensor], lattice: Lattice, divisor: float
) -> None:
    """On the lattice, but sums are not moved at random."""
    lay_(tensors, noise, replace(lattice, phase=0.0), divisor)


def a_step_off(
    tensors: list[torch.Tensor], noise: list[torch.Tensor], lattice: Lattice, divisor: float
) -> None:
    lay_(tensors, noise, lattice, divisor)
    for t in tensors:
        t.add_(lattice.step / divisor)


@pytest.mark.parametrize("laid", [continuous, unmoved, a_step_off])
def test_a_kernel_that_does_not_use_the_lattice_as_it_should_is_not_trusted(
    laid: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(chacha, "launch", portable(laid=laid))
    kernel_selftest.require.cache_clear()
    with pytest.raises(Unsupported, match="the noise kernel on cpu"):
        kernel_selftest.require(cpu, *FORMS[0])
    kernel_selftest.require.cache_clear()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_results_of_a_narrow_type_are_the_nearest_or_do_not_pass(
    form: tuple[bool, bool, int], kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    recurrence, cpu = kernel_selftest._example(*form), torch.device("cpu")
    monkeypatch.setattr(chacha, "launch", portable())
    assert kernel_selftest.disagreement(cpu, recurrence, kind) < kernel_selftest.TOLERANCE

    def down(t: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        """Rounded toward zero, as a conversion that cuts digits off does."""
        near = t.to(kind)
        return torch.where(
            near.float().abs() > t.abs(), torch.nextafter(near, torch.zeros_like(near)), near
        )

    for spoilt in (
        portable(lambda t: t * 0.99),
        portable(lambda t: t.roll(1)),
        portable(rounded=down),
    ):
        monkeypatch.setattr(chacha, "launch", spoilt)
        assert kernel_selftest.disagreement(cpu, recurrence, kind) > kernel_selftest.TOLERANCE


def test_a_narrow_form_is_not_trusted_where_the_wide_one_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mistake that rounding to bfloat16 hides."""
    cpu, form = torch.device("cpu"), FORMS[0]
    monkeypatch.setattr(chacha, "launch", portable(lambda t: t * 0.9999))
    assert (
        kernel_selftest.disagreement(cpu, kernel_selftest._example(*form), torch.bfloat16)
        < kernel_selftest.TOLERANCE
    )
    kernel_selftest.require.cache_clear()
    with pytest.raises(Unsupported, match="the noise kernel on cpu"):
        kernel_selftest.require(cpu, *form, torch.bfloat16)
    kernel_selftest.require.cache_clear()


def test_a_kernel_that_draws_a_part_from_elsewhere_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the beginning of each tensor, or one block of the keystream further on."""
    cpu, whole = torch.device("cpu"), kernel_selftest.SIZES
    moved = [
        [(0, 3), (5, 5 + kernel_selftest.PART.size - 3)],
        [(a + 1, b + 1) for a, b in kernel_selftest.PART.runs],
    ]
    for runs in (None, *moved):
        place = (
            (lambda part: part)
            if runs is None
            else (lambda part, runs=runs: CoordinateSlice.of(runs, whole))
        )
        monkeypatch.setattr(chacha, "launch", portable(at=place))
        kernel_selftest.require.cache_clear()
        with (
            nullcontext()
            if runs is None
            else pytest.raises(Unsupported, match="the noise kernel on cpu")
        ):
            kernel_selftest.require(cpu, *FORMS[0], placed=True)
    kernel_selftest.require.cache_clear()


def test_draws_are_not_trusted_without_proof_either(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for change, trusted in (
        (lambda t: t, True),
        (lambda t: t * 0.9999, False),
        (lambda t: t.roll(1), False),
    ):

        def launch(
            tensors: list[torch.Tensor],
            lattice: None,
            keys: list[bytes],
            *rest: object,
            change=change,
        ) -> None:
            for t, z in zip(
                tensors,
                change(torch.from_numpy(kernel_selftest._values(keys[0]))).split(
                    list(kernel_selftest.SIZES)
                ),
                strict=True,
            ):
                t.copy_(z)

        monkeypatch.setattr(chacha, "launch", launch)
        kernel_selftest.require_draw.cache_clear()
        with (
            nullcontext()
            if trusted
            else pytest.raises(Unsupported, match="the noise kernel on cpu")
        ):
            kernel_selftest.require_draw(cpu)
    kernel_selftest.require_draw.cache_clear()


@needs_kernel
def test_the_kernel_draws() -> None:
    kernel_selftest.require_draw(DEVICE)
    kernel_selftest.require_draw(DEVICE, placed=True)


@needs_kernel
@pytest.mark.parametrize(
    "kind", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=needs_gpu)], ids=str
)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_kernel_passes(form: tuple[bool, bool, int], kind: torch.dtype) -> None:
    assert (
        kernel_selftest.disagreement(DEVICE, kernel_selftest._example(*form), kind)
        < kernel_selftest.TOLERANCE
    )
    assert (
        kernel_selftest.off_lattice(DEVICE, kernel_selftest._example(*form), kind)
        < kernel_selftest.TOLERANCE
    )
    kernel_selftest.require(DEVICE, *form, kind)
    if kind is torch.float32:
        kernel_selftest.require(DEVICE, *form, placed=True)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_no_release_without_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_selftest.require.cache_clear()
    monkeypatch.setattr(kernel_selftest, "TOLERANCE", -1.0)
    sums = {"w": torch.zeros(10, device="cuda")}
    with pytest.raises(Unsupported, match="the noise kernel"):
        gaussian.add_(
            sums, Lattice.of(1.0, torch.float32, 0.0), Randomness.for_tests(0), "noise", 0
        )
    assert not sums["w"].any()
    kernel_selftest.require.cache_clear()


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("moved", "good"), [(0.0, True), (2.0, False), (-2.0, False)])
def test_rounding_to_a_narrow_type_is_no_disagreement(monkeypatch, kind, moved, good):
    """Values on the right points, rounded once more, are right, also where that rounding is longer
    than a step; others are not.
    """
    exact = np.random.default_rng(3).normal(0, 40, 4000)
    weight = kernel_selftest.COARSE.step / kernel_selftest.DIVISOR
    out = torch.from_numpy((np.floor(exact) + 0.5 + moved) * weight).to(kind)
    monkeypatch.setattr(kernel_selftest, "_tried", lambda *arguments: (out, exact, None, exact))
    assert (
        kernel_selftest.off_lattice(torch.device("cpu"), None, kind) <= kernel_selftest.TOLERANCE
    ) is good
