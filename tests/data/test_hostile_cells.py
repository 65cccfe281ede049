"""One contract for all that reads a table: whatever stands in a private cell, every estimator fits and
every command ends as for the table without it, and says the same. The cells are those of
tests/tables/test_policy.py.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpfy
from dpfy.estimators.estimator import PrivateClassifier, PrivateRegressor, every
from dpfy.tables import Label, Number, Schema

sys.path[:0] = [str(Path(__file__).parents[1] / part) for part in ("cli", "tables")]
from calls import call  # noqa: E402
from test_policy import (  # noqa: E402
    COMMANDS,
    NAMES,
    OBJECTS,
    ODD,
    ROWS,
    SCHEMA,
    WRITTEN,
    columns,
    folder,
    frame,
    silence,
    told,
    written,
)

assert folder
SMALL: dict[str, dict[str, Any]] = {
    name: {"n_estimators": 2, "max_depth": 2}
    for name in ("RandomForestClassifier", "RandomForestRegressor", "GradientBoostingClassifier",
                 "GradientBoostingRegressor")
} | {
    "KMeans": {"n_clusters": 2}, "GaussianMixture": {"n_components": 2}, "PCA": {"n_components": 1},
}  # fmt: skip
PEOPLE = dpfy.Person("id", 2)


def tried(name: str, cells: dict[str, list[Any]], person: bool) -> None:
    """Fit the estimator of that name on these cells, for persons if asked."""
    kind = every()[name]
    supervised = issubclass(kind, PrivateClassifier | PrivateRegressor)
    target = "y" if issubclass(kind, PrivateClassifier) else "pay"
    numbers = [c for c in SCHEMA.columns if isinstance(c, Number)]
    used = SCHEMA.columns if supervised else numbers
    if issubclass(kind, PrivateRegressor):
        used = tuple(c for c in SCHEMA.columns if not isinstance(c, Label))
    if not person:
        used = tuple(c for c in used if c.name != "id")
    names = [c.name for c in used] + (["id"] if person and not supervised else [])
    held = frame({n: cells[n] for n in names if n != target or not supervised})
    made = kind(
        schema=Schema(tuple(c for c in used if c.name != "id")),
        random_state=1,
        epsilon=2.0,
        delta=1e-5,
        unit=PEOPLE if person else None,
        **SMALL.get(name, {}),
    )
    if supervised:
        made.target = target
    made.fit(held, *((np.array(cells[target], object),) if supervised else ()))


@pytest.mark.parametrize("person", [False, True], ids=["record", "person"])
@pytest.mark.parametrize("name", sorted(every()))
def test_every_estimator_fits_whatever_stands_in_a_cell(
    name: str, person: bool, caplog: Any, capsys: Any
) -> None:
    """All odd cells of every column at once."""
    odd = [*OBJECTS, *WRITTEN]
    cells = {column: held * 3 for column, held in columns().items()}
    with silence(caplog, capsys):
        tried(name, cells, person)
    for k, column in enumerate(NAMES):
        start = (7 * k) % (len(cells[column]) - len(odd))
        cells[column][start : start + len(odd)] = odd
    with silence(caplog, capsys):
        tried(name, cells, person)


PERSON = ["--person", "id", "--at-most", 2]
MORE: dict[str, list[Any]] = {
    "tune": [
        "tune", "t.csv", "--set", "data.schema=s.toml", "--records", 48, "--epsilon", 8, "--delta",
        "1e-3", "--model", "linear", "--set", "training.steps=2", "--set", "training.batch_size=16",
        "--over", "training.learning_rate=0.1..1 log", "--trials", 2, "--route", "composition",
    ],
    "query persons": [*COMMANDS["query"], *PERSON],
    "fit persons": [*COMMANDS["fit"], *PERSON],
    "train persons": [*COMMANDS["train"], *PERSON],
    "serve teach": ["serve", "teach", "t.csv", "--schema", "s.toml", "--voters", 4],
    "query owners": [
        "query", "t.csv", "count(), mean(age) by job", "--schema", "s.toml", "--epsilon", 2,
        "--delta", "1e-6", "--person", "id,note", "--at-most", 2,
    ],
}  # fmt: skip
MORE["tune persons"] = [*MORE["tune"], *PERSON, "--set", "tune.held_out=0.5"]
ALL = COMMANDS | MORE
CELLS = ["", "$1,234.50", "abc", "1e400", "287000-01-01", "two\nlines", "\0", "medium"]


@pytest.mark.parametrize("command", MORE)
def test_commands_end_alike_whatever_stands_in_a_cell(
    command: str, folder: Path, capsys: Any
) -> None:
    ended(command, [(NAMES[k], CELLS[k]) for k in (0, 2, 5)], capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", ALL)
def test_every_command_ends_alike_for_every_cell(
    command: str, name: str, folder: Path, capsys: Any
) -> None:
    ended(command, [(name, cell) for cell in WRITTEN], capsys)


def ended(command: str, cells: list[tuple[str, str]], capsys: Any) -> None:
    """Run a command on the table and on its neighbours, and compare status and messages."""
    if command == "query owners":  # no feature may say whose a row is
        Path("s.toml").write_text(SCHEMA_OF_OWNERS)
    written(Path("t.csv"), columns())
    for run, made in (("run", "train"), ("fitted", "fit")):
        if command.startswith("predict"):
            assert call(capsys, *COMMANDS[made], "--out", run)[0] == 0
    before = None
    for number, (name, cell) in enumerate([(NAMES[0], columns()[NAMES[0]][ODD]), *cells]):
        held = columns()
        held[name][ODD] = cell
        written(Path("t.csv"), held)
        out = [] if command.startswith("predict") else ["--out", f"out{number}"]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            status, shown, said = told(*call(capsys, *ALL[command], *out))
        assert [str(w.message) for w in warned if "dpfy" in str(w.filename)] == []
        assert "canary" not in shown + said
        assert " row " not in said
        said = said.replace(f"out{number}", "out")
        before = (status, said) if before is None else before
        assert before[0] == 0, said
        assert (status, said) == before, (name, cell)
    assert len(columns()["age"]) == ROWS


SCHEMA_OF_OWNERS = (
    Schema(tuple(c for c in SCHEMA.columns if c.name not in ("note", "id"))).to_toml()
    + "[columns.note]\nignore = true\n[columns.id]\nignore = true\n"
)
