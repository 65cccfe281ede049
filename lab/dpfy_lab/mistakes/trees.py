"""Mistakes of trees and boosting: cells from the data, leaves that are dropped, sums that are
billed for less than they hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from dpfy_lab.checks.estimators import NEIGHBOURS, NOISE
from dpfy_lab.mistakes.linear import GAUSSIAN, HOME, RELEASE, quieter
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch

TREES, LAB = f"{HOME}.trees", "dpfy_lab.estimators"
ADDITIVE, BOOSTED, FOREST, TOP_DOWN, SOFT = (
    "additive boosting",
    "boosted trees",
    "forest",
    "top-down tree",
    "soft trees",
)
FEW = 3


def shorter(l2: Callable[[float], float]) -> Callable[..., Any]:
    """A bound with another L2 norm than was proven."""
    return lambda real, **norms: real(**(norms | {"l2": l2(norms["l2"])}))


def _spread(places: Any, fine: int) -> Any:
    low, high = int(places.min()), int(places.max())
    return ((places.astype(np.int64) - low) * (fine - 1) // max(high - low, 1)).astype(np.uint16)


@mistake(
    "cells-of-the-data",
    "cells of a number lie between the smallest and the largest record",
    NEIGHBOURS.of(ADDITIVE),
    f"{TREES}.additive.cells",
)
def _(real: Any, data: Any, fine: int) -> Any:
    held = real(data, fine)
    places = [
        _spread(p, fine) if number else p
        for p, number in zip(held.places, held.ordered, strict=True)
    ]
    return dataclasses.replace(held, places=tuple(places))


mistake(
    "one-column-billed",
    "a record adds its residual in every column, the noise is for one of them",
    NEIGHBOURS.of(ADDITIVE),
    f"{TREES}.additive.Bound",
)(shorter(lambda l2: 1.0))

mistake(
    "curvatures-not-billed",
    "curvatures are released beside residuals with noise for residuals alone",
    NEIGHBOURS.of(BOOSTED),
    f"{TREES}.boosted.Bound",
)(shorter(lambda l2: 1.0))

mistake(
    "trees-not-composed",
    "every tree has the noise of a single release",
    NOISE.of(BOOSTED),
    GAUSSIAN,
)(quieter(1 / 4))


@mistake("small-leaves-dropped", "leaves with few records are dropped", NOISE.of(FOREST), RELEASE)
def _(real: Any, self: Any, name: str, total: Any, bits: int = 0) -> Any:
    found = real(self, name, total, bits)
    few = total.sum(axis=-1, keepdims=True) < FEW if name == "leaves" else False
    return np.where(few, 0.0, found)


@mistake(
    "one-tree-billed",
    "a record is in a leaf of every tree, the noise is for one tree",
    NEIGHBOURS.of(FOREST),
    f"{TREES}.leaves.one_of_each",
)
def _(real: Any, trees: int, terms: Any) -> Any:
    return real(1, terms)


@mistake(
    "scores-of-splits-unbounded",
    "scores of splits are not divided by the number of records",
    NEIGHBOURS.of(TOP_DOWN),
    f"{TREES}.top_down._fit",
)
def _(real: Any, sums: Any) -> Any:
    # One record moves the score of a large node by as much as it has records.
    return (sums[..., 1:] ** 2).sum(axis=-1)


@mistake(
    "leaves-say-the-truth",
    "leaves of the finished tree are put right by the records",
    NEIGHBOURS.of(TOP_DOWN),
    f"{TREES}.top_down._TopDown._learn",
)
def _(real: Any, self: Any, data: Any, public: Any, fit: Any) -> Any:
    found = dict(real(self, data, public, fit))
    found["values"] = found["values"] + np.bincount(data.target, minlength=2)[1] / data.size
    return found


@mistake(
    "one-split-in-the-norm",
    "gradients of soft trees are shortened by the norm of one split and one leaf",
    NEIGHBOURS.of(SOFT),
    f"{LAB}.soft_trees._squares",
)
def _(real: Any, rows: Any) -> Any:
    return real(rows[:1])


@mistake(
    "beginning-billed-for-a-third",
    "rows, rows times residuals and a count are released together with noise for one of them",
    NEIGHBOURS.of(SOFT),
)
def _(patch: Patch) -> None:
    patch(f"{LAB}.soft_trees.THIRD", 1.0)
