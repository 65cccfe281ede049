"""Convolutions of any shape whose gradients are kept: equal to the loop, kept by shape alone, the
same bits in any batch.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfy.gradients.clip import FlatClip, PerLayerClip
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import LoopEngine
from dpfy.gradients.layers.convolution import geometry, keeps_gradients, kept_gradients
from dpfy.gradients.per_example.convolution import ConvolutionGradient

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Net(nn.Module):
    """A convolution drawn at random between two others, used once or several times, on frames or
    whole images.
    """

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.dims, transposed = draw.choice([1, 2, 2, 3]), draw.random() < 0.3
        groups, more, below = (
            draw.choice([1, 2, 3, 5]),
            draw.choice([1, 1, 2]),
            draw.choice([1, 1, 1, 2, 3]),
        )
        kernel = tuple(draw.choice([1, 2, 3, 5]) for _ in range(self.dims))
        stride, dilation = (
            tuple(draw.choice([1, 1, 2]) for _ in range(self.dims)) for _ in range(2)
        )
        into, out = (
            (groups * below, groups * more) if not transposed else (groups * more, groups * below)
        )
        self.uses = draw.choice([1, 1, 2]) if into == out else 1
        self.frames = draw.choice([1, 1, 3])
        self.channels, self.size = into, tuple(draw.randint(9, 11) for _ in range(self.dims))
        kind = f"Conv{'Transpose' if transposed else ''}{self.dims}d"
        options: dict[str, Any] = {
            "stride": stride,
            "dilation": dilation,
            "groups": groups,
            "bias": draw.random() < 0.5,
        }
        options["padding"] = tuple(
            draw.randint(0, (k - 1) * d) for k, d in zip(kernel, dilation, strict=True)
        )
        if not transposed:
            options["padding_mode"] = draw.choice(
                ["zeros", "zeros", "circular", "reflect", "replicate"]
            )
        if self.uses > 1:
            kernel, options["stride"], options["dilation"], options["padding"] = (
                (3,) * self.dims,
                1,
                1,
                1,
            )
        self.first = (
            nn.Conv1d(1, 1, 1)
            if self.dims == 1
            else nn.Conv2d(1, 1, 1)
            if self.dims == 2
            else nn.Conv3d(1, 1, 1)
        )
        self.middle: Any = getattr(nn, kind)(into, out, kernel, **options)

    def forward(self, x: Tensor) -> Tensor:
        many = len(x)
        x = self.first(x.flatten(0, 2)[:, None]).view(many * self.frames, self.channels, *self.size)
        for _ in range(self.uses):
            x = torch.tanh(self.middle(x))
        return x.reshape(many, -1)


def sums(engine: Any, model: Net, x: Tensor, clip: Any) -> list[Tensor]:
    engine.attach(model)
    try:
        for _ in range(2):  # the first step measures layouts
            y = model(x)
            places = torch.arange(y.shape[1], device=y.device, dtype=y.dtype)
            total = engine.bounded_sum((y * torch.cos(0.37 * places + 1)).sum(1), clip).value
    finally:
        engine.detach()
    return [g.double() for g in total.values()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(40))
def test_any_convolution_equals_the_loop(seed: int, device: str) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Net(draw).double().to(device)
    x = torch.randn(
        3, model.frames, model.channels, *model.size, dtype=torch.float64, device=device
    )
    if seed % 3 == 0 and model.dims == 2:
        model = model.to(memory_format=torch.channels_last)
    clip = draw.choice([FlatClip(0.5), FlatClip(math.inf), PerLayerClip(0.7)])
    expected = sums(LoopEngine(), model, x, clip)
    for found, wanted in zip(sums(BookkeepingEngine(), model, x, clip), expected, strict=True):
        assert float((found - wanted).norm()) <= 1e-9 * (1 + float(wanted.norm()))
    if (
        device == "cuda"
        # kernels run in float32; where terms cancel a norm has a margin there, so nothing is
        # clipped
    ):
        expected = sums(LoopEngine(), model, x, FlatClip(math.inf))
        model, x = model.float(), x.float()
        for found, wanted in zip(
            sums(BookkeepingEngine(), model, x, FlatClip(math.inf)), expected, strict=True
        ):
            assert float((found - wanted).norm()) <= 2e-3 * (1e-2 + float(wanted.norm()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_an_example_has_the_same_bits_in_any_batch(device: str, dtype: torch.dtype) -> None:
    """What is kept is measured without an allowance for rounding: it must not change when others
    join.
    """
    torch.manual_seed(0)
    small, wider = nn.Conv2d(32, 32, 3, 2, 1, groups=32), nn.Conv2d(16, 32, 7, padding=3, groups=16)
    for layer, size, memory in (
        (small, 9, None),
        (wider, 8, None),
        (wider, 12, None),
        (small, 24, torch.channels_last),
    ):
        layer = layer.to(device, dtype)
        x = torch.randn(17, layer.in_channels, size, size, device=device).to(dtype)
        x = x if memory is None else x.contiguous(memory_format=memory)
        g = torch.randn_like(layer(x))
        how, weight = (
            geometry(layer.stride, layer.padding, layer.dilation, layer.groups)[0],
            layer.weight.detach(),
        )
        whole = kept_gradients(ConvolutionGradient(x, g, weight, how), bias=False)[0].grads
        for many in (1, 2, 5, 16):
            part = kept_gradients(ConvolutionGradient(x[:many], g[:many], weight, how), bias=False)[
                0
            ].grads
            assert torch.equal(part, whole[:many])


def test_what_is_kept_goes_by_the_shapes_of_one_image() -> None:
    weight, how = torch.zeros(64, 1, 7, 7), geometry((1, 1), (3, 3), (1, 1), 64)[0]
    for many in (1, 3, 1000):
        large, small = (torch.zeros(1, 64, side, side).expand(many, -1, -1, -1) for side in (8, 2))
        assert keeps_gradients(ConvolutionGradient(large, large, weight, how))
        assert not keeps_gradients(ConvolutionGradient(small, small, weight, how))
    assert not keeps_gradients(
        ConvolutionGradient(
            small, small, torch.zeros(64, 64, 3, 3), geometry((1, 1), (1, 1), (1, 1), 1)[0]
        )
    )


def test_one_example_that_is_not_finite_adds_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=4), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 3)
    )
    x, y = torch.randn(4, 4, 8, 8), torch.tensor([0, 1, 2, 0])
    found = []
    for bad in (0.0, math.nan, math.inf):
        engine, given = BookkeepingEngine(), x.clone()
        engine.attach(model)
        given[2] = bad if bad else given[2]
        mask = torch.tensor([True, True, bool(bad), True])
        for _ in range(2):
            total = engine.bounded_sum(
                F.cross_entropy(model(given), y, reduction="none"), FlatClip(0.1), mask
            ).value
        engine.detach()
        found.append(torch.cat([g.flatten() for g in total.values()]))
    assert torch.allclose(found[0], found[1], rtol=1e-5, atol=1e-8)
    assert torch.allclose(found[0], found[2], rtol=1e-5, atol=1e-8)
