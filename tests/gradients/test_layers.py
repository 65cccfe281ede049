"""Every layer row against the reference loop, in float64, over randomly drawn shapes."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engine import Engine, Grads
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import BatchedEngine, LoopEngine
from dpfy.gradients.per_example.embedding import count_rows

sys.path.insert(0, str(Path(__file__).parent))
import compared
from compared import distance

Case = tuple[nn.Module, Tensor]
Draw = Callable[[random.Random], Case]


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def linear(r: random.Random) -> Case:
    d, middle = r.randint(1, 9), [r.randint(1, 5) for _ in range(r.randint(0, 2))]
    return nn.Linear(d, r.randint(1, 9), bias=r.random() < 0.7), floats(r.randint(1, 6), *middle, d)


def wide_linear(r: random.Random) -> Case:
    return nn.Linear(40, 30), floats(r.randint(2, 5), r.randint(2, 6), 40)


def embedding(r: random.Random) -> Case:
    rows = r.randint(2, 12)
    pad = r.choice([None, 0, rows - 1])
    shape = [r.randint(1, 6)] + [r.randint(1, 6) for _ in range(r.randint(0, 2))]
    return nn.Embedding(rows, r.randint(1, 6), padding_idx=pad), torch.randint(0, rows, shape)


def convolution(dimensions: int) -> Draw:
    kinds = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}

    def draw(r: random.Random) -> Case:
        groups = r.choice([1, 1, 2])
        stride, dilation, kernel = r.randint(1, 2), r.randint(1, 2), r.randint(1, 3)
        mode = r.choice(["zeros", "zeros", "circular", "replicate"])
        padding: int | str = r.choice([0, 1, "valid"] + (["same"] if stride == 1 else []))
        layer = kinds[dimensions](
            groups * r.randint(1, 3),
            groups * r.randint(1, 3),
            kernel,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=r.random() < 0.7,
            padding_mode=mode,
        )
        space = [r.randint(6, 8) for _ in range(dimensions)]
        return layer, floats(r.randint(1, 5), layer.in_channels, *space)

    return draw


def transposed(dimensions: int) -> Draw:
    kinds = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}

    def draw(r: random.Random) -> Case:
        groups, stride = r.choice([1, 2]), r.randint(1, 3)
        layer = kinds[dimensions](
            groups * r.randint(1, 3),
            groups * r.randint(1, 3),
            r.randint(1, 3),
            stride=stride,
            padding=r.randint(0, 1) if stride == 1 else 0,
            output_padding=r.randint(0, stride - 1),
            dilation=r.randint(1, 2) if stride == 1 else stride,
            groups=groups,
            bias=r.random() < 0.7,
        )
        return layer, floats(
            r.randint(1, 4), layer.in_channels, *[r.randint(3, 5) for _ in range(dimensions)]
        )

    return draw


def embedding_bag(r: random.Random) -> Case:
    rows, shape = r.randint(2, 12), (r.randint(1, 6), r.randint(1, 5))
    return nn.EmbeddingBag(rows, r.randint(1, 6), mode=r.choice(["sum", "mean"])), torch.randint(
        0, rows, shape
    )


class Attention(nn.Module):
    """MultiheadAttention as one layer with one input."""

    def __init__(self, width: int, heads: int, batch_first: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width, heads, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        if self.inner.batch_first:
            return self.inner(x, x, x, need_weights=False)[0]
        x = x.transpose(0, 1)
        return self.inner(x, x, x, need_weights=False)[0].transpose(0, 1)


def attention(r: random.Random) -> Case:
    heads = r.randint(1, 2)
    return Attention(heads * 3, heads, r.random() < 0.5), floats(
        r.randint(1, 5), r.randint(1, 5), heads * 3
    )


class Recurrent(nn.Module):
    """The outputs of a recurrent layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


def recurrent(kind: type[nn.Module]) -> Draw:
    def draw(r: random.Random) -> Case:
        inner = kind(
            3, 4, num_layers=r.randint(1, 2), bidirectional=r.random() < 0.3, batch_first=True
        )
        return Recurrent(inner), floats(r.randint(1, 4), r.randint(1, 4), 3)

    return draw


def prelu(r: random.Random) -> Case:
    channels = r.randint(1, 4)
    return nn.PReLU(r.choice([1, channels])), floats(r.randint(1, 5), channels, r.randint(1, 4))


def layer_norm(r: random.Random) -> Case:
    shape = [r.randint(2, 5) for _ in range(r.randint(1, 2))]
    middle = [r.randint(1, 4) for _ in range(r.randint(0, 2))]
    return nn.LayerNorm(shape, bias=r.random() < 0.7), floats(r.randint(1, 6), *middle, *shape)


def rms_norm(r: random.Random) -> Case:
    shape = [r.randint(2, 5) for _ in range(r.randint(1, 2))]
    middle = [r.randint(1, 4) for _ in range(r.randint(0, 2))]
    return nn.RMSNorm(shape, eps=r.choice([None, 1e-3])), floats(r.randint(1, 6), *middle, *shape)


def group_norm(r: random.Random) -> Case:
    groups = r.randint(1, 3)
    channels = groups * r.randint(1, 3)
    space = [r.randint(2, 4) for _ in range(r.randint(1, 3))]
    return nn.GroupNorm(groups, channels), floats(r.randint(1, 5), channels, *space)


def instance_norm(r: random.Random) -> Case:
    dimensions, channels = r.randint(1, 3), r.randint(1, 4)
    kind = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[dimensions]
    return kind(channels, affine=True), floats(
        r.randint(1, 5), channels, *[r.randint(2, 4) for _ in range(dimensions)]
    )


DRAWS: dict[str, Draw] = {
    "linear": linear,
    "wide linear": wide_linear,
    "embedding": embedding,
    "conv1d": convolution(1),
    "conv2d": convolution(2),
    "conv3d": convolution(3),
    "transposed 1d": transposed(1),
    "transposed 2d": transposed(2),
    "transposed 3d": transposed(3),
    "embedding bag": embedding_bag,
    "attention": attention,
    "rnn": recurrent(nn.RNN),
    "lstm": recurrent(nn.LSTM),
    "gru": recurrent(nn.GRU),
    "prelu": prelu,
    "layer norm": layer_norm,
    "rms norm": rms_norm,
    "group norm": group_norm,
    "instance norm": instance_norm,
}


def losses_of(model: nn.Module, x: Tensor, twist: Tensor) -> Tensor:
    """A nonlinear loss per example, so that output gradients differ between positions and
    examples.
    """
    y = model(x)
    return (
        (torch.sin(y) * twist[: y[0].numel()].view(y.shape[1:]) + 0.1 * y.square())
        .flatten(1)
        .sum(1)
    )


def answer(
    engine: Engine, model: nn.Module, x: Tensor, twist: Tensor, clip: FlatClip, steps: int = 1
) -> Grads:
    return compared.answer(engine, model, lambda: losses_of(model, x, twist), clip, steps)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", DRAWS)
def test_layer_equals_loop(kind: str, seed: int) -> None:
    r = random.Random(f"{kind} {seed}")
    torch.manual_seed(seed)
    layer, x = DRAWS[kind](r)
    model = layer.double().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    twist = floats(60_000)
    reference = answer(LoopEngine(), model, x, twist, FlatClip(math.inf))
    length = math.sqrt(sum(float(g.square().sum()) for g in reference.values())) / len(x)
    for clip in (FlatClip(math.inf), FlatClip(max(0.5 * length, 1e-6))):
        expected = answer(LoopEngine(), model, x, twist, clip)
        assert distance(answer(BookkeepingEngine(), model, x, twist, clip), expected) < 1e-9
        assert (
            distance(answer(BookkeepingEngine(), model, x, twist, clip, steps=3), expected) < 1e-9
        )
        assert distance(answer(BatchedEngine(), model, x, twist, clip), expected) < 1e-9


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("kind", ["wide linear", "layer norm", "group norm", "instance norm"])
def test_frozen_half_of_a_layer(kind: str, frozen: str) -> None:
    torch.manual_seed(0)
    draws = (DRAWS[kind](random.Random(seed)) for seed in range(5, 60))
    layer, x = next((layer, x) for layer, x in draws if getattr(layer, frozen) is not None)
    model = nn.Sequential(layer, nn.Tanh()).double()
    getattr(layer, frozen).requires_grad_(False)
    twist = floats(60_000)
    expected = answer(LoopEngine(), model, x, twist, FlatClip(0.3))
    assert f"0.{frozen}" not in expected
    assert (
        distance(answer(BookkeepingEngine(), model, x, twist, FlatClip(0.3), steps=2), expected)
        < 1e-9
    )
    assert distance(answer(BatchedEngine(), model, x, twist, FlatClip(0.3)), expected) < 1e-9


@pytest.mark.parametrize(
    ("dtype", "most"),
    [
        (dtype, most)
        for dtype in (torch.int64, torch.int32)
        for most in (7, 65_535, 65_536, 2**31 // 6 + 5)
    ]
    + [(torch.int64, 2**40)],
)
def test_runs_are_the_uses_of_rows_by_examples_counted(most: int, dtype: torch.dtype) -> None:
    """Sorted by row, then by example, whichever way they are sorted."""
    generator = torch.Generator().manual_seed(most)
    index = torch.randint(0, 5, (6, 9), generator=generator).to(dtype)
    index[index == 4] = most
    index[0, 0] = most
    counts = Counter((int(row), i) for i, rows in enumerate(index) for row in rows)
    runs = count_rows(index)
    begins = [*runs.begins.tolist(), len(runs.owners)]
    found = [
        (row, runs.owners[j].item(), runs.times[j].item())
        for row, a, b in zip(runs.rows.tolist(), begins, begins[1:], strict=False)
        for j in range(a, b)
    ]
    assert found == [(row, i, times) for (row, i), times in sorted(counts.items())]
