"""Clusters of public features: k-means with k-means++ (Arthur & Vassilvitskii 2007), from a fixed
seed.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROUNDS = 10
SAMPLE = 10_000
AT_ONCE = 4000


@torch.no_grad()
def clustered(features: Tensor, count: int, seed: int = 0) -> NDArray[np.int32]:
    """The cluster of each record, numbered from 0. Centres are found on a public sample of records,
    then all go to the nearest.
    """
    generator = torch.Generator().manual_seed(seed)
    sample = features[torch.randperm(len(features), generator=generator)[:SAMPLE]]
    centres = _seeded(sample, min(count, len(sample)), generator)
    for _ in range(ROUNDS):
        nearest = _nearest(sample, centres)
        sums = torch.zeros_like(centres).index_add_(0, nearest, sample)
        sizes = torch.bincount(nearest, minlength=len(centres))
        centres = torch.where(sizes[:, None] > 0, sums / sizes.clamp(min=1)[:, None], centres)
    found = _nearest(features, centres)
    return np.asarray(torch.unique(found, return_inverse=True)[1].numpy().astype(np.int32))


def _seeded(sample: Tensor, count: int, generator: torch.Generator) -> Tensor:
    chosen = [int(torch.randint(len(sample), (1,), generator=generator))]
    far = (sample - sample[chosen[0]]).square().sum(1)
    while len(chosen) < count:
        total = float(far.sum())
        weights = far if total > 0 else torch.ones_like(far)
        chosen.append(int(torch.multinomial(weights, 1, generator=generator)))
        far = torch.minimum(far, (sample - sample[chosen[-1]]).square().sum(1))
    return sample[chosen]


def _nearest(rows: Tensor, centres: Tensor) -> Tensor:
    return torch.cat([torch.cdist(part, centres).argmin(1) for part in rows.split(AT_ONCE)])
