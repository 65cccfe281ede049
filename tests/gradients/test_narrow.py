"""Narrow types: what one example can change in the sum stays within the bound, because sums are
made wide before the noise.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.choice import ENGINES

BATCH, CLIP = 256, 1.0


def model(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if kind == "linear":
        return nn.Linear(24, 3), torch.randn(1, 24).expand(BATCH, 24).clone()
    if kind == "sequence":
        return nn.Sequential(
            nn.Linear(6, 5), nn.LayerNorm(5), nn.Flatten(), nn.Linear(20, 3)
        ), torch.randn(1, 4, 6).expand(BATCH, 4, 6).clone()
    if kind == "embedding":
        return nn.Sequential(nn.Embedding(7, 5), nn.Flatten(), nn.Linear(20, 3)), torch.randint(
            0, 7, (1, 4)
        ).expand(BATCH, 4).clone()
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 3)), torch.randn(
        1, 1, 6, 6
    ).expand(BATCH, 1, 6, 6).clone()


@pytest.mark.parametrize("engine", ["loop", "batched", "bookkeeping"])
@pytest.mark.parametrize("kind", ["linear", "sequence", "embedding", "convolution"])
def test_one_example_moves_a_bfloat16_sum_by_at_most_the_bound(engine, kind):
    """All examples alike, so that the sum is as long as it can be: rounding it to bfloat16 would
    move it by more than the bound.
    """
    net, x = model(kind)
    net = net.to(torch.bfloat16)
    x = x.to(torch.bfloat16) if x.is_floating_point() else x
    runner = ENGINES[engine]()
    runner.attach(net)
    sums = []
    for kept in (BATCH, BATCH - 1):
        mask = torch.arange(BATCH) < kept
        losses = net(x).float().square().sum(1) * 100
        total = runner.bounded_sum(losses, FlatClip(CLIP), mask)
        assert all(v.dtype == torch.float32 for v in total.value.values())
        sums.append(torch.cat([v.flatten() for v in total.value.values()]).double())
    runner.detach()
    moved = float((sums[0] - sums[1]).norm())
    assert 0.9 * CLIP < moved <= CLIP * (1 + 1e-4)
    rounded = float((sums[0].bfloat16() - sums[1].bfloat16()).double().norm())
    assert rounded > CLIP * 1.02 or rounded < CLIP * 0.95  # what rounding first would have done


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("products", [False, True])
def test_convolutions_in_tf32_keep_the_bound_whichever_switch_is_on(products):
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = products, True
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.Flatten(),
        nn.Linear(64 * 36, 4),
    )
    model.cuda()
    engine = BookkeepingEngine()
    engine.attach(model)
    x, y = torch.randn(64, 3, 8, 8, device="cuda"), torch.randint(0, 4, (64,), device="cuda")
    for i in range(64):
        mask = torch.arange(64, device="cuda") == i
        losses = F.cross_entropy(model(x), y, reduction="none") * 100
        total = engine.bounded_sum(losses, FlatClip(1.0), mask).value
        length = sum(float(t.double().square().sum()) for t in total.values()) ** 0.5
        assert 0.97 < length <= 1.0
