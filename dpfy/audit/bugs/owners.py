"""Mistakes about whose records are: a user in two places, a bound that is kept for something else
than the user.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dpfy.audit.bench import Bug

WHOLE, SINGLE = "users drawn whole", "records of users"


def split(source: Any) -> Any:
    """A user with many records is two rows: under two names, or with two clients."""
    if not hasattr(source, "counts") or source.counts.max() < 4 * source.most:
        return source
    user = int(source.counts.argmax())
    half = int(source.counts[user]) // 2
    first = np.append(source.first, source.first[user] + half)
    counts = np.append(source.counts, source.counts[user] - half)
    counts[user] = half
    return dataclasses.replace(source, first=first, counts=counts)


def every_batch(source: Any) -> Any:
    """No record is left out: the bound is kept in each batch, not over all of the data."""
    return (
        dataclasses.replace(source, rows=np.arange(len(source.base)))
        if hasattr(source, "rows")
        else source
    )


def by_place(source: Any) -> Any:
    """Which records are kept depends on how many there are: one user more and others are taken for
    everybody.
    """
    if not hasattr(source, "rows"):
        return source
    size = len(source.base)
    return dataclasses.replace(
        source, rows=np.sort(np.random.default_rng(size).permutation(size)[: len(source.rows)])
    )


BUGS = (
    Bug("user-in-two-rows", "a user is two rows, each clipped for itself", WHOLE, grouped=split),
    Bug(
        "bound-per-batch",
        "the most records of a user are counted in each batch, not in the data",
        SINGLE,
        grouped=every_batch,
    ),
    Bug(
        "kept-by-place",
        "which records of a user are kept depends on everybody else's",
        SINGLE,
        grouped=by_place,
    ),
)
