"""Recipes with correlated noise: banded matrix factorization, BLT, and DP-FTRL with a tree."""

from __future__ import annotations

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import EXAMPLE, Adjacency, Unit
from dpfy.gradients.clip import FlatClip
from dpfy.noise.strategy import Strategy
from dpfy.noise.tree import Tree
from dpfy.plan.recipe import FLOAT, Recipe, step_count, steps_per_epoch
from dpfy.sampling.samplers import CyclicPoissonSampler, FixedOrderSampler, Sampler

MOST_STEPS = 100_000
"""A strategy for more steps would take too long to optimise, and its noise too much memory."""
SAMPLINGS = ("cyclic-poisson", "fixed-order")


def bandmf(
    records: int,
    batch_size: float,
    *,
    bands: int,
    epochs: float | None = None,
    steps: int | None = None,
    sampling: str = "cyclic-poisson",
    clip_norm: float = 1.0,
    unit: Unit = EXAMPLE,
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE_ONE,
    noise: str = FLOAT,
) -> Recipe:
    """Banded matrix factorization (BandMF). One band with cyclic Poisson sampling is DP-SGD.

    "cyclic-poisson" amplifies privacy: `bands` blocks of records take turns. "fixed-order" needs no
    sampling at all: every record keeps its place in the epoch, and `bands` should be the steps of
    an epoch where memory allows (bands - 1 buffers).
    """
    from dpfy.noise import optimise

    count = step_count(records, batch_size, epochs, steps, most=MOST_STEPS)
    bands = min(check.integer("bands", bands), count)
    check.one_of("sampling", sampling, SAMPLINGS)
    sampler: Sampler
    if sampling == "cyclic-poisson":
        rate = bands * batch_size / records
        if rate > 1:
            most = int(records // batch_size)
            raise InvalidInput(
                "bands",
                bands,
                f"must be at most {most}: a block must hold a batch of {batch_size:g} records",
            )
        sampler = CyclicPoissonSampler(rate, bands)
    else:
        sampler = fixed_order(records, batch_size, count)
        bands = min(bands, sampler.steps_per_epoch)
    strategy = optimise.banded(bands, count)
    return Recipe(
        records,
        sampler,
        count,
        FlatClip(clip_norm),
        strategy,
        unit,
        Adjacency.parse(adjacency),
        noise,
    )


def blt(
    records: int,
    batch_size: float,
    *,
    buffers: int = 3,
    epochs: float | None = None,
    steps: int | None = None,
    clip_norm: float = 1.0,
    unit: Unit = EXAMPLE,
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE_ONE,
    noise: str = FLOAT,
) -> Recipe:
    """Buffered linear Toeplitz noise in a fixed order of the records: almost the error of full
    correlation with a few buffers.
    """
    from dpfy.noise.optimise import blt as optimise_blt

    count = step_count(records, batch_size, epochs, steps, most=MOST_STEPS)
    sampler = fixed_order(records, batch_size, count)
    strategy = optimise_blt(buffers, count, sampler.participation)
    return Recipe(
        records,
        sampler,
        count,
        FlatClip(clip_norm),
        strategy,
        unit,
        Adjacency.parse(adjacency),
        noise,
    )


def dpftrl(
    records: int,
    batch_size: float,
    *,
    epochs: float | None = None,
    steps: int | None = None,
    estimator: str = "honaker",
    restart: bool = True,
    clip_norm: float = 1.0,
    unit: Unit = EXAMPLE,
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE_ONE,
    noise: str = FLOAT,
) -> Recipe:
    """DP-FTRL with a binary tree (Kairouz et al. 2021), in a fixed order; `restart` begins a new,
    completed tree every epoch.

    ``estimator="completed", restart=False`` is the mechanism of the published study. `bandmf` and
    `blt` have less error.
    """
    count = step_count(records, batch_size, epochs, steps, most=MOST_STEPS)
    sampler = fixed_order(records, batch_size, count)
    restarts = restart and sampler.epochs > 1
    strategy = Tree(estimator, sampler.steps_per_epoch if restarts else 0, restarts)
    return Recipe(
        records,
        sampler,
        count,
        FlatClip(clip_norm),
        strategy,
        unit,
        Adjacency.parse(adjacency),
        noise,
    )


def with_strategy(recipe: Recipe, strategy: Strategy) -> Recipe:
    """The same recipe with another noise strategy, for instance a matrix of your own
    (:func:`dpfy.noise.dense.dense`).
    """
    from dataclasses import replace

    return replace(recipe, strategy=strategy)


def fixed_order(records: int, batch_size: float, steps: int) -> FixedOrderSampler:
    """The fixed order with batches of `batch_size`, or a little less, that lasts for `steps`."""
    epoch = steps_per_epoch(records, batch_size)
    return FixedOrderSampler(epoch, -(-steps // epoch))
