"""Linear layers with many positions and few rows or columns: their products are made once, by the
shapes of one example alone.
"""

from __future__ import annotations

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
