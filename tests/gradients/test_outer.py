"""Linear layers with many positions and few rows or columns: their products are made once, by the
shapes of one example alone.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import LoopEngine
from dpfy.gradients.per_example.outer import Outer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_narrow_layers_are_kept(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(3, 64, 2).to(dtype), torch.randn(3, 64, 16).to(dtype)
    part = Outer(left, right)
    expected = torch.einsum("bto,bti->boi", left.double(), right.double())
    assert part.kept().grads.dtype == torch.float32
    assert float((part.kept().grads - expected).abs().max()) < 1e-4
    for many in (1, 2, 1000):  # by the shapes of one example alone
        assert Outer(left[:1].expand(many, -1, -1), right[:1].expand(many, -1, -1)).keeps
        wide = torch.zeros(1, 64, 512).expand(many, -1, -1)
        assert not Outer(wide, wide).keeps


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_narrow_layers_equal_the_loop(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Linear(64, 2, bias=False), nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
        .cuda()
        .double()
    )
    x = torch.randn(5, 96, 64, device="cuda", dtype=torch.float64)

    def total(engine: Any, model: nn.Module, x: Tensor) -> Tensor:
        engine.attach(model)
        try:
            for _ in range(2):
                sums = engine.bounded_sum(
                    model(x).float().square().mean((1, 2)).double(), FlatClip(0.01)
                ).value
        finally:
            engine.detach()
        return torch.cat([g.flatten().double() for g in sums.values()])

    expected = total(LoopEngine(), model, x)
    found = total(BookkeepingEngine(), model.to(dtype), x.to(dtype))
    most = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1}[dtype]
    assert float((found - expected).norm()) <= most * float(expected.norm())


class Normalised(nn.Module):
    """Attention without an output bias, whose keys are normalised: at zero rows their gradients are
    1e12 times as large.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(16, 16, bias=False), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        keys = nn.functional.normalize(self.keys(x), dim=-1)
        return ((keys @ keys.mT).softmax(-1) @ self.values(x)).mean(1)


@pytest.mark.parametrize("positions", [12, 200])  # products written out, and Gram matrices
def test_padding_with_large_gradients_does_not_clip_the_update_to_nothing(positions: int) -> None:
    torch.manual_seed(0)
    model, x = Normalised(), torch.randn(6, positions, 16)
    x[:, positions // 2 :] = 0
    sums = []
    for engine in (BookkeepingEngine(), LoopEngine()):
        engine.attach(model)
        for _ in range(2):
            found = engine.bounded_sum(model(x).square().sum(1), FlatClip(1.0)).value
        engine.detach()
        sums.append(torch.cat([g.flatten().double() for g in found.values()]))
    assert float(sums[1].norm()) > 0.1
    assert float((sums[0] - sums[1]).norm()) < 1e-4 * float(sums[1].norm())


class Convolved(Normalised):
    """The same by a convolution, whose bound is no sum over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Conv1d(16, 16, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        keys = nn.functional.normalize(self.keys(x.mT).mT, dim=-1)
        return ((keys @ keys.mT).softmax(-1) @ self.values(x)).mean(1)


def test_an_update_that_is_lost_to_rounding_is_told_of() -> None:
    """Once, with the layer's name, and not where the engine or the precision needs no such bound."""
    torch.manual_seed(0)
    x = torch.randn(6, 12, 16)
    x[:, 6:] = 0

    def told(engine: Any, model: nn.Module, x: Tensor) -> list[str]:
        engine.attach(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                engine.bounded_sum(model(x).square().sum(1), FlatClip(1.0))
        engine.detach()
        return [str(each.message) for each in caught if each.category is not ResourceWarning]

    found = told(BookkeepingEngine(), Convolved(), x)
    assert len(found) == 1
    assert "keys.weight" in found[0]
    assert "engine='loop'" in found[0]
    assert not told(LoopEngine(), Convolved(), x)
    assert not told(BookkeepingEngine(), Convolved(), torch.randn(6, 12, 16))
    assert not told(BookkeepingEngine(), Normalised(), x)


@pytest.mark.parametrize(("positions", "width"), [(5, 7), (300, 4)])
def test_the_bound_of_norms_holds_where_positions_differ_by_many_orders_of_magnitude(
    positions: int, width: int
) -> None:
    torch.manual_seed(1)
    for _ in range(200):
        left, right = (
            torch.randn(3, positions, width) * 10.0 ** torch.empty(3, positions, 1).uniform_(-9, 9)
            for _ in range(2)
        )
        part = Outer(left, right)
        upper = part.measured()[0][0].sqrt()
        exact = torch.einsum("bto,bti->boi", left.double(), right.double()).flatten(1)
        made = torch.stack(
            [part.weighted_sum(torch.eye(3)[k]).double().flatten() for k in range(3)]
        )
        assert bool((upper * 1.0001 >= exact.norm(dim=1)).all())
        assert bool((upper * 1.0001 >= made.norm(dim=1)).all())
        assert bool((upper <= exact.norm(dim=1) * 2).all())
