"""Counts of marginals: one pass, any source, the same numbers; a person's records are bounded."""

from __future__ import annotations

import gzip
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from made_up_people import SCHEMA, people, write_csv

from dpfy.core.errors import Corrupt, DpfyError, InvalidInput
from dpfy.core.files import DataFile
from dpfy.synthetic import counts
from dpfy.synthetic.counts import RecordOwners, closure, count, encoded
from dpfy.synthetic.domain import Domain
from dpfy.tables import Category, Number, OpenColumn, Schema
from dpfy.tables.sources import chunks

DOMAIN = Domain.parse(SCHEMA, "people.toml")
ALL = closure(combinations(range(5), 3))


def brute(columns, clique):
    """Counted cell by cell."""
    rows = zip(*(columns[DOMAIN.names[v]] for v in clique), strict=True)
    places = Counter(
        tuple(int(DOMAIN.columns[v].codes([text])[0]) for v, text in zip(clique, row, strict=True))
        for row in rows
    )
    table = np.zeros(DOMAIN.shape(clique), np.int64)
    for place, number in places.items():
        table[place] = number
    return table


def test_every_marginal_against_brute_force(tmp_path, monkeypatch):
    held = people(400)
    monkeypatch.setattr(counts, "ROWS", 64)
    for source in (held, write_csv(tmp_path / "a.csv", held)):
        found = count(source, DOMAIN, ALL)
        assert found.records == 400
        assert all((found.tables[clique] == brute(held, clique)).all() for clique in ALL)


def test_any_source_gives_the_same(tmp_path):
    pandas, arrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    held = people(300)
    typed = held | {"age": [int(v) for v in held["age"]], "job": [v or None for v in held["job"]]}
    path = write_csv(tmp_path / "a.csv", held)
    packed = tmp_path / "a.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    semicolons = tmp_path / "b.csv"
    semicolons.write_text(path.read_text().replace(",", ";"))
    parquet.write_table(arrow.table(typed), tmp_path / "a.parquet", row_group_size=70)
    due = count(held, DOMAIN, ALL).fingerprint()
    for source in (
        path,
        str(packed),
        semicolons,
        tmp_path / "a.parquet",
        pandas.DataFrame(typed),
        arrow.table(typed),
    ):
        assert count(source, DOMAIN, ALL).fingerprint() == due
    shuffled = {name: held[name] for name in reversed(held)}
    assert count(shuffled, DOMAIN, ALL).fingerprint() == due


def test_the_records_of_a_person_are_chosen_alike_whatever_the_order_and_the_chunks():
    held = people(300)
    order = np.random.default_rng(5).permutation(300)
    mixed = {name: [column[k] for k in order] for name, column in held.items()}
    sizes = Counter(held["id"])
    for most in (1, 2, 5):
        owners = RecordOwners("id", most)
        used = [
            np.concatenate(list(encoded(source, DOMAIN, owners, rows, "key")), axis=1)
            for source, rows in ((held, 300), (held, 7), (mixed, 300))
        ]
        assert used[0].shape[1] == sum(min(size, most) for size in sizes.values())
        assert (used[0] == used[1]).all()
        assert Counter(map(tuple, used[0].T)) == Counter(map(tuple, used[2].T))
    others = np.concatenate(list(encoded(held, DOMAIN, owners, 300, "another key")), axis=1)
    assert Counter(map(tuple, used[0].T)) != Counter(map(tuple, others.T))


@pytest.mark.parametrize("owned", [False, True])
def test_an_engine_counts_as_memory_does(tmp_path, monkeypatch, owned):
    pandas = pytest.importorskip("pandas")
    held = people(300)
    held["age"][:6] = ["-3", "nan", "inf", "1e300", "?", ""]
    held["job"][:3] = ["unheard of", " clerk", ""]
    owners = RecordOwners("id", 2) if owned else None
    due = count(held, DOMAIN, ALL, owners, "key")
    frame = pandas.DataFrame(held)
    order = np.random.default_rng(1).permutation(300)
    for k, part in enumerate(np.array_split(order, 3)):
        frame.iloc[part].to_parquet(tmp_path / f"{k}.parquet", index=False)
    for most in (counts.MOST_SETS, 4):
        monkeypatch.setattr(counts, "MOST_SETS", most)
        found = count(str(tmp_path / "*.parquet"), DOMAIN, ALL, owners, "key")
        assert found.fingerprint() == due.fingerprint()


def test_a_person_changes_no_table_by_more_than_the_bound():
    """All records of one person added, at any place, with any content: 40 random neighbours."""
    rng, held, most = np.random.default_rng(2), people(120), 3
    before = count(held, DOMAIN, ALL, RecordOwners("id", most))
    assert before.bound == most
    for _ in range(40):
        more = people(int(rng.integers(1, 9)), int(rng.integers(0, 1000)))
        size = len(more["age"])
        more["id"] = ["newcomer"] * size
        mixed = {name: list(column) for name, column in held.items()}
        for k, place in enumerate(rng.integers(0, 121, size).tolist()):
            for name, column in mixed.items():
                column.insert(place, more[name][k])
        after = count(mixed, DOMAIN, ALL, RecordOwners("id", most))
        assert all(np.abs(after.tables[c] - before.tables[c]).sum() == min(size, most) for c in ALL)


def test_an_empty_table_has_counts_of_zero(tmp_path):
    path = tmp_path / "none.csv"
    path.write_text("age,job,grade,since,rich,id\n")
    found = count(path, DOMAIN, ALL)
    assert found.records == 0
    assert all(not table.any() for table in found.tables.values())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("age,job,grade,since,rich,id\n30,clerk".encode("utf-16"), "not UTF-8|column"),
        (b"age,job,grade,since,id\n30,clerk,low,2020-01-01,1\n", "rich"),
        (b"age,job,grade,since,rich,id,wage\n30,clerk,low,2020-01-01,no,1,5\n", "wage"),
        (b"age,age,job,grade,since,rich,id\n", "'age' is there twice"),
        (b"", "must begin with a line of column names"),
        (b'age,job,grade,since,rich,id\n30,"cl\n', "not a comma-separated table"),
        (b"\x1f\x8b\x08\x00garbage", "gzip data is truncated"),
    ],
)
def test_bad_tables_are_one_line(tmp_path, content, words):
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    with pytest.raises((InvalidInput, Corrupt), match=words) as problem:
        count(path, DOMAIN, ALL)
    assert "\n" not in str(problem.value)


def test_damaged_parquet_is_one_line(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "bad.parquet"
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(Corrupt, match="damaged"):
        count(path, DOMAIN, ALL)


def test_a_file_that_is_none(tmp_path):
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(DpfyError):
            list(chunks(DataFile.given(str(path))))


def test_other_things_are_refused():
    for data in (3, [1, 2], np.zeros((3, 4))):
        with pytest.raises(InvalidInput, match="data"):
            count(data, DOMAIN, ALL)
    with pytest.raises(InvalidInput, match="different lengths"):
        count(people(3) | {"age": ["3"]}, DOMAIN, ALL)
    with pytest.raises(InvalidInput, match="is not in the data"):
        count(people(3), DOMAIN, ALL, RecordOwners("person", 2))


def test_too_many_cells_are_refused_before_they_are_counted():
    wide = Domain.of({f"c{k}": 1000 for k in range(4)})
    with pytest.raises(InvalidInput, match="use fewer bins"):
        count({}, wide, [(0, 1, 2)])


def test_rows_are_left_out_where_the_schema_says_so_and_where_they_name_nobody():
    schema = [Number("age", 0, 9, drop=True), Category("job", ["a", "b"]), OpenColumn("who")]
    held = {"age": [1, "x", 3, "", 5], "job": list("abzba"), "who": ["p", "p", "", "q", "p"]}
    domain = Domain.given(schema)
    assert domain.sizes == (10, 3)
    found = count(held, domain, [(0,), (1,)])
    assert found.records == 3
    assert found.tables[0,].tolist() == [0, 1, 0, 1, 0, 1, 0, 0, 0, 0]
    assert found.tables[1,].tolist() == [2, 0, 1]
    owned = count(held, domain, [(1,)], RecordOwners("who", 1))
    assert owned.tables[1,].tolist() == [1, 0, 0]


def test_a_strict_schema_refuses_what_does_not_fit():
    strict = Domain.given(Schema((Number("age", 0, 9),), strict=True))
    with pytest.raises(InvalidInput, match="column age, row 2"):
        count({"age": [1, 10]}, strict, [(0,)])
