"""A captured step gives the sums of an ordinary one: graphs on a CUDA device, the fallback
everywhere.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfy.core.errors import Unsupported
from dpfy.gradients.clip import FlatClip, PerLayerClip, QuantileClip
from dpfy.gradients.cuda_graphs.captured import WARM, CapturedSum
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import LoopEngine

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
BATCH = 12


class Mixed(nn.Module):
    """Convolution, GroupNorm, linear layers with and without positions, LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.mix, self.after, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        return self.head(self.after(self.mix(h)).mean(1))


def batch(device: str, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, 1, 6, 6, generator=g).to(device), torch.randint(
        0, 5, (BATCH,), generator=g
    ).to(device)


def setup(device: str) -> tuple[nn.Module, BookkeepingEngine, CapturedSum]:
    torch.manual_seed(0)
    model, engine = Mixed().to(device), BookkeepingEngine()
    engine.attach(model)
    return (
        model,
        engine,
        CapturedSum(engine, lambda x, y: F.cross_entropy(model(x), y, reduction="none")),
    )


def reference(
    model: nn.Module, x: Tensor, y: Tensor, clip: FlatClip, mask: Tensor | None
) -> dict[str, Tensor]:
    import copy

    twin, loop = copy.deepcopy(model), LoopEngine()
    loop.attach(twin)
    return loop.bounded_sum(F.cross_entropy(twin(x), y, reduction="none"), clip, mask).value


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "clip", [FlatClip(0.1), PerLayerClip(0.2), QuantileClip(0.3)], ids=lambda c: type(c).__name__
)
def test_every_call_equals_the_oracle_while_weights_and_masks_change(
    device: str, clip: FlatClip
) -> None:
    model, _, captured = setup(device)
    for i in range(WARM + 4):
        x, y = batch(device, i)
        mask = None if i % 2 else torch.arange(BATCH, device=device) % 3 > 0
        found = captured((x, y), clip, mask).value
        for name, value in reference(model, x, y, clip, mask).items():
            torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-6)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01 * torch.randn_like(p))


@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_example_adds_nothing_and_spoils_nobody(device: str) -> None:
    model, _, captured = setup(device)
    clip = FlatClip(0.1)
    for i in range(WARM + 2):
        x, y = batch(device, i)
        if i >= WARM:
            x[3] = float("inf")
            x[5] = float("nan")
        found = captured((x, y), clip, None).value
    good = torch.ones(BATCH, dtype=torch.bool, device=device)
    good[[3, 5]] = False
    clean = torch.where(good[:, None, None, None], x, 0.0)
    for name, value in reference(model, clean, y, clip, good).items():
        torch.testing.assert_close(found[name], value, rtol=5e-3, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_another_shape_or_rule_is_no_trouble(device: str) -> None:
    model, _, captured = setup(device)
    for i, (rows, clip) in enumerate(
        [(BATCH, FlatClip(0.1))] * 5 + [(7, FlatClip(0.1))] * 5 + [(7, FlatClip(9.0))] * 5
    ):
        x, y = (t[:rows] for t in batch(device, i))
        found = captured((x, y), clip, None)
        assert found.bound == clip.bound
        for name, value in reference(model, x, y, clip, None).items():
            torch.testing.assert_close(found.value[name], value, rtol=5e-3, atol=1e-5)


def test_other_engines_are_refused() -> None:
    with pytest.raises(Unsupported, match="engine loop"):
        CapturedSum(LoopEngine(), lambda x: x)
