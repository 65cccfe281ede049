"""Records with several owners: every person owns at most k of those that are used, whatever the
records hold, and what one person's records hold moves every sum by at most k contributions.
"""

from __future__ import annotations

import sys
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
import torch

import dpfy
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import Adjacency, Unit, check_content, user_unit
from dpfy.data import source
from dpfy.data.config import DataConfig
from dpfy.data.given import as_source
from dpfy.data.owners import Owned, Users
from dpfy.engines.contributions import ContributionLimit
from dpfy.estimators import LogisticRegression
from dpfy.mechanisms.grid import Grid
from dpfy.queries.plan import QueryTerms, plan
from dpfy.queries.run import table_of
from dpfy.tables import Category, Number, Schema
from dpfy.tables.shared import numbered, within_limit

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from calls import call

SETS = [set(found) for size in range(4) for found in combinations(range(3), size)]
"""Owners that a record of three persons can have, nobody among them."""


def array(records: tuple[set[int], ...]) -> np.ndarray:
    return np.array([[k if k in owners else -1 for k in range(3)] for owners in records])


@pytest.mark.parametrize("most", [1, 2])
def test_every_hypergraph_of_three_persons_and_four_records_keeps_the_limit(most):
    for records in product(SETS, repeat=4):
        owners = array(records)
        kept = within_limit(owners, most)
        degrees = [(kept & (owners == person).any(axis=1)).sum() for person in range(3)]
        assert max(degrees) <= most
        for row in range(4):  # none is left out without need
            full = any(degrees[person] == most for person in records[row])
            assert kept[row] or full or not records[row]
        for left in product([False, True], repeat=4):  # less of what is used: the others remain
            some = kept & np.array(left)
            assert within_limit(owners[some], most).all()


def test_a_record_less_can_change_all_others_so_adding_and_removing_is_refused():
    chain = np.array([[k, k + 1] for k in range(20)])
    whole = within_limit(chain, 1)
    less = within_limit(np.where(chain == 0, -1, chain)[1:], 1)
    assert (whole[1:] != less).all()
    for adjacency in (Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE):
        with pytest.raises(Unsupported, match="zero-out"):
            check_content(user_unit(2, shared=True), adjacency)
        with pytest.raises(Unsupported, match="zero-out"):
            dpfy.dpsgd(100, 10, steps=1, unit=Unit("user", 2, "content"), adjacency=adjacency)
    with pytest.raises(InvalidInput, match="draw"):
        dpfy.dpsgd(100, 10, steps=1, unit=Unit("user", 2, "content"), adjacency="zero-out")


def test_the_same_word_is_the_same_person_in_every_column():
    columns = [["a", "b ", "", None], np.array([1, 2, 3, 4]), [1.0, "b", "a", float("nan")]]
    found = numbered(columns)
    assert found[0, 0] == found[2, 2]
    assert found[1, 0] == found[1, 2]
    assert found[0, 1] == found[0, 2]
    assert found[2, 0] == found[3, 0] == found[3, 2] == -1


QUERIES = [
    "count()", "sum(v)", "mean(v) by w", "histogram(v, 0, 1, 2, 3)", "table(w, u)", "unfit(v)",
    "margins(w, u, order=1)", "variance(v)", "count() by top(w)", "count() by u where v >= 1",
]  # fmt: skip


@pytest.mark.parametrize("text", QUERIES)
@pytest.mark.parametrize("most", [1, 3])
def test_what_the_records_of_one_person_hold_moves_every_sum_by_the_bound(text, most):
    rng = np.random.default_rng(most)
    schema = Schema.of(
        [Number("v", 0, 3, drop=True), Category("w", ["p", "q"]), Category("u", ["r", "s", "t"])]
    )
    terms = QueryTerms(1.0, 1e-6, "a,b,c", most)
    size, checked = 40, 0
    table = {name: rng.integers(0, 8, size).astype(str).tolist() for name in "abc"}
    table |= {
        "v": rng.choice(["", "0", "1.5", "3", "9"], size).tolist(),
        "w": rng.choice(["p", "q", "?"], size).tolist(),
        "u": rng.choice(["r", "s", "t"], size).tolist(),
    }
    held = dpfy.Dataset(table, schema, unit=dpfy.Person("a,b,c", most))
    made = plan(text, held.table_schema, terms)
    limit = ContributionLimit(most)
    for person in map(str, range(8)):
        theirs = [person in (table["a"][k], table["b"][k], table["c"][k]) for k in range(size)]
        used = table_of(table, made)
        codes = numbered([table[name] for name in "abc"])
        kept = within_limit(codes, most)
        assert used.rows() == kept.sum()
        gone = [k for k in np.flatnonzero(kept) if theirs[k]]
        assert len(gone) <= most
        # Zero-out: the same graph, and of this person's records nothing is counted.
        rest = [k for k in np.flatnonzero(kept) if not theirs[k]]
        without = table_of({name: [c[k] for k in rest] for name, c in table.items()}, made)
        assert without.rows() == len(rest)
        for statistic in made.statistics:
            if not hasattr(statistic, "total"):
                continue
            statistic = statistic.knowing({"w": ("p", "q")})
            for norm in ("l1", "l2"):
                one = limit.bound(statistic.one(norm))
                grid = None
                if not statistic.whole:
                    grid = Grid(-20)
                sums = [statistic.total(t, limit, norm, grid).value for t in (used, without)]
                scale = 1.0 if grid is None else 2.0**-20
                raw = [np.asarray(getattr(s, "counts", s), float) * scale for s in sums]
                moved = np.abs(raw[0] - raw[1]).ravel()
                slack = 1e-6 + 64 * scale * (grid is not None)
                assert moved.sum() <= one.l1 + slack
                assert np.sqrt((moved**2).sum()) <= one.l2 + slack
                checked += 1
    assert checked or "top" in text


def test_which_rows_are_used_does_not_depend_on_what_they_hold(tmp_path):
    """The first row of a chain is left out for what it holds, and nobody takes its place."""
    table = {"a": ["0", "1", "2", "3"], "b": ["1", "2", "3", "4"], "v": ["1"] * 4}
    schema = [Number("v", 0, 3, drop=True)]
    terms = QueryTerms(1.0, 1e-6, "a,b", 1)
    made = plan("count()", dpfy.Dataset(table, schema).table_schema, terms)
    counts = []
    for first in ("1", "", "9", "?"):
        found = table_of(table | {"v": [first, "1", "1", "1"]}, made)
        left_out = found.table.left_out()
        counts.append(found.rows() - (0 if left_out is None else int(left_out.sum())))
    assert counts == [2, 1, 2, 1]


@pytest.mark.parametrize("pick", ["first", "random"])
def test_training_takes_the_same_records_in_every_form(pick):
    rng = np.random.default_rng(3)
    owners = rng.integers(0, 12, (80, 2))
    x = torch.arange(80.0)[:, None]
    forms = [
        owners,
        torch.from_numpy(owners),
        owners.tolist(),
        [tuple(map(str, o)) for o in owners],
    ]
    fields = {"x": x, "a": torch.from_numpy(owners[:, 0]), "b": torch.from_numpy(owners[:, 1])}
    kept = [as_source(Owned(x, Users(of, pick), 3, single=True)).rows.tolist() for of in forms]
    named = as_source(Owned(fields, Users("a,b", pick), 3, single=True))
    assert all(rows == kept[0] for rows in [*kept, named.rows.tolist()])
    degrees = np.bincount(np.concatenate([np.unique(owners[k]) for k in kept[0]]))
    assert degrees.max() <= 3
    assert len(kept[0]) >= 12
    with pytest.raises(Unsupported, match="zero-out"):
        Owned(x, Users(owners), 3)


def rows(path, size=300, seed=0):
    rng = np.random.default_rng(seed)
    lines = ["a,b,v,w"]
    for _ in range(size):
        a, b = rng.integers(0, 60, 2)
        lines.append(f"p{a},p{b},{rng.normal():.3f},{rng.choice(['no', 'yes'])}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_one_ledger_for_statistics_and_training_of_messages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows(tmp_path / "m.csv")
    people = dpfy.Dataset(
        "m.csv",
        [Number("v", -3, 3), dpfy.Label("w", ["no", "yes"])],
        unit=dpfy.Person("a,b", at_most=3),
        ledger="m.jsonl",
        budget=dpfy.Budget(8, 1e-6),
    )
    answers = dpfy.query(people, "count(), mean(v)", epsilon=0.5)
    net = torch.nn.Linear(people.width, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    result = dpfy.fit(net, people, optimizer=optimizer, epsilon=2.0, steps=3, batch_size=20)
    for released in (answers, result):
        assert all(finding.holds for finding in released.verify())
        assert released.report["unit"]["protection"] == "content"
        assert released.report["guarantee"]["adjacency"] == "zero-out"
        assert "not who owns which record" in released.report["statement"]
    spent = people.spent().epsilon
    with pytest.raises(Unsupported, match="several owners"):
        dpfy.synthesize(people, epsilon=1.0)
    with pytest.raises(Unsupported, match="several owners"):
        LogisticRegression(epsilon=1.0).fit(people, target="w")
    with pytest.raises(Unsupported, match="several owners"):
        dpfy.serve(people, epsilon=1.0, answers=10)
    with pytest.raises(Unsupported, match="several owners"):
        dpfy.tune(lambda trial: 1.0, {"x": [1, 2]}, people, epsilon=1.0, trials=3)
    with pytest.raises(Unsupported, match="several owners"):
        dpfy.tune(LogisticRegression(), {"alpha": [1, 2]}, people, epsilon=1.0, trials=3)
    assert people.spent().epsilon == spent


@pytest.mark.parametrize("column", ["a,", ",", "a,a", "", " , b", 5, None])
def test_owners_are_different_columns(column):
    with pytest.raises(InvalidInput, match="person"):
        dpfy.Person(column, at_most=3)


SCHEMA = """
[columns.v]
kind = "number"
range = [-3, 3]
drop = true
[columns.w]
kind = "label"
classes = ["no", "yes"]
[columns.a]
ignore = true
[columns.b]
ignore = true
"""


@pytest.mark.parametrize("pick", ["first", "random"])
def test_files_take_records_before_they_look_at_them(tmp_path, pick):
    """A row that is left out for what it holds gives no room to another one; records with the same
    owners are held out together.
    """
    (tmp_path / "s.toml").write_text(SCHEMA)
    clean = rows(tmp_path / "m.csv").read_text().splitlines()
    config = DataConfig(
        "csv", path=str(tmp_path / "m.csv"), schema=str(tmp_path / "s.toml"), user="a,b",
        most_records=3, pick=pick,
    )  # fmt: skip
    assert config.draw == "record"
    known = source.load(config, every_row=False)
    used = [set(map(tuple, part.users.of.tolist())) for part in (known.owned, known.held)]
    assert used[0].isdisjoint(used[1])
    first = known.owned.grouped(known.train)
    assert len(first) == len(known.train)  # all that are left are used
    person = known.owned.users.of[0, 0]
    dirty = [
        ",".join([*r.split(",")[:2], "?", "no"]) if person in r.split(",")[:2] else r for r in clean
    ]
    assert dirty != clean
    (tmp_path / "m.csv").write_text("\n".join(dirty) + "\n")
    other = source.load(config, every_row=False)
    kept = (known.owned.users.of != person).all(axis=1)
    assert 0 < (~kept).sum() <= 3
    assert np.array_equal(other.owned.users.of, known.owned.users.of[kept])
    assert torch.equal(other.train.tensors[0], known.train.tensors[0][kept])


def test_the_command_line_trains_on_messages_and_asks_about_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows(tmp_path / "m.csv")
    (tmp_path / "s.toml").write_text(SCHEMA)
    people = ["--schema", "s.toml", "--person", "a, b", "--at-most", 3]
    status, _, err = call(capsys, "query", "m.csv", "mean(v) by w", *people, "--epsilon", 1)
    assert status == 0, err
    training = ["--records", 70, "--steps", 2, "--model", "linear", "--epsilon", 3, "--delta", 1e-5]
    status, _, err = call(capsys, "train", "m.csv", *people, *training)
    assert status == 2
    assert "privacy.adjacency=zero-out" in err
    zero = ["--set", "privacy.adjacency=zero-out", "--out", "run"]
    status, _, err = call(capsys, "train", "m.csv", *people, *training, *zero)
    assert status == 0, err
    assert call(capsys, "verify", "run")[0] == 0
    for words in (["data.window=day", "data.time=v"], ["data.test=billed"]):
        more = [word for text in words for word in ("--set", text)]
        assert call(capsys, "train", "m.csv", *people, *training, *zero, *more)[0] == 2
