"""Number types and devices without a bound of their own are refused, before anything is reserved
where that can be.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import dpfy
from dpfy.core import check
from dpfy.core.errors import Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.gradients import clip, engine
from dpfy.gradients.checker import check_model
from dpfy.gradients.per_example import rounding
from dpfy.noise import gaussian
from dpfy.noise.strategy import Identity
from dpfy.noise.stream import NoiseStream
from dpfy.training.runtime import Runtime

FLOATS = {
    getattr(torch, name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)
}
KNOWN = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
UNKNOWN = sorted(FLOATS - KNOWN, key=str)
DEVICES = ["mps", "xpu", "hpu", "xla", "vulkan", "privateuseone", "ipu", "mtia"]


def test_the_table_holds_what_the_bounds_were_worked_out_for() -> None:
    assert {getattr(torch, name) for name in check.DTYPES} == KNOWN
    assert set(check.DEVICES) == {"cpu", "cuda"}
    assert torch.float8_e4m3fn in UNKNOWN
    for dtype in KNOWN:  # the margin of a type covers a few roundings in it
        row, facts = check.number_type("a number", dtype), torch.finfo(dtype)
        assert (row.unit, row.least) == (facts.eps / 2, facts.tiny)
        assert dtype is torch.float64 or row.gradient_margin >= 2 * facts.eps
        assert torch.promote_types(getattr(torch, row.sums), torch.float32) is rounding.sum_dtype(
            dtype
        )


@pytest.mark.parametrize("dtype", UNKNOWN, ids=str)
def test_a_type_without_a_margin_gets_none(dtype: torch.dtype) -> None:
    squares = torch.ones(1, 3, dtype=torch.float64)
    for attempt in (
        lambda: engine.inflate_norms(squares, dtype),
        lambda: rounding.sum_dtype(dtype),
        lambda: rounding.unit(dtype),
        lambda: rounding.gamma(4, dtype),
        lambda: clip.margin_of(SimpleNamespace(dtype=dtype)),  # type: ignore[arg-type]
        lambda: gaussian.dtype_of({"w": SimpleNamespace(dtype=dtype)}),  # type: ignore[dict-item]
    ):
        with pytest.raises(Unsupported, match="float64, float32, bfloat16"):
            attempt()


@pytest.mark.parametrize("kind", DEVICES)
def test_a_device_that_is_neither_cpu_nor_cuda_gets_no_guess(kind: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        with pytest.raises(Unsupported, match="supported devices: cpu, cuda"):
            rounding.of_factors(dtype, torch.device(kind))
    with pytest.raises(Unsupported, match="supported devices: cpu, cuda"):
        Runtime(device=kind)
    with pytest.raises(Unsupported, match="supported devices: cpu, cuda"):
        gaussian.draw(
            {"w": SimpleNamespace(device=torch.device(kind), dtype=torch.float32, numel=lambda: 1)},
            None,
            "s",
            0,
        )  # type: ignore


def fit(
    model: nn.Module, folder: Any, loss: Any = None, autocast: torch.dtype | None = None
) -> None:
    x, y = torch.randn(40, 4), torch.randint(0, 2, (40,))
    plan = dpfy.dpsgd(40, 20, steps=2, clip_norm=1.0).with_noise(1.0, delta=1e-5)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with dpfy.PrivateTraining(model, optimizer, (x, y), plan, run=folder) as training:
        for a, b in training.batches():
            with torch.autocast(
                "cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None
            ):
                out = (loss or model)(a)
            training.step(F.cross_entropy(out.float(), b, reduction="none"))


def fake(kind: str) -> nn.Module:
    with FakeTensorMode(allow_non_fake_inputs=True):
        weight = nn.Parameter(torch.empty(2, 4, device=kind))
    model = nn.Linear(4, 2)
    model.weight = weight
    return model


@pytest.mark.parametrize("kind", ["mps", "xpu"])
@pytest.mark.parametrize("what", ["parameter", "frozen", "buffer"])
def test_a_model_on_another_device_is_refused_before_anything_is_reserved(
    kind: str, what: str, tmp_path: Any
) -> None:
    model = fake(kind) if what == "parameter" else nn.Linear(4, 2)
    if what == "frozen":
        model.other = fake(kind).weight.requires_grad_(False)
    elif what == "buffer":
        model.register_buffer("other", fake(kind).weight.detach())
    with pytest.raises(Unsupported, match="supported devices: cpu, cuda"):
        fit(model, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_without_values_is_refused_before_anything_is_reserved(tmp_path: Any) -> None:
    with pytest.raises(Unsupported, match="meta"):
        fit(nn.Linear(4, 2, device="meta"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "dtype", [torch.float16, *(d for d in UNKNOWN if d.is_floating_point or d.is_complex)], ids=str
)
def test_parameters_of_another_type_are_refused_before_anything_is_reserved(
    dtype: torch.dtype, tmp_path: Any
) -> None:
    model = nn.Linear(4, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        try:
            model.scale = nn.Parameter(torch.empty(2, dtype=dtype))
        except (RuntimeError, NotImplementedError) as problem:
            pytest.skip(f"torch makes no parameter of it: {problem}")
    with pytest.raises(Unsupported, match="scale"):
        fit(model, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    model.scale.requires_grad_(False)  # what is not trained may be held as it likes
    check_model(model)


class Through(nn.Module):
    """A layer whose output passes through another type."""

    def __init__(self, dtype: torch.dtype, first: bool) -> None:
        super().__init__()
        self.linear, self.dtype, self.first = nn.Linear(4, 2), dtype, first

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.linear(x.to(self.dtype).float())
            if self.first
            else self.linear(x).to(self.dtype).float()
        )


EIGHT = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", [*EIGHT, torch.float16], ids=str)
def test_activations_of_another_type_are_refused_before_the_first_release(
    dtype: torch.dtype, tmp_path: Any
) -> None:
    model = Through(dtype, first=False)
    before = model.linear.weight.detach().clone()
    with pytest.raises(Unsupported, match=str(dtype).removeprefix("torch.")):
        fit(model, tmp_path / "run")
    assert torch.equal(model.linear.weight, before)


def test_autocast_to_float16_is_refused(tmp_path: Any) -> None:
    with pytest.raises(Unsupported, match="float16"):
        fit(nn.Linear(4, 2), tmp_path / "run", autocast=torch.float16)


def fourier(x: Tensor) -> Tensor:
    return torch.fft.fft(x, dim=1).real


@pytest.mark.parametrize(
    "case",
    [
        "plain",
        "double",
        "bfloat16",
        "autocast",
        "quantised inputs",
        "complex on the way",
        "frozen uint8",
        "places of a maximum",
    ],
)
def test_ordinary_models_are_not_refused(case: str, tmp_path: Any) -> None:
    model: nn.Module = nn.Linear(4, 2)
    loss, autocast = None, None
    if case == "double":
        model.double()
        loss = lambda a: model(a.double())  # noqa: E731
    elif case == "bfloat16":
        model.bfloat16()
        loss = lambda a: model(a.bfloat16())  # noqa: E731
    elif case == "autocast":
        autocast = torch.bfloat16
    elif case == "quantised inputs":
        model = Through(torch.float8_e4m3fn, first=True)
    elif case == "complex on the way":
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        loss = lambda a: model[1](fourier(model[0](a)))  # type: ignore[index] # noqa: E731
    elif case == "frozen uint8":
        model.packed = nn.Parameter(torch.zeros(2, 4, dtype=torch.uint8), requires_grad=False)
        loss = lambda a: model(a) + F.linear(a, model.packed.float())  # noqa: E731
    elif case == "places of a maximum":
        loss = lambda a: (  # noqa: E731
            model(a.sort(1)[0])
            + model(a).sort(1)[0]
            + model(a).topk(2, 1)[0]
            + model(a).max(1, keepdim=True)[0]
        )
    fit(model, tmp_path / "run", loss, autocast)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.int64], ids=str)
def test_noise_is_not_added_to_sums_of_another_type(dtype: torch.dtype) -> None:
    total = {"w": torch.ones(3).to(dtype)}
    stream = NoiseStream(Identity(), 1.0, Randomness.for_tests(1))
    with pytest.raises(Unsupported, match="float64, float32"):
        stream.require_lattice(total, 1.0)
    with pytest.raises(Unsupported, match="float64, float32"):
        stream.release(Bounded(total, Bound(1.0)), 0, {}, mock_permit(stream.event, 10))


def test_noise_is_not_made_for_another_device() -> None:
    stream = NoiseStream(Identity(), 1.0, Randomness.for_tests(1))
    with pytest.raises(Unsupported, match="supported devices"):
        stream.release(
            Bounded({"w": fake("xpu").weight.detach()}, Bound(1.0)),
            0,
            {},
            mock_permit(stream.event, 10),
        )
