"""Mistakes of trees and boosting: cells from the data, leaves that are dropped, sums that are
billed for less than they hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from dpfy.audit.bench import Bug
from dpfy.audit.learners import NEIGHBOURS, NOISE

HOME = "dpfy.estimators"
TREES = f"{HOME}.trees"
RELEASE = f"{HOME}.fitting.FitSession.release"
ADDITIVE, BOOSTED, FOREST, TOP_DOWN, SOFT = (
    "additive boosting",
    "boosted trees",
    "forest",
    "top-down tree",
    "soft trees",
)
FEW = 3


def ends_of_the_data(real: Any) -> Any:
    """Cells of a number lie between the smallest and the largest record."""

    def cells(data: Any, fine: int) -> Any:
        held = real(data, fine)
        places = [
            _spread(p, fine) if number else p
            for p, number in zip(held.places, held.ordered, strict=True)
        ]
        return dataclasses.replace(held, places=tuple(places))

    return cells


def _spread(places: Any, fine: int) -> Any:
    low, high = int(places.min()), int(places.max())
    return ((places.astype(np.int64) - low) * (fine - 1) // max(high - low, 1)).astype(np.uint16)


def without_small_leaves(real: Any) -> Any:
    """Leaves with few records are dropped, which tells that they had few."""

    def release(self: Any, name: str, total: Any, bits: int = 0) -> Any:
        found = real(self, name, total, bits)
        return (
            np.where(total.sum(axis=-1, keepdims=True) < FEW, 0.0, found)
            if name == "leaves"
            else found
        )

    return release


def shorter(l2: Callable[[float], float]) -> Callable[[Any], Any]:
    """Bounds with another L2 norm than was proven."""
    return lambda real: lambda **norms: real(**(norms | {"l2": l2(norms["l2"])}))


def squares(real: Any) -> Any:
    """Sums of squares, not divided by the number of records: a record moves the score of a large
    node by as much as it has records.
    """
    return lambda sums: (sums[..., 1:] ** 2).sum(axis=-1)


def majority(real: Any) -> Any:
    """Leaves of the model say what the records in them say."""

    def learn(self: Any, data: Any, public: Any, fit: Any) -> Any:
        found = dict(real(self, data, public, fit))
        found["values"] = found["values"] + np.bincount(data.target, minlength=2)[1] / data.size
        return found

    return learn


def of_one(real: Any) -> Any:
    """The square of the first of several numbers stands for all of them."""
    return lambda rows: real(rows[:1])


BUGS = (
    Bug(
        "cells-of-the-data",
        "cells of a number lie between the smallest and the largest record",
        NEIGHBOURS,
        learner={f"{TREES}.additive.cells": ends_of_the_data},
        case=ADDITIVE,
    ),
    Bug(
        "one-column-billed",
        "a record adds its residual in every column, the noise is for one of them",
        NEIGHBOURS,
        learner={f"{TREES}.additive.Bound": shorter(lambda l2: 1.0)},
        case=ADDITIVE,
    ),
    Bug(
        "curvatures-not-billed",
        "curvatures are released beside residuals with noise for residuals alone",
        NEIGHBOURS,
        learner={f"{TREES}.boosted.Bound": shorter(lambda l2: 1.0)},
        case=BOOSTED,
    ),
    Bug(
        "trees-not-composed",
        "every tree has the noise of a single release",
        NOISE,
        learner={f"{HOME}.fitting.Gaussian": lambda real: lambda multiplier: real(multiplier / 4)},
        case=BOOSTED,
    ),
    Bug(
        "small-leaves-dropped",
        "leaves with few records are dropped",
        NOISE,
        learner={RELEASE: without_small_leaves},
        case=FOREST,
    ),
    Bug(
        "one-tree-billed",
        "a record is in a leaf of every tree, the noise is for one tree",
        NEIGHBOURS,
        learner={f"{TREES}.leaves.one_of_each": lambda real: lambda trees, terms: real(1, terms)},
        case=FOREST,
    ),
    Bug(
        "scores-of-splits-unbounded",
        "scores of splits are not divided by the number of records",
        NEIGHBOURS,
        learner={f"{TREES}.top_down._fit": squares},
        case=TOP_DOWN,
    ),
    Bug(
        "leaves-say-the-truth",
        "leaves of the finished tree are put right by the records",
        NEIGHBOURS,
        learner={f"{TREES}.top_down._TopDown._learn": majority},
        case=TOP_DOWN,
    ),
    Bug(
        "one-split-in-the-norm",
        "gradients of soft trees are shortened by the norm of one split and one leaf",
        NEIGHBOURS,
        learner={f"{TREES}.soft._squares": of_one},
        case=SOFT,
    ),
    Bug(
        "beginning-billed-for-a-third",
        "rows, rows times residuals and a count are released together with noise for one of them",
        NEIGHBOURS,
        learner={f"{TREES}.soft.THIRD": lambda real: 1.0},
        case=SOFT,
    ),
)
