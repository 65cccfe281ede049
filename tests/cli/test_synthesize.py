"""`dpfy synthesize`: one line for what is wrong, one JSON object for what is right."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dpfy.cli.app import main

sys.path.insert(0, str(Path(__file__).parents[1] / "synthetic"))
from made_up_people import SCHEMA, people, write_csv


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "people.csv", people(200))
    (tmp_path / "people.toml").write_text(SCHEMA)
    return tmp_path


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


ASKED = (
    "synthesize",
    "people.csv",
    "--schema",
    "people.toml",
    "--epsilon",
    1,
    "--delta",
    1e-6,
    "--method",
    "mst",
)


def test_a_table_and_its_verification(folder, capsys):
    code, out, _ = call(capsys, *ASKED, "--out", "runs/s", "--ledger", "ledger.jsonl", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["epsilon"] <= 1.0
    assert (folder / found["table"]).read_text().splitlines()[0] == "age,job,grade,since,rich"
    assert call(capsys, "verify", "runs/s", "--ledger", "ledger.jsonl")[0] == 0
    config = (folder / "runs/s/config.toml").read_text()
    assert 'method = "mst"' in config
    assert "people.csv" not in config
    assert call(capsys, *ASKED, "--out", "runs/s", "--resume")[0] == 0
    code, _, err = call(capsys, *ASKED, "--out", "runs/s")
    assert code == 2
    assert "already holds a finished run" in err


def test_words_for_people(folder, capsys):
    code, out, _ = call(
        capsys,
        "synthesize",
        "table",
        *ASKED[1:],
        "--workload",
        "age,rich;job",
        "--target",
        "rich",
        "--rows",
        40,
    )
    assert code == 0
    assert "40 rows of 5 columns" in out
    assert "marginals of 2: off by" in out
    assert "differential privacy" in out


def test_evaluation_says_that_it_is_not_private(folder, capsys):
    write_csv(folder / "other.csv", people(200, 1))
    asked = (
        "synthesize",
        "evaluate",
        "people.csv",
        "other.csv",
        "--schema",
        "people.toml",
        "--degree",
        2,
    )
    code, out, _ = call(capsys, *asked, "--target", "rich", "--out", "page.html")
    assert code == 0
    assert out.startswith("NOT PRIVATE")
    assert "NOT PRIVATE" in (folder / "page.html").read_text()
    code, out, _ = call(capsys, *asked, "--public", "--json")
    assert code == 0
    assert "public" in json.loads(out)["private"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--epsilon", 0), "epsilon"),
        (("--method", "gan"), "method"),
        (("--workload", "age,wage"), "workload"),
        (("--workload", ";"), "workload"),
        (("--target", "wage"), "target"),
        (("--rows", -1), "rows"),
        (("--model-size", 0), "--model-size"),
        (("--schema", "none.toml"), "none.toml"),
        (("--user", "person", "--most-records", 3), "user"),
        (("--records", 1), "records"),
        (("--resume",), "--resume"),
        (("--device", "abacus"), "device"),
        (("--public", "none.csv"), "none.csv"),
    ],
)
def test_bad_requests_are_one_line_and_leave_nothing(folder, capsys, change, words):
    arguments = list(ASKED)
    if change[0] in arguments:
        arguments[arguments.index(change[0]) + 1] = change[1]
    else:
        arguments += change
    code, out, err = call(
        capsys,
        *arguments,
        *(() if "--resume" in change else ("--out", "runs/bad")),
        "--ledger",
        "ledger.jsonl",
    )
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert words in err
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("content", ["age,job\n1\n", "\xff", "a,b\n1,2\n", ""])
def test_bad_tables_are_one_line_and_cost_nothing(folder, capsys, content):
    (folder / "people.csv").write_bytes(content.encode("latin-1"))
    code, _, err = call(capsys, *ASKED, "--out", "runs/bad", "--ledger", "ledger.jsonl")
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert not (folder / "runs/bad").exists()
    assert (
        json.loads(call(capsys, "ledger", "show", "ledger.jsonl", "--delta", 1e-6, "--json")[1])[
            "epsilon"
        ]
        == 0
    )


def test_help_teaches(capsys):
    code, out, _ = call(capsys, "synthesize", "--help")
    assert code == 0
    assert "evaluate" in out
    code, out, _ = call(capsys, "synthesize", "table", "--help")
    assert "never from the data" in " ".join(out.split())
