"""Convolutional networks of the step benchmark with depthwise, grouped or transposed
convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class NextBlock(nn.Module):
    """Depthwise 7 x 7, then two linear layers with the channels last, scaled by a bare
    parameter.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.norm = (
            nn.Conv2d(width, width, 7, padding=3, groups=width),
            nn.LayerNorm(width),
        )
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.mix(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(h)))).permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """ConvNeXt, by default the tiny one."""

    def __init__(
        self,
        depths: Sequence[int] = (3, 3, 9, 3),
        widths: Sequence[int] = (96, 192, 384, 768),
        classes: int = 100,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0])]
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            if stage:
                layers += [
                    ChannelNorm(widths[stage - 1]),
                    nn.Conv2d(widths[stage - 1], width, 2, 2),
                ]
            layers += [NextBlock(width) for _ in range(depth)]
        self.body, self.norm, self.head = (
            nn.Sequential(*layers),
            nn.LayerNorm(widths[-1]),
            nn.Linear(widths[-1], classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x).mean((2, 3))))


def convolved(
    into: int, out: int, kernel: int, stride: int = 1, groups: int = 1, act: bool = True
) -> list[nn.Module]:
    """Convolution and GroupNorm, and an activation."""
    made = [
        nn.Conv2d(into, out, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.GroupNorm(8, out),
    ]
    return [*made, nn.ReLU6(inplace=True)] if act else made


class Inverted(nn.Module):
    """An inverted residual: wider by 1 x 1, depthwise 3 x 3, narrower by 1 x 1."""

    def __init__(self, into: int, out: int, stride: int, wider: int) -> None:
        super().__init__()
        wide = wider * into
        first = convolved(into, wide, 1) if wider > 1 else []
        self.body = nn.Sequential(
            *first, *convolved(wide, wide, 3, stride, wide), *convolved(wide, out, 1, act=False)
        )
        self.residual = stride == 1 and into == out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


TINY = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""MobileNetV2 for 32 x 32 images: how much wider inside, channels, blocks, stride."""

SMALL = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 2, 2), (6, 64, 2, 1))
"""A short one, for a CPU."""


class MobileNet(nn.Module):
    """MobileNetV2 with GroupNorm."""

    def __init__(
        self, plan: Sequence[tuple[int, int, int, int]] = TINY, last: int = 1280, classes: int = 10
    ) -> None:
        super().__init__()
        layers, into = convolved(3, 32, 3), 32
        for wider, out, count, stride in plan:
            for i in range(count):
                layers.append(Inverted(into, out, stride if i == 0 else 1, wider))
                into = out
        self.body, self.head = (
            nn.Sequential(*layers, *convolved(into, last, 1)),
            nn.Linear(last, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class UNet(nn.Module):
    """A U-Net with GroupNorm: down by pooling, up by transposed convolutions, one value per pixel
    and class.
    """

    def __init__(self, widths: Sequence[int] = (64, 128, 256, 512), classes: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._pair(a, b) for a, b in pairwise((3, *widths))])
        self.up = nn.ModuleList([nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths)])
        self.join = nn.ModuleList([self._pair(2 * a, a) for a in widths[:-1]])
        self.head = nn.Conv2d(widths[0], classes, 1)

    @staticmethod
    def _pair(into: int, out: int) -> nn.Sequential:
        return nn.Sequential(*convolved(into, out, 3), *convolved(out, out, 3))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for i, step in enumerate(self.down):
            x = step(x if i == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for i in reversed(range(len(self.up))):
            x = self.join[i](torch.cat([kept[i], self.up[i](x)], 1))
        return self.head(x)
