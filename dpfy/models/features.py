"""Per-example features that no training changes: computed once, before the first step, one record
at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpfy.models.config import ModelConfig
from dpfy.models.scattering import CHANNELS, grid, scattering

CHUNK = 100


class ScatteringFeatures(nn.Module):
    """Scattering, normalised within groups of channels of each image, divided by a public constant,
    flattened.

    Guarantees: it has no parameters and no buffers; a row of the result depends on that row of the
    input alone.
    """

    def __init__(self, groups: int, scale: float) -> None:
        super().__init__()
        self.groups, self.scale = groups, scale

    def forward(self, images: Tensor) -> Tensor:
        """(n, 1, height, width) -> (n, channels * cells)."""
        return functional.group_norm(scattering(images), self.groups).flatten(1) / self.scale


def features(config: ModelConfig) -> Callable[[Tensor], Tensor] | None:
    """What to apply once to the first tensor of the records before training, or None when the model
    reads raw records.

    Guarantees: each row is mapped by itself with public constants, so adding or removing a record
    changes no other row and one record is still one unit.
    """
    if config.name != "scattering-linear":
        return None
    module = ScatteringFeatures(config.groups, config.scale)

    def apply(records: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([module(part) for part in torch.split(records, CHUNK)])

    return apply


def feature_shape(config: ModelConfig, raw: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one record after :func:`features`."""
    if config.name != "scattering-linear":
        return raw
    rows, columns = grid(raw)
    return (CHANNELS * rows * columns,)


def full_model(config: ModelConfig, head: nn.Module) -> nn.Module:
    """The model from raw records to logits: features (if any), then `head`, which is shared and not
    copied.
    """
    if config.name != "scattering-linear":
        return head
    return nn.Sequential(ScatteringFeatures(config.groups, config.scale), head)
