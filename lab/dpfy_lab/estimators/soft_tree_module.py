"""An ensemble of soft trees (Hazimeh et al. 2020) as a module, for training with a plan like any
model.

All weights are those of two linear layers, the splits of all nodes and the values of all leaves, so
that every engine knows the gradient of a single row. `dpfy.estimators.SoftTreeClassifier` fits the
same trees to tables, without torch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class SoftTrees(nn.Module):
    """So many trees of one depth over `width` features; their leaves add up to `outputs` scores.
    `seed` draws the first splits.
    """

    def __init__(self, width: int, outputs: int, trees: int, depth: int, seed: int = 0) -> None:
        super().__init__()
        self.trees, self.depth = trees, depth
        self.splits = nn.Linear(width, trees * (2**depth - 1))
        self.leaves = nn.Linear(trees * 2**depth, outputs, bias=False)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.splits.weight.copy_(
                torch.randn(self.splits.weight.shape, generator=draw) / math.sqrt(width)
            )
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


def smooth_step(scores: Tensor) -> Tensor:
    """0 below -1/2, 1 above 1/2, and between them the cubic that meets both smoothly."""
    part = scores.clip(-0.5, 0.5)
    return 0.5 + part * (1.5 - 2 * part * part)
