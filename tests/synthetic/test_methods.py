"""Scores of marginals: a record changes none by more than is declared."""

from __future__ import annotations

import numpy as np

from dpfy.synthetic.methods import _dependence


def test_a_record_changes_a_dependence_by_at_most_one_and_nearly_so():
    """2,000 random tables of two and three columns, and a record more in any cell."""
    rng = np.random.default_rng(3)
    largest = 0.0
    for _ in range(2000):
        clique = (0, 1, 2)[: int(rng.integers(2, 4))]
        table = rng.poisson(rng.lognormal(0, 2), [int(n) for n in rng.integers(2, 5, len(clique))])
        v = int(rng.integers(0, len(clique)))
        shares = rng.dirichlet(np.full(table.shape[v], 0.3))
        more = table.copy()
        more[tuple(int(rng.integers(0, n)) for n in table.shape)] += 1
        before, after = (_dependence({clique: t}, shares, v, clique) for t in (table, more))
        largest = max(largest, abs(after - before))
    assert 0.9 < largest <= 1 + 1e-9
    assert _dependence({}, shares, 0, (0,)) == 0
