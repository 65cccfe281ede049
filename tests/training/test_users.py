"""Users as the unit of privacy from a configuration: a column that says whose each record is."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from dpfy.cli.app import main
from dpfy.core import events
from dpfy.core.unit import Unit
from dpfy.data import source
from dpfy.data.config import DataConfig
from dpfy.data.users import UserRecords
from dpfy.report.words import up as words_up

SCHEMA = (
    '[columns.a]\nkind = "number"\nrange = [0, 9]\n[columns.c]\nkind = "label"\nclasses = ["x", '
    '"y"]\n'
)
ROWS = [(f"p{k % 40:02d}", k % 10, "xy"[k // 3 % 2]) for k in range(150)]
WORDS = ["--set", "data.user=person", "--set", "data.most_records=3"]


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    shown = capsys.readouterr()
    return stop.value.code, shown.out, shown.err


@pytest.fixture
def table(tmp_path):
    def write(name: str, rows) -> str:
        (tmp_path / name).write_text(
            "person,a,c\n" + "\n".join(",".join(map(str, row)) for row in rows) + "\n"
        )
        return str(tmp_path / name)

    (tmp_path / "schema.toml").write_text(SCHEMA)
    (tmp_path / "job.toml").write_text(
        f'[data]\nkind = "csv"\npath = "{write("people.csv", ROWS)}"\nschema = '
        f'"{tmp_path}/schema.toml"\n'
        '[model]\nname = "linear"\n[privacy]\nepsilon = 3.0\ndelta = 1e-3\nrecords = '
        "36\n[training]\nsteps = 3\nbatch_size = 10\n"
    )
    return write


def config(tmp_path, **named):
    places = {"path": str(tmp_path / "people.csv"), "schema": str(tmp_path / "schema.toml")}
    return DataConfig(**({"kind": "csv", "pick": "first"} | places | named))


def test_users_are_rows_and_held_out_whole(table, tmp_path):
    found = source.load(config(tmp_path, user="person", most_records=3))
    assert isinstance(found.train, UserRecords)
    assert found.train.rows_each == 3
    assert found.train.unit == Unit("user", 3)
    assert found.features == (1,)
    assert 0 < 40 - len(found.train) == len(found.test) / 3 < 20


def test_whether_a_user_is_held_out_depends_on_that_user_alone(table, tmp_path):
    def users(rows):
        """Feature 0 says who: the person's number, over 100."""
        table("people.csv", [(who, int(who[1:]) / 10, "x") for who, _, _ in rows])
        return {
            round(v, 4)
            for v in source.load(config(tmp_path, user="person", most_records=3))
            .train.tensors[0]
            .flatten()
            .tolist()
        }

    whole = users(ROWS)
    for gone in ("p00", "p17", "p39"):
        fewer = users([row for row in ROWS if row[0] != gone])
        assert whole - fewer <= {round((int(gone[1:]) / 10) / 9 * 2 - 1, 4)}
        assert fewer <= whole
    assert users(ROWS[::-1]) == whole


def test_a_test_file_needs_no_owners(table, tmp_path):
    table("test.csv", ROWS[:30])
    found = source.load(
        config(tmp_path, user="person", most_records=3, test_path=str(tmp_path / "test.csv"))
    )
    assert (len(found.train), len(found.test)) == (40, 30)
    (tmp_path / "bare.csv").write_text("a,c\n1,x\n2,y\n")
    found = source.load(
        config(tmp_path, user="person", most_records=3, test_path=str(tmp_path / "bare.csv"))
    )
    assert (len(found.train), len(found.test)) == (40, 2)


def test_the_column_may_be_ignored_in_the_schema_but_not_read(table, tmp_path):
    (tmp_path / "schema.toml").write_text(SCHEMA + "[columns.person]\nignore = true\n")
    assert source.load(config(tmp_path, user="person", most_records=3)).features == (1,)


def test_arrays_with_owners(tmp_path):
    x, y = np.arange(60.0).reshape(30, 2), np.arange(30) % 2
    for owners in (np.arange(30) // 3, np.array([f"user {k // 3}" for k in range(30)])):
        np.savez(tmp_path / "a.npz", x=x, y=y, who=owners)
        np.savez(
            tmp_path / "b.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4], who_train=owners
        )
        for name, rows in (("a", None), ("b", 10)):
            made = DataConfig(
                kind="npz",
                path=str(tmp_path / f"{name}.npz"),
                classes=2,
                user="who",
                most_records=2,
                pick="first",
            )
            found = source.load(made)
            assert found.train.rows_each == 2
            assert rows is None or (len(found.train), len(found.test)) == (rows, 4)


@pytest.mark.parametrize(
    "extra", [[], ["--set", "training.clip=quantile"], ["--mechanism", "tree"]], ids=str
)
def test_the_command_line_trains_users_and_verifies(capsys, table, tmp_path, extra):
    status, out, err = call(
        capsys, "train", tmp_path / "job.toml", *WORDS, *extra, "--out", tmp_path / "run", "--json"
    )
    assert status == 0, err
    assert json.loads(out)["unit"] == "user"
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert (card["unit"]["name"], card["unit"]["most_records"]) == ("user", 3)
    assert "at most 3 records" in card["unit"]["meaning"]
    assert call(capsys, "verify", tmp_path / "run")[0] == 0


def test_the_ledger_of_users_is_not_that_of_records(capsys, table, tmp_path):
    ledger = tmp_path / "people.jsonl"
    assert call(capsys, "ledger", "create", ledger, "--epsilon", 9, "--delta", 1e-3)[0] == 0
    status, _, err = call(
        capsys,
        "train",
        tmp_path / "job.toml",
        *WORDS,
        "--ledger",
        ledger,
        "--out",
        tmp_path / "run",
    )
    assert status == 2
    assert "ledger unit" in err
    assert not (tmp_path / "run").exists()


BAD = [
    (["--set", "data.user=nobody", "--set", "data.most_records=3"], "must be a column"),
    (["--set", "data.user=a", "--set", "data.most_records=3"], "is a feature or the label"),
    (["--set", "data.user=c", "--set", "data.most_records=3"], "is a feature or the label"),
    (["--set", "data.user=person", "--set", "data.most_records=0"], "data.most_records"),
    (["--set", "data.user=person", "--set", "data.most_records=10000000"], "data.most_records"),
    ([*WORDS, "--set", "data.test_fraction=1e-9"], "data.test_fraction"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=[" ".join(map(str, w)) for w, _ in BAD])
def test_bad_owners_are_one_line(capsys, table, tmp_path, words, said):
    status, out, err = call(
        capsys, "train", tmp_path / "job.toml", *words, "--out", tmp_path / "run"
    )
    assert (status, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("pick", ["random", "first"])
@pytest.mark.parametrize("records", [12, 36, 300])
def test_how_many_users_there_are_is_told_to_nobody(capsys, table, tmp_path, records, pick):
    """A table of 40 users and one of 39 say the same, whatever number was stated."""
    said = []
    for rows in (ROWS, [row for row in ROWS if row[0] != "p03"]):
        table("people.csv", rows)
        words = [*WORDS, "--set", f"data.pick={pick}", "--records", records, "--json"]
        out = tmp_path / f"run{len(said)}"
        status, told, _ = call(capsys, "train", tmp_path / "job.toml", *words, "--out", out)
        assert status == 0
        said.append({k: v for k, v in json.loads(told).items() if k not in ("run", "seconds")})
    assert said[0] == said[1]


@pytest.mark.parametrize("records", [12, 120, 3000])
def test_how_many_records_there_are_is_told_to_nobody(capsys, table, tmp_path, records):
    """Without users: a table and one without its first row say the same, whatever number was
    stated.
    """
    schema = SCHEMA + "[columns.person]\nignore = true\n"
    (tmp_path / "schema.toml").write_text(schema)
    said = []
    for rows in (ROWS, ROWS[1:]):
        table("people.csv", rows)
        out = tmp_path / f"run{len(said)}"
        words = ["--records", records, "--json", "--delta", 1e-5]
        status, told, _ = call(capsys, "train", tmp_path / "job.toml", *words, "--out", out)
        assert status == 0
        said.append({k: v for k, v in json.loads(told).items() if k not in ("run", "seconds")})
    assert said[0] == said[1]


@pytest.mark.parametrize("records", [12, 118, 3000])
def test_how_many_records_of_users_there_are_is_told_to_nobody(capsys, table, tmp_path, records):
    """Records drawn one by one: a table and one without a person say the same, whatever number was
    stated.
    """
    said = []
    for rows in (ROWS, [row for row in ROWS if row[0] != ROWS[0][0]]):
        table("people.csv", rows)
        out = tmp_path / f"run{len(said)}"
        words = [*WORDS, "--set", "data.draw=record", "--records", records, "--delta", 1e-5]
        status, told, err = call(
            capsys, "train", tmp_path / "job.toml", *words, "--json", "--out", out
        )
        assert status == 0, err
        said.append({k: v for k, v in json.loads(told).items() if k not in ("run", "seconds")})
    assert said[0] == said[1]


def test_a_wrong_public_number_of_records_is_explained_without_a_look_at_labels(
    capsys, table, tmp_path
):
    """Rows whose label cannot be used are left out, and not out of the numbers that are told."""
    schema = SCHEMA + "[columns.person]\nignore = true\n"
    (tmp_path / "schema.toml").write_text(schema)
    said = []
    for labels in ("xy", "x?"):
        table("people.csv", [(p, a, labels["xy".index(c)]) for p, a, c in ROWS])
        words = ["--records", 12, "--out", tmp_path / "run"]
        words += ["--set", "privacy.adjacency=replace-one"]
        status, _, err = call(capsys, "train", tmp_path / "job.toml", *words)
        assert status == 2
        assert "there are 120 records to train on (150 less the 30 held out" in err
        said.append(err)
    assert said[0] == said[1]


def test_a_record_that_names_no_owner_is_left_out(table, tmp_path):
    def rows():
        found = source.load(config(tmp_path, user="person", most_records=3))
        return [tensor.tolist() for tensor in found.train.tensors], found.units

    table("people.csv", ROWS)
    without = rows()
    table("people.csv", [*ROWS[:5], ("", 1, "x"), *ROWS[5:]])
    assert rows() == without


def test_places_that_no_memory_holds_are_refused_before_they_are_made(
    capsys, table, tmp_path, monkeypatch
):
    monkeypatch.setattr("dpfy.data.users.MOST_PLACES", 100)
    fixed = [*WORDS, "--set", "data.pick=first"]
    status, _, err = call(capsys, "train", tmp_path / "job.toml", *fixed, "--out", tmp_path / "run")
    assert status == 2
    assert "data.most_records: got 3; asks for more than 100 numbers" in err


def test_an_audit_of_users_is_refused_before_anything_is_read(capsys, table, tmp_path):
    status, _, err = call(
        capsys,
        "audit",
        "train",
        tmp_path / "job.toml",
        *WORDS,
        "--canaries",
        20,
        "--out",
        tmp_path / "run",
    )
    assert status == 2
    assert "audit records" in err
    assert not (tmp_path / "run").exists()


def test_features_of_images_are_made_record_by_record():
    from dpfy.data.users import by_user
    from dpfy.training.job import _extracted

    pixels = torch.rand(6, 1, 2, 2)
    users = by_user((pixels, torch.arange(6)), torch.tensor([0, 0, 1, 1, 1, 2]), 2)
    made = _extracted(users, lambda records: records.flatten(1))
    assert isinstance(made, UserRecords)
    assert torch.equal(made.tensors[0], users.tensors[0].flatten(2))
    assert made.rows_each == 2


def test_records_drawn_one_by_one_are_billed_for_all_of_a_user(capsys, table, tmp_path):
    """ELS: at most k records of a user are kept, and the epsilon is that of k records together."""
    words = [
        *WORDS,
        "--set",
        "data.draw=record",
        "--set",
        "privacy.noise_multiplier=2",
    ]
    own = {"user": "person", "most_records": 3, "draw": "record", "pick": "random"}
    found = source.load(config(tmp_path, **own)).units
    status, out, err = call(
        capsys,
        "train",
        tmp_path / "job.toml",
        *words,
        "--records",
        found,
        "--out",
        tmp_path / "run",
        "--json",
    )
    assert status == 0, err
    from dpfy.accounting import epsilon, user_level

    due = epsilon(user_level.of_group(events.poisson(2.0, 10 / found, 3), 3), 1e-3)
    assert json.loads(out)["epsilon"] == pytest.approx(due, rel=1e-9)
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert "for one user" in card["statement"]
    rows = {row["what"]: row for row in card["sections"][0]["assumptions"]}
    assert "one user owns at most 3" in rows["contribution"]["assumed"]
    assert "mixture of Gaussians" in card["sections"][0]["theorem"]
    assert call(capsys, "verify", tmp_path / "run")[0] == 0


def test_a_users_day_is_a_unit(capsys, table, tmp_path):
    rows = [(who, a, c, f"2026-03-{1 + k // 40:02d}") for k, (who, a, c) in enumerate(ROWS)]
    lines = "\n".join(",".join(map(str, row)) for row in rows)
    (tmp_path / "people.csv").write_text(f"person,a,c,when\n{lines}\n")
    words = [*WORDS, "--set", "data.time=when", "--set", "data.window=day"]
    words += ["--records", 120]
    status, _, err = call(
        capsys, "train", tmp_path / "job.toml", *words, "--out", tmp_path / "run", "--json"
    )
    assert status == 0, err
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert "for one user's day" in card["statement"]
    assert card["unit"]["protection"] == "window"
    rows = card["formal"]["several_windows"]["rows"]
    assert [row["windows"] for row in rows] == [2, 7, 30]
    assert (
        card["guarantee"]["epsilon"] < rows[0]["epsilon"] < rows[1]["epsilon"] < rows[2]["epsilon"]
    )
    assert (
        f"2: epsilon {words_up(rows[0]['epsilon'])}" in (tmp_path / "run" / "report.md").read_text()
    )
    assert call(capsys, "verify", tmp_path / "run")[0] == 0
