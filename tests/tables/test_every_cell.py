"""Every hostile cell, in every column, through every command that reads a table: the same status and
the same messages as for the table without it.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_policy import (
    COMMANDS,
    NAMES,
    SCHEMA,
    TRAIN,
    WRITTEN,
    call,
    columns,
    told,
    with_cell,
    written,
)

from dpfy.tables import Schema

PERSON = ["--person", "id", "--at-most", 3]
TABLE = ["t.csv", "--schema", "s.toml"]
COST = ["--epsilon", 2, "--delta", "1e-4"]
SQL = "SELECT job, COUNT(*), AVG(age) FROM t WHERE pay >= 10 GROUP BY job"
EVERY: dict[str, list[Any]] = {
    "query": [*COMMANDS["query"], *PERSON],
    "query in SQL": ["query", "t.csv", SQL, *TABLE[1:], "--epsilon", 2],
    "synthesize by mst": ["synthesize", *TABLE, *COST, "--method", "mst", "--rows", 20, *PERSON],
    "synthesize by aim": ["synthesize", *TABLE, *COST, "--method", "aim", "--rows", 20],
    "fit logistic": ["fit", *TABLE, *COST, "--estimator", "logistic", *PERSON],
    "fit naive-bayes": ["fit", *TABLE, *COST, "--estimator", "naive-bayes"],
    "fit forest": ["fit", *TABLE, *COST, "--estimator", "forest", *PERSON],
    "fit kmeans": ["fit", "t.csv", "--schema", "numbers.toml", *COST, "--estimator", "kmeans"],
    "train": ["train", *TABLE, *TRAIN],
    "tune": ["tune", *TABLE, "--records", 48, *COST, "--model", "linear", "--trials", 2, "--set",
             "training.steps=2", "--set", "tune.held_out=0.5", "--law", "logarithmic", "--over",
             "training.learning_rate=0.1..2 log"],
    "serve teach": ["serve", "teach", *TABLE, "--voters", 5, *PERSON],
    "predict": ["predict", "run", "t.csv"],
    "predict an estimator": ["predict", "fitted", "t.csv"],
}  # fmt: skip
"""Commands whose answer is about the records are compared by status and messages alone."""
ANSWERS = ("query", "query in SQL", "predict", "predict an estimator")
READS_NUMBERS = ("age", "pay", "note")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("s.toml").write_text(SCHEMA.to_toml())
    few = [
        c if c.name in READS_NUMBERS else type(SCHEMA.named["id"])(c.name) for c in SCHEMA.columns
    ]
    Path("numbers.toml").write_text(Schema.of(few).to_toml())
    written(Path("t.csv"), columns())
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("column", NAMES)
@pytest.mark.parametrize("command", EVERY)
def test_a_command_says_the_same_whatever_stands_in_a_cell(
    command: str, column: str, folder: Path, capsys: Any
) -> None:
    made = {"predict": ("train", "run"), "predict an estimator": ("fit logistic", "fitted")}
    if command in made:
        before, out = made[command]
        assert call(capsys, *EVERY[before], "--out", out)[0] == 0

    def said() -> tuple[int, str, str]:
        out = [] if command in made else ["--out", "out"]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            status, shown, err = told(*call(capsys, *EVERY[command], *out, "--json"))
        if Path("out").is_dir():
            shutil.rmtree("out")
        assert [str(w.message) for w in warned if "dpfy" in str(w.filename)] == []
        assert "canary" not in shown + err or command in made
        return status, "" if command in ANSWERS else shown, err

    before_it = said()
    assert before_it[0] == 0, before_it
    for cell in WRITTEN:
        written(Path("t.csv"), with_cell(column, cell))
        assert said() == before_it, cell[:40]
