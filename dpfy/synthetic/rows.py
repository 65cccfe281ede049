"""Rows from a distribution: one column after the other, each given those before it, in the
proportions of the model.

Among the rows that agree in what a column depends on, its values are given out in proportion and
not one by one (systematic sampling), so that tables of the model come out almost exactly. Rows are
first sorted by the columns that they have already, and values are given out in the order of a
golden sequence, of which every stretch is spread evenly: so columns that the model holds for
independent come out so too, nearly as they would in a table of many more rows. Where to begin is
random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dpfy.synthetic.columns import Codes
from dpfy.synthetic.domain import Clique
from dpfy.synthetic.inference import CliqueVector

Floats = NDArray[np.float64]


GOLDEN = (math.sqrt(5) - 1) / 2


def drawn(beliefs: CliqueVector, count: int, rng: np.random.Generator) -> Codes:
    """So many rows [rows, columns] of a junction tree, in random order: a function of the model,
    which costs nothing.
    """
    tree = beliefs.tree
    rows = np.zeros((count, len(tree.sizes)), np.int64)
    known: list[int] = []
    for i in tree.order:
        columns, table = tree.cliques[i], beliefs.tables[i].detach().cpu().numpy()
        given = [v for v in columns if v in known]
        for v in (v for v in columns if v not in known):
            part, axes = (
                tuple(sorted((*given, v))),
                tuple(a for a, u in enumerate(columns) if u != v and u not in given),
            )
            apart = sorted((u for u in known if u not in part), key=lambda u: -tree.sizes[u])
            rows[:, v] = given_others(table.sum(axis=axes), part, v, rows, rng, apart)
            given.append(v)
            known.append(v)
    return rows[rng.permutation(count)]


def given_others(
    table: Floats,
    part: Clique,
    v: int,
    rows: Codes,
    rng: np.random.Generator,
    apart: Sequence[int] = (),
) -> Codes:
    """Column v of every row, by a table over the columns `part`, all of which but v are known
    already; evenly over those `apart`.
    """
    others = [u for u in part if u != v]
    weights = np.moveaxis(table, part.index(v), -1)
    shape = weights.shape[:-1]
    keys = (
        np.ravel_multi_index(tuple(rows[:, u] for u in others), shape)
        if others
        else np.zeros(len(rows), np.int64)
    )
    return in_proportion(
        weights.reshape(-1, weights.shape[-1]), np.asarray(keys), rng, [rows[:, u] for u in apart]
    )


def in_proportion(
    weights: Floats, keys: Codes, rng: np.random.Generator, sorted_by: Sequence[Codes] = ()
) -> Codes:
    """A value for each row, in proportion to the weights [keys, values] of its key, and evenly over
    the columns `sorted_by`.

    A key whose weights are all 0, which the model says cannot be, has all values in equal shares.
    """
    count, values = len(keys), weights.shape[1]
    if not count:
        return np.zeros(0, np.int64)
    shuffled = rng.permutation(count)
    order = shuffled[
        np.lexsort([*(column[shuffled] for column in reversed(sorted_by)), keys[shuffled]])
    ]
    held = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], held[1:] != held[:-1]]))
    sizes = np.diff(np.concatenate([starts, [count]]))
    group = np.repeat(np.arange(len(starts)), sizes)
    place = (_ranks(group, starts, rng) + rng.random(len(starts))[group]) / sizes[group]
    ends = np.cumsum(np.maximum(weights[held[starts]], 0.0), axis=1)
    whole = ends[:, -1:]
    ends = np.where(
        whole > 0, ends / np.where(whole > 0, whole, 1.0), np.arange(1, values + 1) / values
    )
    ends[:, -1] = 1.0
    flat = (ends + np.arange(len(starts))[:, None]).ravel()
    found = np.searchsorted(flat, place + group, side="right") - group * values
    drawn_values = np.empty(count, np.int64)
    drawn_values[order] = np.minimum(found, values - 1)
    return drawn_values


def _ranks(group: Codes, starts: Codes, rng: np.random.Generator) -> Codes:
    """In each group the ranks of a golden sequence, from a random start: every stretch of them is
    spread evenly.
    """
    numbers = np.arange(len(group)) - starts[group]
    spots = (numbers * GOLDEN + rng.random(len(starts))[group]) % 1.0
    by_spot = np.lexsort([spots, group])
    ranks = np.empty(len(group), np.int64)
    ranks[by_spot] = np.arange(len(group)) - starts[group[by_spot]]
    return ranks


def table_of(rows: Codes, clique: Clique, shape: Sequence[int]) -> NDArray[np.int64]:
    """How many rows have each combination of the columns of a marginal."""
    keys = np.ravel_multi_index(tuple(rows[:, v] for v in clique), tuple(shape))
    return np.bincount(keys, minlength=int(np.prod(shape))).reshape(shape)
