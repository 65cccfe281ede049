"""Coordinates that follow the shape of public data: the slow directions of a random walk between
nearest neighbours.

Records that many short steps join have nearly the same coordinates, so a handful of labelled
records tells classes apart that lie in different parts of the data. The map is learnt from public
records without labels alone (diffusion maps, Coifman & Lafon 2006); another record takes the mean
of the coordinates of its nearest public ones (Bengio et al. 2004).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfy.core import check
from dpfy.core.errors import InvalidInput

Reals = NDArray[np.float64]
AT_ONCE = 1000
SHARPNESS = 4.0
"""How fast weights fall with the squared distance, in that of the last neighbour."""


@dataclass(frozen=True)
class DiffusionSettings:
    """Principal components, whitened in part, in which neighbours are looked for; how many of them;
    how many directions are kept.

    `rest` weighs a direction by rest / (rest + what a step of the walk takes off it). The defaults
    were chosen on held-out training images (docs/decisions.md).
    """

    components: int = 200
    whitening: float = 0.7
    neighbours: int = 15
    directions: int = 100
    rest: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("components", "neighbours", "directions"):
            check.integer(f"diffusion.{name}", getattr(self, name), most=1 << 12)
        check.fraction("diffusion.whitening", self.whitening)
        check.positive("diffusion.rest", self.rest)
        check.integer("diffusion.seed", self.seed, least=0)


class DiffusionMap:
    """From features to coordinates, the slowest directions first: `own` are those of the public
    records that it was made of.

    Guarantees: it depends on the public features and the settings alone; coordinates of another
    record, on that record alone, up to the rounding of sums (see `pate.coordinates`, which sees to
    it that nobody's rounding follows the records of others).
    """

    def __init__(self, public: Tensor, settings: DiffusionSettings | None = None) -> None:
        held = settings or DiffusionSettings()
        if public.dim() != 2 or len(public) < 10 or not bool(torch.isfinite(public).all()):
            raise InvalidInput(
                "public",
                f"shape {tuple(public.shape)}",
                "must be at least 10 rows of finite numbers",
            )
        self.settings = held
        self._neighbours = min(held.neighbours, len(public) - 1)
        self._find_components(public.float())
        self._rows = self._spread(public.float())
        self.own = self._walked()

    def _find_components(self, public: Tensor) -> None:
        kept = min(self.settings.components, *public.shape)
        self._mean = public.mean(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            _, values, basis = torch.svd_lowrank(
                public - self._mean, q=min(kept + 10, *public.shape), niter=2
            )
        spread = (values[:kept].square() / len(public)).clamp(min=1e-12)
        self._basis = basis[:, :kept] * spread ** (-self.settings.whitening / 2)

    def _spread(self, features: Tensor) -> Tensor:
        rows = (features - self._mean) @ self._basis
        return rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)

    def _nearest(self, rows: Tensor, *, skip: int) -> tuple[Reals, NDArray[np.int64]]:
        """Weights and numbers of the nearest public records, leaving out the first `skip` (the
        record itself).
        """
        found = [
            (part @ self._rows.T).topk(self._neighbours + skip, dim=1)
            for part in rows.split(AT_ONCE)
        ]
        near = torch.cat([values[:, skip:] for values, _ in found])
        squares = (2 - 2 * near.double()).clamp(min=1e-6).numpy()
        return np.exp(-SHARPNESS * squares / squares[:, -1:]), torch.cat(
            [places[:, skip:] for _, places in found]
        ).numpy()

    def _walked(self) -> Reals:
        """The slow directions of the walk: eigenvectors of its symmetric form, brought back."""
        from scipy import sparse
        from scipy.sparse.linalg import eigsh

        count = len(self._rows)
        weights, places = self._nearest(self._rows, skip=1)
        at = np.repeat(np.arange(count), weights.shape[1]), places.ravel()
        joined = sparse.csr_matrix((weights.ravel(), at), shape=(count, count))
        joined = joined.maximum(joined.T)
        often = np.asarray(joined.sum(axis=1)).ravel()
        root = sparse.diags(often**-0.5)
        kept = min(self.settings.directions, count - 2)
        values, vectors = eigsh(root @ joined @ root, k=kept, which="LA", v0=np.ones(count))
        values, vectors = values[::-1], vectors[:, ::-1]
        weight = np.sqrt(self.settings.rest / (np.maximum(1 - values, 0) + self.settings.rest))
        return np.asarray(
            np.sqrt(often.mean() / often)[:, None] * vectors * np.sqrt(count) * weight
        )

    def of(self, features: Tensor) -> Reals:
        """Coordinates of other records."""
        weights, places = self._nearest(self._spread(features.float()), skip=0)
        weights /= weights.sum(axis=1, keepdims=True)
        return np.asarray(np.einsum("nk,nkd->nd", weights, self.own[places]))
