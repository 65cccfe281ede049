"""Rows that an engine keeps give the same sums as the reference: by many cells at once, with lists
that are looked up, and with the rows of persons chosen.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from dpfy.engines import duckdb_engine
from dpfy.engines.aggregates import KeepRequest, KeptColumn, MemoryEngine
from dpfy.engines.contributions import ContributionLimit
from dpfy.engines.duckdb_engine import of_arrow
from dpfy.engines.expressions import Expression, choose, code, kept, number
from dpfy.tables import Category, Number, OpenColumn, PrivateTable, Schema

SCHEMA = Schema.of([Number("a", -1, 3), Category("c", ("x", "y", "z")), OpenColumn("who")])


def _cells(seed: int, rows: int = 300) -> dict[str, list[object]]:
    rng = np.random.default_rng(seed)
    odd = [float("nan"), float("inf"), -float("inf"), 1e300, -0.0, 3.0, 5e-324]
    numbers = [
        odd[rng.integers(len(odd))] if rng.random() < 0.2 else rng.normal() for _ in range(rows)
    ]
    words = rng.choice(["x", "y", "z", "?", "", " x"], rows).tolist()
    return {"a": numbers, "c": words, "who": rng.integers(0, 60, rows).tolist()}


def _asked(limit: ContributionLimit, owned: bool) -> KeepRequest:
    a = number("a")
    share = choose(a.missing(), -1, ((a + 1.0) * 250.0).floor().clip(0, 999).whole())
    root = choose(a.missing(), 0, ((a + 1.0).root() * 100.0).toward_zero())
    columns = {
        "share": KeptColumn(share, -1, 999),
        "root": KeptColumn(root, 0, 250),
        "word": KeptColumn(code("c"), 0, 3),
    }
    content = (share, code("c"), root) if owned else ()
    group = choose(code("c").equals(3), -1, 0)
    return KeepRequest(group, columns, content, limit, "key")


def _sums(engine: object, asked: KeepRequest) -> list[np.ndarray]:
    rows = engine.keep_rows(asked)  # type: ignore[attr-defined]
    table = tuple((np.arange(1000) * 37 % 101 - 50).tolist())
    looked: Expression = kept("root").lookup(table[:251])
    cells = [(kept("share"), 1000), (kept("word") * 251 + kept("root"), 1004)]
    cells.append((kept("word") * 0, 1))
    found = rows.sums(cells, [looked, kept("share") * kept("root")])
    found += rows.sums(cells[:2])
    rows.close()
    return found


def test_what_memory_does_not_hold_is_written_to_the_temporary_folder(monkeypatch) -> None:
    monkeypatch.setattr(duckdb_engine, "MEMORY", "40MB")
    connection = duckdb_engine.connected()
    connection.execute("CREATE TEMP TABLE wide AS SELECT range AS k FROM range(8000000)")
    assert connection.execute("SELECT SUM(k) FROM wide").fetchone() == (7999999 * 4000000,)


@pytest.mark.parametrize("owned", [False, True])
def test_an_engine_and_the_reference_keep_the_same_rows(owned: bool) -> None:
    for seed in range(3):
        cells, owner = _cells(seed), "who" if owned else None
        asked = _asked(ContributionLimit(2), owned)
        expected = _sums(MemoryEngine(PrivateTable(cells, SCHEMA, owner)), asked)
        order = np.random.default_rng(seed).permutation(300)
        mixed = pa.table({name: pa.array([held[k] for k in order]) for name, held in cells.items()})
        found = _sums(of_arrow(mixed, SCHEMA, owner, "the table"), asked)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == np.int64
            assert (one == other).all()
        if owned:
            assert 60 < expected[-1].sum() <= 120
