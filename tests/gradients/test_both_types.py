"""A parameter that is used in its own type and in another one: the sums of the loop, and never an
error of types.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import LoopEngine

sys.path.insert(0, str(Path(__file__).parent))
from compared import Holding, distance

T, D, V = 5, 12, 7


class Model(Holding):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def tokens(batch: int) -> Tensor:
    return torch.randint(0, V, (batch, T))


def rows(batch: int) -> Tensor:
    return torch.randn(batch, T, D)


def images(batch: int) -> Tensor:
    return torch.randn(batch, 4, 9)


Case = tuple[Callable[[int], Tensor], Callable[[], Model]]

CASES: dict[str, Case] = {
    "head tied by a number": (
        tokens,
        lambda: Model(
            lambda m, x: F.linear(m.table(x), m.table.weight * 0.5), table=nn.Embedding(V, D)
        ),
    ),
    "head tied by a tensor without dimensions": (
        tokens,
        lambda: Model(
            lambda m, x: F.linear(
                m.table(x), m.table.weight * torch.tensor(0.5, dtype=torch.float64)
            ),
            table=nn.Embedding(V, D),
        ),
    ),
    "tied head": (
        tokens,
        lambda: Model(
            lambda m, x: F.linear(m.table(x).double(), m.table.weight.double()),
            table=nn.Embedding(V, D),
        ),
    ),
    "tied head in bfloat16": (
        tokens,
        lambda: Model(
            lambda m, x: F.linear(m.table(x).bfloat16(), m.table.weight.bfloat16()),
            table=nn.Embedding(V, D),
        ),
    ),
    "bag": (
        tokens,
        lambda: Model(
            lambda m, x: m.bag(x) + F.one_hot(x, V).sum(1).double() @ m.bag.weight.double(),
            bag=nn.EmbeddingBag(V, D, mode="mean"),
        ),
    ),
    "linear": (
        rows,
        lambda: Model(
            lambda m, x: (
                m.layer(x) + F.linear(x.double(), m.layer.weight.double()) * m.layer.bias.double()
            ),
            layer=nn.Linear(D, D),
        ),
    ),
    "linear, one position": (
        lambda batch: torch.randn(batch, D),
        lambda: Model(
            lambda m, x: m.layer(x) + F.linear(x.double(), m.layer.weight.double()),
            layer=nn.Linear(D, D),
        ),
    ),
    "convolution": (
        images,
        lambda: Model(
            lambda m, x: m.layer(x) + F.conv1d(x.double(), m.layer.weight.double(), padding=1),
            layer=nn.Conv1d(4, 6, 3, padding=1),
        ),
    ),
    "norm": (
        rows,
        lambda: Model(
            lambda m, x: (
                m.norm(x)
                + F.layer_norm(x.double(), (D,), m.norm.weight.double(), m.norm.bias.double())
            ),
            norm=nn.LayerNorm(D),
        ),
    ),
    "bare": (
        rows,
        lambda: Model(
            lambda m, x: x @ m.w + x.double() @ (m.w * torch.linspace(0, 1, D).double()) + m.w[0],
            w=torch.randn(D, D),
        ),
    ),
    "recurrent": (
        rows,
        lambda: Model(
            lambda m, x: (
                m.layer(x)[0] + F.linear(x.double(), m.layer.weight_ih_l0.double())[..., :4]
            ),
            layer=nn.GRU(D, 4, batch_first=True),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_loop(name: str) -> None:
    torch.manual_seed(0)
    draw, make = CASES[name]
    model = make()
    twin = copy.deepcopy(model)
    fast, slow = BookkeepingEngine(), LoopEngine()
    fast.attach(model)
    slow.attach(twin)
    for batch in (4, 3, 1):
        x = draw(batch)
        sums = []
        for engine, net in ((fast, model), (slow, twin)):
            out = net(x)
            losses = (
                (out - torch.linspace(-1, 1, out[0].numel()).view_as(out[0]))
                .square()
                .flatten(1)
                .mean(1)
            )
            sums.append(engine.bounded_sum(losses, FlatClip(0.3)).value)
        assert all(total.dtype is torch.float32 for total in sums[0].values())
        assert distance(*sums) < (2e-2 if "bfloat16" in name else 3e-4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_one_example_is_within_the_bound(name: str, size: float) -> None:
    draw, make = CASES[name]
    for seed in range(5):
        torch.manual_seed(seed)
        model, engine = make(), BookkeepingEngine()
        engine.attach(model)
        total = engine.bounded_sum(
            size * model(draw(1)).square().flatten(1).sum(1), FlatClip(0.3)
        ).value
        found = sum(float(t.double().square().sum()) for t in total.values()) ** 0.5
        assert 0.29 < found <= 0.3
