"""Features made rounder by their moments: centred and partly whitened, channels and places apart,
then of length one.

A linear model on features of length one feels the noise of private training through that length
alone, not through their number. So whatever moves the length from what all images share to what
tells them apart is worth the same as more data. The moments are computed from the records: they
have to be released with noise, and billed, before they may be used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BOUND = math.sqrt(3) * (1 + 2.0**-12)
"""L2 norm of what one record of length one adds to `sums`: one for each of its three parts, and
room for rounding.
"""

FLOOR = 3.0
"""Eigenvalues below this many times the largest one that noise alone gives are lifted to it."""


def unit(features: Tensor) -> Tensor:
    """Each record divided by its own length."""
    lengths = features.flatten(1).norm(dim=1).clamp(min=1e-12)
    return features / lengths.view(-1, *[1] * (features.dim() - 1))


def sums(features: Tensor, chunk: int = 5000) -> dict[str, Tensor]:
    """Sums over records (n, channels, places) of the record, of its channels' second moments and of
    its places' second moments.

    Guarantees: a record of length one adds a vector of length at most `BOUND`: symmetric matrices
    are given by their upper triangle with everything off the diagonal multiplied by sqrt(2), which
    keeps the Frobenius norm.
    """
    total: dict[str, Tensor] = {}
    for part in features.split(chunk):
        part = part.float()
        values = {
            "mean": part.sum(0),
            "channels": _packed(torch.einsum("ncp,ndp->cd", part, part)),
            "places": _packed(torch.einsum("ncp,ncq->pq", part, part)),
        }
        total = {name: value + total[name] if total else value for name, value in values.items()}
    return total


@dataclass(frozen=True)
class Whitening:
    """A map of one record (channels, places) to a vector of length one: less `mean`, times
    `channels`, times `places`.
    """

    mean: Tensor
    channels: Tensor
    places: Tensor

    @classmethod
    def from_sums(
        cls, noisy: dict[str, Tensor], records: int, power: float, noise: float
    ) -> Whitening:
        """From the noisy sums, the public number of records and the standard deviation `noise` of
        each value in the sums.

        `power` 0 only centres, 1 whitens fully. Post-processing of a release: it costs nothing.
        """
        mean = noisy["mean"] / records
        channels, places = (_unpacked(noisy[name]) / records for name in ("channels", "places"))
        lift = FLOOR * math.sqrt(2) * noise / records
        return cls(
            mean,
            _power(channels - mean @ mean.T, -power / 2, lift * math.sqrt(len(channels))),
            _power(places - mean.T @ mean, -power / 2, lift * math.sqrt(len(places))),
        )

    def __call__(self, features: Tensor, chunk: int = 5000) -> Tensor:
        """(n, channels, places) -> (n, channels * places), each row by itself."""
        parts = [
            unit((self.channels @ (part - self.mean) @ self.places).flatten(1))
            for part in features.split(chunk)
        ]
        return torch.cat(parts)


@dataclass(frozen=True)
class RandomFeatures:
    """Cosines of random projections less the part that is the same for all: a Gaussian kernel
    without its constant.

    Public and fixed by `seed`. `width` is the width of the kernel for records of length one; small
    widths bend more.
    """

    count: int
    width: float
    seed: int = 0

    def __call__(self, features: Tensor, chunk: int = 10000) -> Tensor:
        """(n, d) rows of length one -> (n, count) rows of length one, each row by itself."""
        generator = torch.Generator().manual_seed(self.seed)
        directions = (
            torch.randn(features.shape[1], self.count, generator=generator).to(features.device)
            / self.width
        )
        phases = (torch.rand(self.count, generator=generator) * 2 * math.pi).to(features.device)
        shared = math.exp(-0.5 / self.width**2) * phases.cos()
        return torch.cat(
            [unit((part @ directions + phases).cos_() - shared) for part in features.split(chunk)]
        )


def _packed(matrix: Tensor) -> Tensor:
    rows, columns = torch.triu_indices(len(matrix), len(matrix), device=matrix.device)
    return matrix[rows, columns] * torch.where(rows == columns, 1.0, math.sqrt(2))


def _unpacked(values: Tensor) -> Tensor:
    size = (math.isqrt(8 * len(values) + 1) - 1) // 2
    rows, columns = torch.triu_indices(size, size, device=values.device)
    matrix = values.new_zeros(size, size)
    matrix[rows, columns] = values * torch.where(rows == columns, 1.0, math.sqrt(0.5))
    return matrix + matrix.triu(1).T


def _power(matrix: Tensor, exponent: float, least: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix.double())
    return ((vectors * values.clamp(min=max(least, 1e-12)) ** exponent) @ vectors.T).to(
        matrix.dtype
    )
