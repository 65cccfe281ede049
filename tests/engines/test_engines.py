"""The reference and DuckDB are one: the same whole numbers before noise, and with one secret the same
answers, whatever the order of the rows, the number of threads and how the rows are parted in files.
"""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpfy
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.values import mock_permit
from dpfy.engines.aggregates import Answered, MemoryEngine
from dpfy.engines.contributions import ContributionLimit
from dpfy.engines.dialects import Dialect
from dpfy.engines.duckdb_engine import of_arrow
from dpfy.engines.sources import opened
from dpfy.queries.plan import QueryTerms
from dpfy.queries.run import answered
from dpfy.runs.run import Run
from dpfy.statistics import functions, language
from dpfy.statistics.claim import BudgetShare
from dpfy.statistics.statistic import Spend, SumStatistic
from dpfy.tables import Category, Date, Number, OpenColumn, PrivateTable, Schema

WORDS = tuple("abcdefghijklmnopqrstuv")
SCHEMA = Schema.of(
    [
        Number("age", 0, 100),
        Number("pay", 0, 80.5, fill=3),
        Number("need", -3, 3, drop=True),
        Category("sex", ("f", "m")),
        Category("guess", ("f", "m"), fill="other"),
        Category("job", WORDS),
        Date("when", "2020-01-01", "2020-12-31", parts=("year", "month")),
        OpenColumn("note"),
        OpenColumn("who"),
    ]
)
ASKED = [
    "count()",
    "sum(age)",
    "mean(pay)",
    "variance(age)",
    "stddev(pay)",
    "covariance(age, pay, need)",
    "median(age)",
    "quantile(pay, 0.1, 0.5, 0.9)",
    "min(age)",
    "max(pay)",
    "histogram(age, 20, 40, 60)",
    "histogram(when, '2020-03-01', '2020-06-01', '2020-12-31')",
    "table(guess, job)",
    "margins(sex, job, guess, order=2)",
    "accuracy(sex, guess)",
    "calibration(pay, sex)",
    "mode(job)",
    "top(note)",
    "range(pay)",
    "unfit(age)",
    "unfit(job)",
    "distinct(who)",
]
TAILS = [
    "",
    " by bins(age, 0, 10, 20, 50)",
    " by month(when)",
    " by year(when) where age > 18 and (sex = 'f' or pay <= 30)",
    " by when_month where when > '2020-03-04'",
    " where job in ('a', 'b', 'v') and age != 30",
    " by weekday(when), bins(pay, 10, 20)",
]
LIMITS = [
    ContributionLimit(5),
    ContributionLimit(6, 2),
    ContributionLimit(8, 3, 2),
    ContributionLimit(4, None, 1),
]


def table(r, n):
    """Rows with every kind of missing cell."""
    found = pa.table(
        {
            "age": r.integers(-5, 110, n),
            "pay": r.normal(40, 30, n),
            "need": pa.array(r.normal(0, 2, n), mask=r.random(n) < 0.1),
            "sex": r.choice(["f", "m", "x", " f", ""], n),
            "guess": pa.array(r.choice(["f", "m", "x"], n), mask=r.random(n) < 0.1),
            "job": r.choice([*WORDS, "z"], n),
            "when": np.datetime64("2019-11-30") + r.integers(0, 456, n),
            "note": r.choice(["ah", "oh ", "uh", *(f"z{k}" for k in range(50))], n),
            "who": pa.array(r.integers(0, max(2, n // 15), n), mask=r.random(n) < 0.05),
        }
    )
    texts = ("age", "pay") if r.random() < 0.3 else ()
    for name in texts:
        place = found.column_names.index(name)
        found = found.set_column(place, name, found[name].cast(pa.string()))
    return found


def released(engine, text, owner, limit, family):
    """The answers, and what is summed before noise."""
    (statistic,) = functions.build(language.parse(text), SCHEMA.named, None, owner)
    claim = statistic.claim(limit, BudgetShare(1.0, family, delta=1e-3))
    permit = mock_permit(claim.event, claim.releases, claim.name)
    spend = Spend(claim, limit, permit, Randomness.for_tests(3))
    exact = None
    if isinstance(statistic, SumStatistic) and statistic.whole:
        exact = statistic.total(engine, limit, "l1", None, spend.key).value.tolist()
    return [a.to_json() for a in statistic.release(engine, spend)], exact


SEEDS = [s if s < 8 else pytest.param(s, marks=pytest.mark.slow) for s in range(20)]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_reference_and_duckdb_release_the_same(seed, tmp_path):
    r = np.random.default_rng(seed)
    rows = table(r, int(r.choice([0, 1, 40, 1500])))
    owner = None if seed % 4 == 0 else "who"
    limit = ContributionLimit() if owner is None else LIMITS[seed % len(LIMITS)]
    shuffled = rows.take(r.permutation(len(rows)))
    for part in range(3):
        pq.write_table(
            shuffled.slice(part * 500, 500), tmp_path / f"{part}.parquet", row_group_size=70
        )
    engines = [
        MemoryEngine(PrivateTable(rows, SCHEMA, owner)),
        of_arrow(rows, SCHEMA, owner, "table"),
        opened(tmp_path, SCHEMA, owner),
    ]
    engines[2].connection.execute(f"SET threads = {1 + seed % 3}")
    for _ in range(10):
        text = str(r.choice(ASKED)) + str(r.choice(TAILS))
        if ("distinct" in text and owner is None) or (
            "table(" in text and "job" in text.split(")", 1)[1]
        ):
            continue
        family = str(r.choice(["laplace", "gaussian"]))
        one, *others = (released(engine, text, owner, limit, family) for engine in engines)
        assert others == [one, one], (text, limit)


def test_halves_become_the_even_number_in_every_engine():
    import duckdb

    values = np.arange(-9, 10) / 2
    dialect = Dialect()
    found = duckdb.sql("SELECT " + ", ".join(dialect.rounded(dialect.double(v)) for v in values))
    assert found.fetchall() == [tuple(np.rint(values).astype(int).tolist())]


def asked(source, place, text="count(), mean(age) by sex where pay > 10", **more):
    terms = QueryTerms(1.0, 1e-6, "who", 3) if "who" in SCHEMA.names else QueryTerms(1.0)
    run = Run(place, seed=7, **more)
    return answered(source, text, schema=SCHEMA, terms=terms, run=run).answers


def test_every_source_has_the_same_answers(tmp_path):
    import duckdb
    import polars

    rows = table(np.random.default_rng(2), 900)
    due = asked({name: rows[name].to_pylist() for name in rows.column_names}, tmp_path / "memory")
    pq.write_table(rows, tmp_path / "one.parquet")
    for place in ("parts", "hive/kind=x", "hive/kind=y"):
        (tmp_path / place).mkdir(parents=True)
    for k in range(3):
        pq.write_table(rows.slice(300 * k, 300), tmp_path / "parts" / f"{k}.parquet")
    pq.write_table(rows.slice(0, 400), tmp_path / "hive/kind=x/a.parquet")
    pq.write_table(rows.slice(400), tmp_path / "hive/kind=y/a.parquet")
    duck = duckdb.connect(str(tmp_path / "d.duckdb"))
    duck.register("rows", rows)
    duck.execute("CREATE TABLE visits AS SELECT * FROM rows")
    duck.execute("CREATE VIEW old AS SELECT * FROM visits")
    relation = duck.sql("SELECT * FROM visits")
    sources = {
        "arrow": rows,
        "polars": polars.from_arrow(rows),
        "lazy": polars.from_arrow(rows).lazy(),
        "pandas": rows.to_pandas(),
        "file": tmp_path / "one.parquet",
        "folder": tmp_path / "parts",
        "pattern": str(tmp_path / "parts" / "*.parquet"),
        "hive": tmp_path / "hive",
        "relation": relation,
    }
    for name, source in sources.items():
        assert asked(source, tmp_path / f"run-{name}") == due, name
    duck.close()
    for name in ("visits", "old"):
        assert asked(f"{tmp_path}/d.duckdb::{name}", tmp_path / f"run-{name}") == due, name
    people = dpfy.Dataset(tmp_path / "hive", [*SCHEMA.columns, Category("kind", ["x", "y"])])
    found = dpfy.query(people, "count() by kind", epsilon=1e3, delta=0)
    shown = [a.value for a in found.answers]
    needed = np.array([x is not None for x in rows["need"].to_pylist()])
    assert shown == [needed[:400].sum(), needed[400:].sum(), 0]


def test_texts_that_are_none_are_missing_cells(tmp_path):
    damaged = pa.Array.from_buffers(
        pa.string(),
        3,
        [None, pa.py_buffer(np.array([0, 2, 4, 5], np.int32)), pa.py_buffer(b"ab\xff\xfec")],
    )
    rows = pa.table({"word": damaged, "k": [1, 2, 3]})
    schema = [Category("word", ["ab", "c"]), Number("k", 0, 5)]
    pq.write_table(rows, tmp_path / "a.parquet")
    (tmp_path / "in" / "part=1").mkdir(parents=True)
    pq.write_table(rows, tmp_path / "in" / "part=1" / "a.parquet")
    for source in (rows, tmp_path / "a.parquet", tmp_path / "in"):
        found = dpfy.query(source, "table(word), sum(k)", schema=schema, epsilon=1e4, delta=0)
        assert [a.value for a in found.answers][:3] == [1, 1, 1], source


def test_what_goes_wrong_is_one_line_without_a_cell(tmp_path):
    rows = table(np.random.default_rng(2), 50)
    for k in range(2):
        pq.write_table(rows, tmp_path / f"{k}.parquet")
    engine = opened(tmp_path, SCHEMA, "who")
    engine.rows()
    (tmp_path / "1.parquet").unlink()
    with pytest.raises(Corrupt, match="missing"):
        engine.rows()
    pq.write_table(rows.slice(3), tmp_path / "1.parquet")
    with pytest.raises(Corrupt, match="changed"):
        engine.rows()
    (tmp_path / "1.parquet").write_bytes(b"PAR1 nothing")
    for source in (tmp_path, f"{tmp_path}/none/*.parquet", f"{tmp_path}/no.duckdb::x"):
        with pytest.raises(DpfyError) as told:
            opened(source, SCHEMA, "who").rows()
        assert "\n" not in str(told.value)


def test_a_query_that_was_stopped_goes_on_and_other_files_are_refused(tmp_path, monkeypatch):
    rows = table(np.random.default_rng(2), 300)
    (tmp_path / "parts").mkdir()
    for k in range(3):
        pq.write_table(rows.slice(100 * k, 100), tmp_path / "parts" / f"{k}.parquet")
    text = "mean(age), count() by sex"
    due = asked(tmp_path / "parts", tmp_path / "whole", text)
    real, calls = SumStatistic.release, []

    def stopped(self, given, spend):
        calls.extend([given] * isinstance(given, Answered))
        if len(calls) == 2 and isinstance(given, Answered):
            raise KeyboardInterrupt
        return real(self, given, spend)

    monkeypatch.setattr(SumStatistic, "release", stopped)
    with pytest.raises(KeyboardInterrupt):
        asked(tmp_path / "parts", tmp_path / "run", text)
    held = (tmp_path / "parts" / "1.parquet").read_bytes()
    stamp = (tmp_path / "parts" / "1.parquet").stat().st_mtime_ns
    pq.write_table(rows, tmp_path / "parts" / "1.parquet")
    with pytest.raises(InvalidInput, match="resume"):
        asked(tmp_path / "parts", tmp_path / "run", text, resume=True)
    (tmp_path / "parts" / "1.parquet").write_bytes(held)
    os.utime(tmp_path / "parts" / "1.parquet", ns=(stamp, stamp))
    assert asked(tmp_path / "parts", tmp_path / "run", text, resume=True) == due


def test_files_that_only_look_the_same_are_refused_on_resume(tmp_path, monkeypatch):
    """The same size, time of change and end: another cell would be answered with the same noise."""
    (tmp_path / "parts").mkdir()
    files = [tmp_path / "parts" / f"{k}.parquet" for k in range(2)]
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}

    def write(first: float) -> None:
        for file in files:
            pq.write_table(pa.table({"x": [first, *range(1, 3000)]}), file, **plain)
            os.utime(file, ns=(10**18, 10**18))

    def ask(**more):
        run = dpfy.Run(tmp_path / "run", **more)
        schema = [dpfy.Number("x", 0, 3000)]
        return dpfy.query(
            tmp_path / "parts", "sum(x)", schema=schema, epsilon=1.0, delta=0, run=run
        )

    write(0.0)
    before = [(file.stat().st_size, file.read_bytes()[-8192:]) for file in files]
    real = SumStatistic.release
    monkeypatch.setattr(SumStatistic, "release", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask()
    monkeypatch.setattr(SumStatistic, "release", real)
    write(3000.0)
    assert before == [(f.stat().st_size, f.read_bytes()[-8192:]) for f in files]
    with pytest.raises(InvalidInput, match="resume"):
        ask(resume=True)
    write(0.0)
    assert ask(resume=True).verify()


def _interrupted(self, given, spend):
    if isinstance(given, Answered):
        raise KeyboardInterrupt
    return []


def test_the_selection_is_fair_and_follows_the_secret():
    """Of a person with rows in two groups, each row has the same chance, whatever their order."""
    limit, groups = ContributionLimit(2), np.array([0] * 6 + [1] * 2)
    owners = np.zeros(8, np.int64)
    seen = np.zeros(8)
    for key in range(2000):
        seen += limit.kept(owners, groups, ["ann"], [groups], str(key))
    share = np.array([seen[:6].sum() / 6, seen[6:].sum() / 2]) / 2000
    assert np.abs(share - 0.25).max() < 0.03
