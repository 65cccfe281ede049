"""Wide residual networks (Zagoruyko & Komodakis 2016) that keep examples apart: group normalisation
and standardised weights in the place of batch normalisation (De et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpfy.core import check
from dpfy.core.errors import InvalidInput

Convolution = Callable[..., nn.Conv2d]
GROUPS = 16
EPSILON = 1e-6


class StandardisedConv2d(nn.Conv2d):
    """A convolution by weights of mean 0 and variance 1 / inputs in each filter, times a gain of
    each filter (Brock et al. 2021).

    Guarantees: a function of each image by itself.
    """

    def __init__(self, into: int, out: int, kernel: int, stride: int = 1) -> None:
        super().__init__(into, out, kernel, stride, kernel // 2, bias=False)
        self.gain = nn.Parameter(torch.ones(out))

    def forward(self, x: Tensor) -> Tensor:
        """The convolved images."""
        return functional.conv2d(x, self.scaled(), None, self.stride, self.padding)

    def scaled(self) -> Tensor:
        """The weights that images are convolved with."""
        flat = self.weight.flatten(1)
        standard = functional.layer_norm(flat, flat.shape[1:], eps=EPSILON)
        return (standard * (self.gain * flat.shape[1] ** -0.5).unsqueeze(1)).view_as(self.weight)


def plain(into: int, out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution by its weights as they are."""
    return nn.Conv2d(into, out, kernel, stride, kernel // 2, bias=False)


class ResidualUnit(nn.Module):
    """Two convolutions after normalisation, and what goes past them."""

    def __init__(self, into: int, out: int, stride: int, conv: Convolution) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(GROUPS, into), nn.GroupNorm(GROUPS, out)
        self.conv1, self.conv2 = conv(into, out, 3, stride), conv(out, out, 3)
        self.short = conv(into, out, 1, stride) if into != out else None

    def forward(self, x: Tensor) -> Tensor:
        """The images after the unit."""
        h = functional.relu(self.norm1(x))
        past = x if self.short is None else self.short(h)
        return past + self.conv2(functional.relu(self.norm2(self.conv1(h))))


class WideResNet(nn.Module):
    """WRN-`depth`-`width` for colour images with values from 0 to 1; the head starts at zero.

    Args:
        depth: Six times a whole number and four: 16 or 40.
        width: How many times 16 channels the first group has; 16-4 has 2.7 million parameters.
        classes: How many values the head gives for an image.
        standardised: Whether the weights of convolutions are standardised.

    Raises:
        InvalidInput: The depth is no such number.

    Guarantees: no layer mixes examples and none keeps statistics.

    Example:
        >>> import torch
        >>> from dpfy.models.wide_resnet import WideResNet
        >>> WideResNet(16, 4)(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, depth: int = 16, width: int = 4, classes: int = 10, *, standardised: bool = True
    ) -> None:
        super().__init__()
        check.integer("width", width)
        if check.integer("depth", depth, least=10) % 6 != 4:
            raise InvalidInput("depth", depth, "must be 6 times a whole number and 4: 10, 16, 40")
        into, groups, self.each = 16, [], (depth - 4) // 6
        conv: Convolution = StandardisedConv2d if standardised else plain
        self.stem = conv(3, into, 3)
        for group, channels in enumerate((16 * width, 32 * width, 64 * width)):
            units = []
            for position in range(self.each):
                units.append(ResidualUnit(into, channels, 2 if group and not position else 1, conv))
                into = channels
            groups.append(nn.Sequential(*units))
        self.groups = nn.ModuleList(groups)
        self.norm, self.head = nn.GroupNorm(GROUPS, into), nn.Linear(into, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Images (n, 3, height, width) to (n, classes)."""
        return self.head(self.maps(images)[-1].mean((2, 3)))

    def maps(self, images: Tensor) -> list[Tensor]:
        """What each of the three groups gives for `images`, the last one normalised."""
        return self.units(images)[self.each - 1 :: self.each]

    def units(self, images: Tensor) -> list[Tensor]:
        """What each unit gives for `images`, the last one normalised."""
        x = self.stem((images - 0.5) / 0.25)
        found = []
        for group in self.groups:
            for unit in group.children():
                x = unit(x)
                found.append(x)
        return [*found[:-1], functional.relu(self.norm(x))]


def folded(network: WideResNet) -> WideResNet:
    """The same function with plain convolutions: the standardised weights as they are now.

    Training goes on from there with a rule for every layer, at less cost a step.

    Args:
        network: One with standardised weights.

    Returns:
        A new network.

    Example:
        >>> import torch
        >>> from dpfy.models.wide_resnet import WideResNet, folded
        >>> network, images = WideResNet(10, 1), torch.rand(2, 3, 32, 32)
        >>> torch.allclose(network.maps(images)[-1], folded(network).maps(images)[-1], atol=1e-5)
        True
    """
    tensors = network.state_dict()
    for name, module in network.named_modules():
        if isinstance(module, StandardisedConv2d):
            tensors[f"{name}.weight"] = module.scaled().detach()
            del tensors[f"{name}.gain"]
    depth = 6 * network.each + 4
    classes, wide = network.head.weight.shape
    made = WideResNet(depth, wide // 64, classes, standardised=False)
    made.load_state_dict(tensors)
    return made
