"""Microbatches (Algorithm 3 of the guide; McMahan & Andrew 2018): clipped means of groups, where
each record goes to a group by its own coin.

    python -m dpfy_lab.microbatches

Consecutive groups of a random batch do not work: one record more shifts all groups behind it. With
coins of their own, records stay where they are when another one comes, so that one group alone
changes: from one vector of length at most C to another, which is 2 C. That is what is charged, and
what the noise must be made for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.values import Bound

Floats = NDArray[np.float64]


def coins(records: int, groups: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """The group of each record: a coin of its own, whoever else is there."""
    check.integer("groups", groups)
    return rng.integers(0, groups, records)


def clipped_means(
    gradients: Floats, places: NDArray[np.int64], groups: int, norm: float
) -> tuple[Floats, Bound]:
    """The sum of the clipped mean gradients of groups, and what one record can move it by.

    Args:
        gradients: One row for each record.
        places: The group of each, from `coins`.
        groups: How many there are; an empty one adds nothing.
        norm: To which the mean of a group is shortened.

    Returns:
        The sum, and its bound of twice `norm`.

    Raises:
        InvalidInput: The rows have no finite numbers, or the groups do not fit.

    Guarantees: adding or removing one record, with its coin, moves the sum by at most the bound.
    """
    check.positive("norm", norm)
    if gradients.ndim != 2 or places.shape != (len(gradients),):
        shapes = f"shapes {gradients.shape} and {places.shape}"
        raise InvalidInput("gradients, places", shapes, "must be rows, and a group for each")
    if not np.isfinite(gradients).all():
        raise InvalidInput("gradients", "NaN or infinity", "must be finite numbers")
    total = np.zeros(gradients.shape[1])
    for group in range(check.integer("groups", groups)):
        own = gradients[places == group]
        if len(own):
            mean = own.mean(axis=0)
            length = float(np.linalg.norm(mean)) * (1 + 1e-12)
            total += mean * min(1.0, norm / length) if length else 0.0
    return total, Bound(l2=2 * norm)


def errors(
    records: int, size: int, spread: float, sigma: float, seed: int = 0, dimension: int = 100
) -> tuple[float, float, float]:
    """The noise of the average gradient, its bias by clipping, and both together, in lengths of
    the mean gradient: `records` rows of one direction with Gaussian `spread`, in groups of about
    `size`. Clipping norms are the median length of what is clipped.
    """
    rng = np.random.default_rng(seed)
    mean = np.zeros(dimension)
    mean[0] = 1.0
    rows = mean + rng.normal(size=(records, dimension)) * spread / np.sqrt(dimension)
    groups = max(1, records // size)
    alone = size == 1
    places = np.arange(records) if alone else coins(records, groups, rng)
    known = [rows[places == group] for group in range(groups)]
    norm = float(np.median([np.linalg.norm(own.mean(axis=0)) for own in known if len(own)]))
    total, bound = clipped_means(rows, places, groups, norm)
    moved = norm if alone else bound.l2  # a record that is clipped by itself moves the sum by C
    noise = sigma * moved * np.sqrt(dimension) / groups
    bias = float(np.linalg.norm(total / groups - mean))
    return float(noise), bias, float(np.hypot(noise, bias))


def table(records: int = 1024, sigma: float = 1.0) -> str:
    """The errors for sizes and spreads, as Markdown."""
    lines = ["| spread of gradients | records in a group | noise | bias and sampling | together |",
             "|---|---|---|---|---|"]  # fmt: skip
    for spread in (1.0, 10.0):
        for size in (1, 4, 16, 64):
            found = np.mean(
                [errors(records, size, spread, sigma, seed) for seed in range(5)], axis=0
            )
            lines.append(f"| {spread:g} | {size} | " + " | ".join(f"{v:.3f}" for v in found) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
