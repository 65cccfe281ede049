"""Public records to start from: a forest of their strongest pairs, as potentials that every model
of a synthesis has.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfy.synthetic.counts import count
from dpfy.synthetic.domain import Clique, Domain

PRIOR = 1.0
"""Records that are added to the public ones, spread over all cells: what they do not show can still
be.
"""
MOST = 1 << 14
"""Cells of a pair."""


def public_potentials(data: Any, domain: Domain, most_cells: int) -> list[tuple[Clique, Tensor]]:
    """Log potentials of the best forest (Chow & Liu 1968) of a public table: entropy is relative to
    it from then on.

    Guarantees: reads the public table alone. That it is public is the user's word.
    """
    columns = range(len(domain.columns))
    pairs = [
        pair for pair in combinations(columns, 2) if domain.cells(pair) <= min(MOST, most_cells)
    ]
    held = count(data, domain, [*((v,) for v in columns), *pairs])
    shares = {
        clique: (table + PRIOR / table.size) / (held.records + PRIOR)
        for clique, table in held.tables.items()
    }
    gains = {pair: _information(shares[pair]) for pair in pairs}
    group, found = list(columns), []
    for a, b in sorted(gains, key=lambda pair: -gains[pair]):
        if group[a] != group[b]:
            group = [group[a] if g == group[b] else g for g in group]
            joint = shares[a, b]
            found.append(
                (
                    (a, b),
                    np.log(joint)
                    - np.log(joint.sum(1, keepdims=True))
                    - np.log(joint.sum(0, keepdims=True)),
                )
            )
    singles = [((v,), np.log(shares[(v,)])) for v in columns]
    return [(clique, torch.from_numpy(logs)) for clique, logs in (*singles, *found)]


def _information(joint: np.ndarray) -> float:
    """The mutual information of two columns."""
    apart = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    return float((joint * np.log(joint / apart)).sum())
