"""Test data that is declared public must not be training data: what is measured on it is published
exactly.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.data.lazy import RecordSource
from dpfy.training.integrity import copies
from dpfy.training.integrity.copies import HALF

TEST, LAZY = 4096, 512
"""Rows of the test data that are looked for, and records that are read where they are not in
memory, at most.
"""
CHUNK = 1 << 22
MANY, ENOUGH = 8, 20
"""Different values in a row that does not recur by chance; rows that recur in the training data, to
estimate by them how many do.
"""

RULE = (
    "rows of it are in the training data, and its figures would be published exactly: take them "
    "out, or give dpfy.PrivateTest(data) or dpfy.WithheldTest(data)"
)


def require_apart(
    name: str, train: RecordSource, test: RecordSource, randomness: Randomness
) -> None:
    """Refuse test data that shares more rows with the training data than rows of the training data
    recur among themselves.

    Rows are compared by the values of their features, in the narrower type of the two, in whatever
    order they stand. Labels are left out.

    Guarantees: where the training data is in memory and has at most `copies.DATA` values, a test
    set that has one of its rows in a hundred from it is refused with a probability of more than
    0.99, if it has at least 600 rows and rows do not recur by themselves. Of larger and of lazily
    read data a part drawn by the run's secret is compared. Rows that were changed are not found.
    """
    rng = randomness.generator("overlap", 0)
    mine, theirs = copies.fields(train, rng, LAZY), copies.fields(test, rng, LAZY)
    pairs = [(a, b) for a, b in zip(mine, theirs, strict=False) if a[0].numel() == b[0].numel()]
    wide = [(a, b) for a, b in pairs if a[0].numel() > 1] or pairs[:-1] or pairs
    if not wide:
        return
    rows = torch.from_numpy(np.sort(rng.permutation(len(wide[0][1]))[:TEST]))
    here = torch.zeros(len(wide[0][0]), dtype=torch.int64)
    there, values = (
        torch.zeros(len(rows), dtype=torch.int64),
        torch.zeros(len(rows), dtype=torch.int64),
    )
    for a, b in wide:
        kind = next((d for d in reversed(HALF) if d in (a.dtype, b.dtype)), torch.float32)
        part = b[rows.to(b.device)]
        keys = torch.from_numpy(rng.integers(1, 1 << 62, a[0].numel()) | 1)
        here, there = here * 31 + _hashed(a, kind, keys), there * 31 + _hashed(part, kind, keys)
        values += (
            1 + (part.flatten(1).float().cpu().sort(1).values.diff(dim=1) != 0).sum(1)
            if part.dim() > 1
            else 1
        )
    found, rich = torch.isin(there, here), values >= MANY
    shared, expected = int(found.sum()), _by_chance(here, there)
    if shared > expected + 4 * math.sqrt(expected) or 2 * int((found & rich).sum()) > len(rows):
        raise InvalidInput(name, "data declared public that holds training data", RULE)


def _by_chance(here: Tensor, there: Tensor) -> float:
    """How many rows of a test set of its own are in the training data, at most: as rows recur
    there, or, where few do, as pairs do.
    """
    counts, others = (rows.unique(return_counts=True)[1].double() for rows in (here, there))
    alike = float(counts[counts > 1].sum())
    if alike >= ENOUGH:
        return len(there) * (alike + 3 * math.sqrt(alike)) / len(here)
    pairs = sum(float((c * (c - 1)).sum()) / 2 for c in (counts, others))
    every = sum(n * (n - 1) / 2 for n in (len(here), len(there)))
    return len(here) * len(there) * (pairs + 3 * math.sqrt(pairs) + 1) / max(every, 1.0)


def _hashed(field: Tensor, kind: torch.dtype, keys: Tensor) -> Tensor:
    """A number for each row that is equal where all values are."""
    flat = field.reshape(len(field), -1)
    parts = flat.split(max(1, CHUNK // max(1, flat.shape[1])))
    return torch.cat(
        [
            ((p.to(kind).float().cpu() + 0.0).contiguous().view(torch.int32).long() * keys).sum(1)
            for p in parts
        ]
    )
