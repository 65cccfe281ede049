"""An ensemble of soft trees (Hazimeh et al. 2020): every split sends a row to both sides, by shares that a smooth step gives.

All weights are those of two linear layers, the splits of all nodes and the values of all leaves, so that every engine knows the
gradient of a single row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Floats = NDArray[np.float64]


class SoftTrees(nn.Module):
    """So many trees of one depth over `width` features; their leaves add up to `outputs` scores.

    `facts` are public, and are kept beside the weights.
    """

    facts: Tensor

    def __init__(self, width: int, outputs: int, trees: int, depth: int, seed: int = 0, facts: bytes = b"") -> None:
        super().__init__()
        self.trees, self.depth = trees, depth
        self.register_buffer("facts", torch.tensor(list(facts), dtype=torch.uint8))
        self.splits = nn.Linear(width, trees * (2**depth - 1))
        self.leaves = nn.Linear(trees * 2**depth, outputs, bias=False)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.splits.weight.copy_(torch.randn(self.splits.weight.shape, generator=draw) / math.sqrt(width))
            self.splits.bias.copy_(torch.randn(self.splits.bias.shape, generator=draw) / 4)
            self.leaves.weight.zero_()

    def forward(self, rows: Tensor) -> Tensor:
        """Scores [rows, outputs]."""
        right = smooth_step(self.splits(rows)).view(len(rows), self.trees, 2**self.depth - 1)
        reached = torch.ones_like(right[:, :, :1])
        for level in range(self.depth):
            mine = right[:, :, 2**level - 1 : 2 ** (level + 1) - 1]
            reached = torch.stack([reached * (1 - mine), reached * mine], dim=3).flatten(2)
        found: Tensor = self.leaves(reached.flatten(1))
        return found


def smooth_step(scores: Any) -> Any:
    """0 below -1/2, 1 above 1/2, and between them the cubic that meets both smoothly. Of tensors and arrays."""
    part = scores.clip(-0.5, 0.5)
    return 0.5 + part * (1.5 - 2 * part * part)


def scores(rows: Floats, weights: Mapping[str, Floats], trees: int, depth: int) -> Floats:
    """What the module of these weights says, without torch."""
    right = smooth_step(rows @ weights["splits.weight"].T + weights["splits.bias"]).reshape(len(rows), trees, -1)
    reached = np.ones((len(rows), trees, 1))
    for level in range(depth):
        mine = right[:, :, 2**level - 1 : 2 ** (level + 1) - 1]
        reached = np.stack([reached * (1 - mine), reached * mine], axis=3).reshape(len(rows), trees, -1)
    return np.asarray(reached.reshape(len(rows), -1) @ weights["leaves.weight"].T)
