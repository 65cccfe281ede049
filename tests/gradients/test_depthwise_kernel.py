"""Kernels for depthwise, grouped and transposed convolutions: on a GPU, or anywhere with
``TRITON_INTERPRET=1`` and triton installed.
"""

from __future__ import annotations

import copy
import math
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

from dpfy.gradients import kernels
from dpfy.gradients.clip import FlatClip, PerLayerClip
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import LoopEngine
from dpfy.gradients.kernels import conv2d, depthwise
from dpfy.gradients.kernels.depthwise import Taps, tap_sums
from dpfy.gradients.layers import convolution
from dpfy.gradients.layers.convolution import geometry, kept_gradients
from dpfy.gradients.per_example.convolution import ConvolutionGradient

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]

LAYERS: dict[str, tuple[type, tuple[int, ...], dict[str, object], tuple[int, ...]]] = {
    "3x3": (nn.Conv2d, (7, 7, 3), {"padding": 1, "groups": 7}, (9, 6)),
    "7x7": (nn.Conv2d, (5, 5, 7), {"padding": 3, "groups": 5}, (8, 8)),
    "7x7, few positions": (nn.Conv2d, (40, 40, 7), {"padding": 3, "groups": 40}, (2, 2)),
    "stride": (
        nn.Conv2d,
        (6, 6, (3, 2)),
        {"stride": (2, 1), "padding": (1, 0), "groups": 6},
        (9, 8),
    ),
    "dilation": (
        nn.Conv2d,
        (4, 4, (2, 3)),
        {"dilation": (3, 2), "padding": (0, 3), "groups": 4},
        (9, 8),
    ),
    "multiplier": (nn.Conv2d, (3, 6, 3), {"groups": 3}, (7, 7)),
    "two below": (nn.Conv2d, (6, 9, 3), {"groups": 3, "padding": 1}, (7, 7)),
    "many positions": (nn.Conv2d, (2, 2, 3), {"padding": 1, "groups": 2}, (20, 19)),
    "one dimension": (nn.Conv1d, (5, 5, 4), {"padding": 2, "stride": 2, "groups": 5}, (33,)),
    "three dimensions": (
        nn.Conv3d,
        (3, 3, (3, 2, 3)),
        {"padding": (1, 0, 2), "stride": (2, 1, 1), "groups": 3},
        (6, 5, 7),
    ),
    "transposed": (
        nn.ConvTranspose2d,
        (4, 4, 3),
        {"stride": 2, "padding": 1, "output_padding": 1, "groups": 4},
        (5, 6),
    ),
    "transposed, wider": (nn.ConvTranspose1d, (4, 8, 3), {"stride": 2, "groups": 4}, (9,)),
}
"""The layer, its channels and kernel, its options, the size of its input."""

PRODUCTS: dict[str, tuple[type, tuple[int, ...], dict[str, object], tuple[int, ...]]] = {
    "transposed": (nn.ConvTranspose2d, (20, 9, 2), {"stride": 2}, (4, 5)),
    "transposed, padded": (
        nn.ConvTranspose2d,
        (5, 17, 3),
        {"stride": 2, "padding": 1, "output_padding": 1},
        (5, 4),
    ),
    "transposed, few positions": (nn.ConvTranspose2d, (20, 18, 3), {"padding": 1}, (2, 2)),
    "one dimension": (nn.Conv1d, (6, 17, 4), {"padding": 2, "stride": 2, "dilation": 2}, (21,)),
    "transposed, one dimension": (nn.ConvTranspose1d, (6, 5, 3), {"padding": 1, "stride": 2}, (9,)),
    "many positions": (nn.Conv2d, (3, 17, 3), {"padding": 1}, (12, 13)),
    "many positions, one tap": (nn.Conv2d, (5, 4, 1), {}, (12, 13)),
    "groups": (nn.Conv2d, (32, 18, 3), {"padding": 1, "groups": 2}, (5, 5)),
    "groups, transposed": (nn.ConvTranspose2d, (18, 36, 2), {"stride": 2, "groups": 2}, (3, 4)),
}
"""The same for those that are products."""


def case(
    name: str, many: int, dtype: torch.dtype, last: bool, products: bool = False
) -> tuple[ConvolutionGradient, Tensor]:
    """A convolution and the weight gradients of its examples in float64."""
    kind, given, options, size = PRODUCTS[name] if products else LAYERS[name]
    layer = kind(*given, **options, bias=False).to(DEVICE).double()
    a = torch.randn(many, given[0], *size, device=DEVICE).to(dtype)
    y = layer(a.double())
    g = torch.randn_like(y).to(dtype)
    each = [
        torch.autograd.grad(layer(a[i : i + 1].double()), layer.weight, g[i : i + 1].double())[0]
        for i in range(many)
    ]
    if last:
        a, g = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (a, g))
    extra = tuple(layer.output_padding) if layer.transposed else None
    how = geometry(
        tuple(layer.stride), tuple(layer.padding), tuple(layer.dilation), layer.groups, extra
    )[0]
    return ConvolutionGradient(a, g, layer.weight.detach().to(dtype), how), torch.stack(each)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_every_example(
    name: str, last: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "usable", lambda t, family="": True)
    part, expected = case(name, 3, dtype, last)
    for tile in (4096, 256) if "many positions" in name else (4096,):
        monkeypatch.setattr(depthwise, "TILE", tile)
        own, sums = kept_gradients(part, bias=True)
        assert own.grads.shape == expected.shape
        assert own.grads.dtype is torch.float32
        assert float((own.grads - expected).norm()) <= 1e-6 * float(expected.norm())
        if sums is not None:
            plain = part.grads.double().flatten(2).sum(2)
            assert float((sums.grads - plain).norm()) <= 1e-6 * float(part.grads.double().norm())


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_by_the_kernels_for_two_dimensions(
    name: str, last: bool, reduced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "usable", lambda t, family="": True)
    monkeypatch.setattr(
        conv2d, "reduced", lambda t: reduced and DEVICE == "cpu"
    )  # on a GPU that would be TF32
    part, expected = case(name, 3, torch.float32, last, products=True)
    squares = expected.flatten(1).square().sum(1)
    found = part.measured()[0].sum(0)
    assert bool((found >= squares * (1 - 2e-5)).all())
    assert bool(
        (found <= squares * (1 + 4e-3)).all()
    )  # the allowance for rounding grows with the positions
    monkeypatch.setattr(convolution, "MOST_BELOW", 0)
    monkeypatch.setattr(conv2d, "RUN_POSITIONS", 64)
    own = kept_gradients(part, bias=False)[0].grads
    assert own.shape == expected.shape
    assert float((own - expected).norm()) <= 1e-5 * float(expected.norm())
    weights = torch.tensor([0.7, 0.0, 1.3], device=DEVICE)
    total = torch.tensordot(weights.double(), expected, 1)
    assert float((part.weighted_sum(weights) - total).norm()) <= 1e-5 * float(total.norm())


def square(many: int, channels: int) -> tuple[Tensor, Tensor, Taps]:
    """Two tensors and a kernel of 3 x 3 taps."""
    torch.manual_seed(0)
    near, far = (torch.randn(many, channels, 5, 6, device=DEVICE) for _ in range(2))
    return near, far, Taps((3, 3), (1, 1), (1, 1), (1, 1), channels)


def test_the_order_of_additions_does_not_depend_on_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However the work is shared out."""
    near, far, how = square(4, 6)
    whole = tap_sums(near, far, how)[0]
    monkeypatch.setattr(depthwise, "PROGRAMS", 1)
    assert torch.equal(tap_sums(near, far, how)[0], whole)
    assert torch.equal(tap_sums(near[:1], far[:1], how)[0], whole[:1])


def test_frames_of_one_example_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "usable", lambda t, family="": True)
    part, expected = case("3x3", 4, torch.float32, last=False)
    folded = ConvolutionGradient(part.inputs, part.grads, part.weight, part.geometry, images=2)
    found = kept_gradients(folded, bias=True)[0].grads
    assert float((found - expected.unflatten(0, (2, 2)).sum(1)).norm()) <= 1e-6 * float(
        expected.norm()
    )


def test_an_example_that_is_not_finite_keeps_to_itself() -> None:
    near, far, how = square(3, 4)
    before = tap_sums(near, far, how)[0]
    far[1, 2, 3, 3] = float("nan")
    after = tap_sums(near, far, how)[0]
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert torch.equal(after[1, [0, 1, 3]], before[1, [0, 1, 3]])
    assert bool(after[1, 2].isnan().any())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_more_images_than_one_dimension_of_a_launch() -> None:
    torch.manual_seed(0)
    x, g = torch.randn(70_000, 2, 4, 4, device=DEVICE), torch.randn(70_000, 2, 4, 4, device=DEVICE)
    for weight, groups in (
        (torch.zeros(2, 1, 3, 3, device=DEVICE), 2),
        (torch.zeros(2, 2, 1, 1, device=DEVICE), 1),
    ):
        how = geometry((1, 1), ((weight.shape[2] - 1) // 2,) * 2, (1, 1), groups)[0]
        own = kept_gradients(ConvolutionGradient(x, g, weight, how), bias=False)[0].grads
        last = kept_gradients(ConvolutionGradient(x[-3:], g[-3:], weight, how), bias=False)[0].grads
        assert torch.equal(own[-3:], last)


def test_a_network_by_the_kernels_equals_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "usable", lambda t, family="": t.dtype is torch.float32)
    wide = [
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv2d(4, 8, 3, padding=1, groups=4),
        nn.Tanh(),
    ]
    narrow = [
        nn.Conv2d(8, 3, 1),
        nn.ConvTranspose2d(3, 2, 2, 2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(2 * 12 * 12, 3),
    ]
    model = nn.Sequential(*wide, *narrow).to(DEVICE)
    x, y = torch.randn(3, 2, 6, 6, device=DEVICE), torch.tensor([0, 2, 1], device=DEVICE)
    oracle = copy.deepcopy(model).double()
    fast, loop = BookkeepingEngine(), LoopEngine()
    fast.attach(model)
    loop.attach(oracle)
    for clip in (FlatClip(0.3), PerLayerClip(1.0), FlatClip(math.inf)):
        expected = loop.bounded_sum(
            F.cross_entropy(oracle(x.double()), y, reduction="none"), clip
        ).value
        for _ in range(2):
            found = fast.bounded_sum(F.cross_entropy(model(x), y, reduction="none"), clip).value
        for name, g in expected.items():
            gap = 1e-4 if DEVICE == "cpu" else 2e-2  # TF32
            assert float((found[name].double() - g).norm()) <= gap * (1e-3 + float(g.norm()))
    fast.detach()
    loop.detach()
