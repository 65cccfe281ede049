"""Convolutional networks as model collections build them, with GroupNorm: exact, and without a pass
per example.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfy.gradients.checker import check_model
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import LoopEngine
from dpfy.models.repair import repair

CLASSES = 5


class GroupNorm(nn.GroupNorm):
    """A subclass with its own forward, as collections have it for mixed precision."""

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(
            x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps
        )
        return x.permute(0, 3, 1, 2)


class Standardised(nn.Conv2d):
    """A convolution with standardised weights."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(
            self.weight
        )
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Bottleneck(nn.Module):
    """A residual block with squeeze-and-excitation."""

    def __init__(
        self, into: int, out: int, stride: int, norm: type[nn.GroupNorm], conv: type[nn.Conv2d]
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(into, out, 1, bias=False), norm(2, out)
        self.conv2, self.bn2 = conv(out, out, 3, stride, 1, groups=2, bias=False), norm(2, out)
        self.conv3, self.bn3 = conv(out, out, 1, bias=False), norm(2, out)
        self.squeeze, self.excite = nn.Conv2d(out, 2, 1), nn.Conv2d(2, out, 1)
        self.downsample = nn.Sequential(conv(into, out, 1, stride, bias=False), norm(2, out))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)), inplace=True)
        h = self.bn3(self.conv3(F.relu(self.bn2(self.conv2(h)), inplace=True)))
        h = h * self.excite(F.relu(self.squeeze(h.mean((2, 3), keepdim=True)))).sigmoid()
        return F.relu(h + self.downsample(x))


def resnet(norm: type[nn.GroupNorm] = nn.GroupNorm, conv: type[nn.Conv2d] = nn.Conv2d) -> nn.Module:
    stem = [
        conv(3, 8, 3, 2, 1, bias=False),
        norm(2, 8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    blocks = [Bottleneck(8, 8, 1, norm, conv), Bottleneck(8, 12, 2, norm, conv)]
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, CLASSES)
    )


class NextBlock(nn.Module):
    """Depthwise convolution, norm over channels, perceptron, learnt scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = (
            nn.Conv2d(width, width, 5, padding=2, groups=width),
            nn.LayerNorm(width),
        )
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gamma = nn.Parameter(0.5 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.down(F.gelu(self.up(h))).permute(0, 3, 1, 2)
        return x + h.mul(self.gamma.reshape(1, -1, 1, 1))


def convnext() -> nn.Module:
    stem = [
        nn.Conv2d(3, 6, 4, 4),
        LayerNorm2d(6),
        NextBlock(6),
        LayerNorm2d(6),
        nn.Conv2d(6, 8, 2, 2),
        NextBlock(8),
    ]
    return nn.Sequential(
        *stem, nn.AdaptiveAvgPool2d(1), LayerNorm2d(8), nn.Flatten(), nn.Linear(8, CLASSES)
    )


def converted() -> nn.Module:
    """BatchNorm replaced by the converter."""
    body = [
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.SiLU(),
        nn.Conv2d(6, 6, 3, 2, groups=6),
    ]
    return repair(
        nn.Sequential(*body, nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(6 * 7 * 7, CLASSES))
    ).model


MODELS = {
    "resnet": resnet,
    "resnet with its own norms": lambda: resnet(GroupNorm),
    "resnet with standardised weights": lambda: resnet(nn.GroupNorm, Standardised),
    "convnext": convnext,
    "converted": converted,
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_loop_and_trains(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double().train()
    check_model(model)
    oracle = copy.deepcopy(model)
    fast, loop = BookkeepingEngine(), LoopEngine()
    fast.attach(model)
    loop.attach(oracle)
    x, y = torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.arange(4)
    for clip in (FlatClip(0.1), FlatClip(math.inf)):
        expected = loop.bounded_sum(F.cross_entropy(oracle(x), y, reduction="none"), clip).value
        for _ in range(2):
            found = fast.bounded_sum(F.cross_entropy(model(x), y, reduction="none"), clip).value
        gap = math.sqrt(sum(float((found[k] - expected[k]).square().sum()) for k in expected))
        assert gap < 1e-9 * math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    first = float(F.cross_entropy(model(x), y).detach())
    for _ in range(20):
        for p, g in zip(
            model.parameters(),
            fast.bounded_sum(F.cross_entropy(model(x), y, reduction="none"), clip).value.values(),
        ):
            p.grad = g / len(x)
        optimizer.step()
    assert float(F.cross_entropy(model(x), y).detach()) < 0.7 * first


def test_norms_with_their_own_forward_are_not_taken_apart_example_by_example() -> None:
    model = resnet(GroupNorm)
    fast = BookkeepingEngine()
    fast.attach(model)
    fast.bounded_sum(
        F.cross_entropy(model(torch.randn(4, 3, 16, 16)), torch.arange(4), reduction="none"),
        FlatClip(1.0),
    )
    assert fast.sums.untracked
    assert not fast._suspects
