"""Public features made ready for few, noisy sums: principal components, whitened in part, and a
Gaussian kernel between them.

All of it is learnt from features alone, which are public where only labels are protected, and from
a fixed seed. A kernel that is whitened in part spreads what tells records apart over many
directions of equal length: so a sum along each of them feels its noise least.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from dpfy.core import check
from dpfy.core.errors import InvalidInput

CHUNK = 4000
HELD_OUT = 5
"""One record in so many foretells the penalty of a regression."""


@dataclass(frozen=True)
class KernelSettings:
    """How many components the kernel reads (`near`) and the linear part (`wide`), how many
    `landmarks` stand for all records, how many `directions` are kept, and the `width` of the kernel
    for records of length one. `whitening` 0 leaves components as they are, 1 makes all of one
    length.
    """

    near: int = 300
    wide: int = 700
    landmarks: int = 2000
    directions: int = 1200
    width: float = 0.6
    whitening: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("near", "wide", "landmarks", "directions"):
            check.integer(f"kernel.{name}", getattr(self, name), most=1 << 16)
        check.positive("kernel.width", self.width)
        check.fraction("kernel.whitening", self.whitening)
        check.integer("kernel.seed", self.seed, least=0)


class PublicMap(nn.Module):
    """A map of features to two groups of coordinates: `curved`, kernel directions ordered by
    variance, and `straight`, linear ones.

    Guarantees: it depends on the features that it was made of and on its settings alone; a row of
    what it gives, on that row alone.
    """

    mean: Tensor
    components: Tensor
    spread: Tensor
    landmarks: Tensor
    weights: Tensor
    centre: Tensor
    middle: Tensor
    variances: Tensor

    def __init__(
        self, settings: KernelSettings, width: int, landmarks: int, sizes: tuple[int, int, int]
    ) -> None:
        super().__init__()
        self.settings, (self.near, self.wide, self.directions) = settings, sizes
        shapes = {
            "mean": (width,),
            "components": (width, self.wide),
            "spread": (self.wide,),
            "landmarks": (landmarks, self.near),
        }
        shapes |= {
            "weights": (landmarks, self.directions),
            "centre": (self.directions,),
            "middle": (self.wide,),
        }
        for name, shape in (shapes | {"variances": (self.directions,)}).items():
            self.register_buffer(name, torch.zeros(shape))

    @classmethod
    def of(cls, features: Tensor, settings: KernelSettings) -> PublicMap:
        """The map that features (n, d), finite numbers, ask for."""
        if features.dim() != 2 or len(features) < 2 or not features.dtype.is_floating_point:
            raise InvalidInput(
                "features",
                f"{features.dtype} {tuple(features.shape)}",
                "must be real numbers, a row for each of 2 records or more",
            )
        if not bool(torch.isfinite(features).all()):
            raise InvalidInput("features", "values that are not finite", "must be finite numbers")
        n, width = features.shape
        generator = torch.Generator().manual_seed(settings.seed)
        order = torch.randperm(n, generator=generator)
        landmarks = min(settings.landmarks, n)
        wide = min(settings.wide, width, n - 1)
        sizes = (min(settings.near, wide), wide, min(settings.directions, landmarks))
        made = cls(settings, width, landmarks, sizes)
        made._find_components(features[order[: max(4 * landmarks, 2000)]])
        made._find_kernel(features, order)
        return made

    def _find_components(self, sample: Tensor) -> None:
        self.mean.copy_(sample.mean(0))
        centred = sample - self.mean
        values, vectors = torch.linalg.eigh(centred.T @ centred / len(sample))
        kept = values.flip(0)[: self.wide].clamp(min=1e-7 * float(values[-1].clamp(min=1e-12)))
        self.components.copy_(vectors.flip(1)[:, : self.wide])
        self.spread.copy_(kept.sqrt())

    def _find_kernel(self, features: Tensor, order: Tensor) -> None:
        """Kernel principal components by landmarks (Nyström): coordinates whose products are the
        kernel, then their main directions.
        """
        count = len(self.landmarks)
        scores = self._scores(features[order[: max(4 * count, 2000)]])
        self.landmarks.copy_(self._near(scores[:count]))
        values, vectors = torch.linalg.eigh(self._kernel(self.landmarks))
        root = vectors * values.clamp(min=1e-5 * float(values[-1])).rsqrt()
        rows = self._kernel(self._near(scores)) @ root
        middle = rows.mean(0)
        spread, turn = torch.linalg.eigh((rows - middle).T @ (rows - middle) / len(rows))
        self.variances.copy_(spread.flip(0)[: self.directions].clamp(min=1e-10))
        self.weights.copy_(root @ turn.flip(1)[:, : self.directions])
        self.centre.copy_(middle @ turn.flip(1)[:, : self.directions])
        self.middle.copy_(self._straight(scores).mean(0))

    def _scores(self, features: Tensor) -> Tensor:
        return (features - self.mean) @ self.components

    def _near(self, scores: Tensor) -> Tensor:
        return _unit(scores[:, : self.near] * self.spread[: self.near] ** -self.settings.whitening)

    def _straight(self, scores: Tensor) -> Tensor:
        return _unit(scores * self.spread**-LINEAR_WHITENING) * LINEAR_WEIGHT

    def _kernel(self, rows: Tensor) -> Tensor:
        return (rows @ self.landmarks.T).sub_(1).mul_(1 / self.settings.width**2).exp_()

    def forward(self, features: Tensor) -> Tensor:
        """(n, d) -> (n, directions + wide): curved coordinates, then straight ones, all about
        centred.
        """
        scores = self._scores(features)
        curved = self._kernel(self._near(scores)) @ self.weights - self.centre
        return torch.cat([curved, self._straight(scores) - self.middle], dim=1)

    @torch.no_grad()
    def mapped(self, features: Tensor) -> Tensor:
        """The same for many records, a part at a time."""
        found = features.new_empty(len(features), self.directions + self.wide)
        for start in range(0, len(features), CHUNK):
            found[start : start + CHUNK] = self(features[start : start + CHUNK])
        return found

    def directed(self, rows: Tensor, count: int, whitening: float) -> Tensor:
        """The `count` first curved coordinates of what the map gave, whitened in part, each record
        of length one (a little less).
        """
        weights = self.variances[:count] ** (-whitening / 2)
        return _unit(rows[:, :count] * weights) * (1 - 2.0**-20)


@dataclass(repr=False)
class PreparedFeatures:
    """A map, what it gives for all records, and the products of its columns: all public, and made
    once for many fits.
    """

    public: PublicMap
    rows: Tensor
    gram: Tensor

    @classmethod
    def of(cls, features: Tensor, settings: KernelSettings) -> PreparedFeatures:
        """For these features."""
        flat = features.flatten(1)
        public = PublicMap.of(flat, settings)
        rows = public.mapped(flat)
        return cls(public, rows, rows.T @ rows)

    @cached_property
    def split(self) -> HeldOutSplit:
        """The division of all rows by which a penalty is chosen."""
        return HeldOutSplit.of(self.rows, self.gram)


@dataclass(frozen=True, repr=False)
class HeldOutSplit:
    """One record in five is held out: its rows, and the eigenvalues and vectors of the products of
    the others.
    """

    held: Tensor
    values: Tensor
    vectors: Tensor
    turned: Tensor

    @classmethod
    def of(cls, rows: Tensor, gram: Tensor) -> HeldOutSplit:
        """Of rows, with their products."""
        held = torch.arange(0, len(rows), HELD_OUT)
        part = rows[held]
        values, vectors = torch.linalg.eigh(gram - part.T @ part)
        return cls(held, values.clamp(min=0), vectors, part @ vectors)


LINEAR_WHITENING = 0.7
LINEAR_WEIGHT = 0.7
"""Of the linear part, beside the kernel's: chosen on held-out training images
(docs/decisions.md).
"""


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)
