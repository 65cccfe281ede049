"""One policy for cells, in every command that reads tables: whatever stands in a private cell, the
outcome and every message are those of the table without it. No error, no row, no count.
"""

from __future__ import annotations

import csv
import io
import logging
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from dpfy.core.files import DataFile
from dpfy.data import source
from dpfy.data import table as training
from dpfy.data.config import DataConfig
from dpfy.estimators import (
    GaussianMixture,
    KMeans,
    LogisticRegression,
    NaiveBayes,
    RandomForestClassifier,
)
from dpfy.queries.run import query
from dpfy.synthetic.counts import count, encoded
from dpfy.synthetic.domain import Domain
from dpfy.tables import Category, Date, Label, Number, OpenColumn, Schema, Text
from dpfy.tables.sources import read_table
from dpfy.tables.table import PrivateTable

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from calls import call


class Strange:
    """An object that raises whatever is asked of it."""

    def __str__(self) -> str:
        raise RuntimeError("canary-4711")

    __repr__ = __float__ = __int__ = __str__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("canary-4711")

    def __hash__(self) -> int:
        raise RuntimeError("canary-4711")


WRITTEN = [
    "", " ", "?", "NA", "nan", "NaN", "None", "null", "$1,234.50", "1,5", "1_000", "abc",
    "canary-4711", "inf", "-inf", "Infinity", "1e400", "-1e400", "0x1f", "1e-400", "-0", "١٢",
    "12 years", "31.12.2020", "2020-13-01", "2020-02-30", "20200101", "287000-01-01",
    "0001-01-01", "9999-12-31T23:59:59", "12:30", "\0", "a\0b", "x" * 200_000, "\ufeff1",
    '"quoted"', "two\nlines", "a,b;c\td", "=1+1", "true", "other", "(other)", "medium", "😀",
]  # fmt: skip
"""Cells as a file holds them."""
OBJECTS = [
    None, True, False, 5, -1, 10**400, 1.5, math.nan, math.inf, -math.inf, b"bytes", b"\xff", 1j,
    Decimal("1.5"), Decimal("NaN"), Decimal("sNaN"), Decimal("1e400"), date(2020, 2, 3),
    datetime(2020, 2, 3, 4), pandas.Timestamp("2020-02-03"), pandas.NaT, pandas.NA,
    np.float32(2), np.datetime64("NaT"), [1], {"a": 1}, (1, 2), {3}, Strange(), "\ud800",
    type, "x" * 200_000,
]  # fmt: skip
"""Cells as a table in memory can hold them too."""
SCHEMA = Schema(
    (
        Number("age", 0, 100),
        Number("pay", 0, 1000, fill=10, transform="log1p"),
        Category("job", ["clerk", "nurse"]),
        Date("seen", "2020-01-01", "2021-12-31", parts=["month"]),
        Text("note", buckets=4),
        OpenColumn("id"),
        Label("y", ["low", "high"]),
    )
)
NAMES = [column.name for column in SCHEMA.columns]
ROWS = 60
ODD = 17
"""The row with the odd cell."""


def test_there_are_forty_hostile_cells() -> None:
    assert len(WRITTEN) >= 40
    assert len(WRITTEN) + len(OBJECTS) >= 70


def columns() -> dict[str, list[Any]]:
    """A table in which every cell fits."""
    return {
        "age": [str(20 + k % 60) for k in range(ROWS)],
        "pay": [str(k * 10) for k in range(ROWS)],
        "job": [("clerk", "nurse")[k % 2] for k in range(ROWS)],
        "seen": [f"2020-{1 + k % 12:02d}-05" for k in range(ROWS)],
        "note": ["good day", "bad"] * (ROWS // 2),
        "id": [str(k // 3) for k in range(ROWS)],
        "y": [("low", "high")[k % 3 > 0] for k in range(ROWS)],
    }


def with_cell(name: str, cell: Any) -> dict[str, list[Any]]:
    """The table with one other cell."""
    made = columns()
    made[name][ODD] = cell
    return made


def frame(held: dict[str, list[Any]]) -> pandas.DataFrame:
    """A table in memory that holds the cells as they are."""
    made = {}
    for name, cells in held.items():
        made[name] = np.empty(len(cells), object)
        made[name][:] = cells
    return pandas.DataFrame(made, dtype=object)


def written(path: Path, held: dict[str, list[Any]]) -> Path:
    """The table as a file."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(held)
    writer.writerows(zip(*held.values(), strict=True))
    path.write_text(out.getvalue(), encoding="utf-8")
    return path


@contextmanager
def silence(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Nothing is warned of, logged or printed, and nothing is raised. A file that an earlier test
    left open may be collected here: that warning is about no table.
    """
    with warnings.catch_warnings(record=True) as told, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        caplog.clear()
        capsys.readouterr()
        yield
    shown = capsys.readouterr()
    assert [str(w.message) for w in told if w.category is not ResourceWarning] == []
    assert [r.getMessage() for r in caplog.records if r.name.startswith("dpfy")] == []
    assert shown.out + shown.err == ""


def asked(data: Any, place: Path) -> None:
    text = (
        "count(), mean(age), histogram(pay, 0, 10, 1000), unfit(seen), mode(y), median(age) by job"
    )
    query(data, text, schema=SCHEMA, epsilon=2.0, delta=0.0, run=place)


def counted(data: Any, place: Path) -> None:
    domain = Domain.given(SCHEMA)
    count(data, domain, [(0,), (1, 2), (3, 4)])


def trained(data: Any, place: Path) -> None:
    cells = {name: list(data[name]) for name in NAMES}
    for every_row in (False, True):
        training.encode(dict(cells), SCHEMA, "people.csv", every_row)
    training.unlabelled(dict(cells), SCHEMA, "people.csv")


def fitted(kind: type[Any], **more: Any) -> Callable[[Any, Path], None]:
    def fit(data: Any, place: Path) -> None:
        target = () if kind in (KMeans, GaussianMixture) else (data["y"],)
        schema = [c for c in SCHEMA.columns if c.kind != "category"] if not target else SCHEMA
        held = data if target else data.drop(columns=["job", "seen"])
        schema = [c for c in schema if c.name != "seen"] if not target else schema
        made = kind(schema=schema, random_state=1, **more).fit(held, *target)
        made.predict(held)

    return fit


FAMILIES: dict[str, Callable[[Any, Path], None]] = {
    "query": asked,
    "synthesize": counted,
    "train": trained,
    "naive Bayes": fitted(NaiveBayes),
    "logistic regression": fitted(LogisticRegression),
    "forest": fitted(RandomForestClassifier, n_estimators=2, max_depth=2),
    "k-means": fitted(KMeans, n_clusters=2),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["synthesize", "train"])
def test_no_cell_of_a_table_in_memory_is_told(
    family: str, name: str, tmp_path: Path, caplog: Any, capsys: Any
) -> None:
    for number, cell in enumerate([*OBJECTS, *WRITTEN]):
        with silence(caplog, capsys):
            FAMILIES[family](frame(with_cell(name, cell)), tmp_path / str(number))


@pytest.mark.parametrize("name", NAMES)
def test_no_cell_of_a_table_is_told_by_a_query(
    name: str, tmp_path: Path, caplog: Any, capsys: Any
) -> None:
    """All odd cells at once; how each is read by itself, in all that statistics ask of a column."""
    odd = [*OBJECTS, *WRITTEN]
    cells = {column: held * 2 for column, held in columns().items()}
    cells[name][: len(odd)] = odd
    with silence(caplog, capsys):
        asked(frame(cells), tmp_path / "run")
    for cell in odd:
        table = PrivateTable(frame(with_cell(name, cell)), SCHEMA, owner="id")
        with silence(caplog, capsys):
            table.content(name, True)
            table.unfit(name)
            table.left_out("y")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["naive Bayes", "logistic regression", "forest", "k-means"])
def test_no_cell_of_a_record_is_told_by_an_estimator(
    family: str, name: str, tmp_path: Path, caplog: Any, capsys: Any
) -> None:
    """All odd cells of one column at once, and each by itself for the quickest estimator."""
    odd = [*OBJECTS, *WRITTEN]
    cells = columns()
    cells = {column: held * 3 for column, held in cells.items()}
    cells[name][: len(odd)] = odd
    with silence(caplog, capsys):
        FAMILIES[family](frame(cells), tmp_path)
    if family == "naive Bayes":
        for cell in odd:
            with silence(caplog, capsys):
                FAMILIES[family](frame(with_cell(name, cell)), tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_no_cell_changes_how_another_row_is_read(name: str) -> None:
    """In memory: encoded for training and for synthesis, every other row is what it was."""
    domain = Domain.given(SCHEMA)
    held = training.encode(columns(), SCHEMA, "t").records.tensors[0]
    codes = next(encoded(columns(), domain))
    others = np.arange(ROWS) != ODD
    for cell in [*OBJECTS, *WRITTEN]:
        odd = with_cell(name, cell)
        found = training.encode(odd, SCHEMA, "t").records.tensors[0]
        assert (found[others] == held[others]).all()
        assert bool(found.isfinite().all())
        assert float(found.abs().max()) <= 1.0
        assert (next(encoded(odd, domain))[:, others] == codes[:, others]).all()


@pytest.mark.parametrize("name", NAMES)
def test_no_cell_of_a_file_changes_another_row(name: str, tmp_path: Path) -> None:
    whole = read_table(DataFile.given(str(written(tmp_path / "t.csv", columns()))))
    for cell in WRITTEN:
        path = written(tmp_path / "t.csv", with_cell(name, cell))
        found = read_table(DataFile.given(str(path)))
        assert [len(held) for held in found.values()] == [ROWS] * len(NAMES)
        for column in NAMES:
            assert found[column][:ODD] == whole[column][:ODD]
            assert found[column][ODD + 1 :] == whole[column][ODD + 1 :]


NUMBERS = re.compile(r"-?\d[\d.,e+-]*|infinity|inf|nan", re.IGNORECASE)
TRAIN = ["--records", 48, "--epsilon", 8, "--delta", "1e-3", "--model", "linear", "--steps", 2,
         "--batch-size", 16]  # fmt: skip
COMMANDS: dict[str, list[Any]] = {
    "query": ["query", "t.csv", "count(), mean(age), unfit(y) by job", "--schema", "s.toml",
              "--epsilon", 2],
    "synthesize": ["synthesize", "t.csv", "--schema", "s.toml", "--epsilon", 2, "--delta", "1e-4",
                   "--method", "mst", "--rows", 20],
    "fit": ["fit", "t.csv", "--schema", "s.toml", "--epsilon", 2, "--delta", "1e-4",
            "--estimator", "logistic"],
    "train": ["train", "t.csv", "--set", "data.schema=s.toml", *TRAIN],
    "predict": ["predict", "run", "t.csv"],
    "predict an estimator": ["predict", "fitted", "t.csv"],
}  # fmt: skip
ALONE = ["", "$1,234.50", "abc", "1e400", "287000-01-01", "two\nlines", "\0", "medium"]
"""Cells for the commands, one at a time; the others all at once."""


def told(status: int, out: str, err: str) -> tuple[int, str, str]:
    """What a command says, without its numbers, which are released, and its names of classes."""
    lines = sorted(set(NUMBERS.sub("#", out).splitlines()))
    kinds = {re.sub(r"\b(low|high|clerk|nurse|yes|no)\b", "@", line) for line in lines}
    return status, "\n".join(sorted(kinds)), NUMBERS.sub("#", err)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("s.toml").write_text(SCHEMA.to_toml())
    return tmp_path


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "synthesize"])
def test_commands_say_the_same_of_neighbouring_tables(
    command: str, folder: Path, capsys: Any, caplog: Any
) -> None:
    written(Path("t.csv"), columns())
    for run, made in (("run", "train"), ("fitted", "fit")):
        if command.startswith("predict"):
            assert call(capsys, *COMMANDS[made], "--out", run)[0] == 0

    def said(number: int) -> tuple[int, str, str]:
        caplog.clear()
        out = [] if command.startswith("predict") else ["--out", f"run{number}", "--json"]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = told(*call(capsys, *COMMANDS[command], *out))
        assert [str(w.message) for w in warned if "dpfy" in str(w.filename)] == []
        assert "canary" not in "".join(map(str, found))
        assert " row" not in found[2]
        return found

    before = said(0)
    assert before[0] == 0, before
    number = 0
    for k, name in enumerate(NAMES):
        for cell in (ALONE[k], ALONE[(k + 3) % len(ALONE)]):
            number += 1
            written(Path("t.csv"), with_cell(name, cell))
            after = said(number)
            assert (after[0], after[2]) == (before[0], before[2]), (name, cell)
            if command not in ("query", "predict", "predict an estimator"):
                assert after[1] == before[1], (name, cell)
    odd = {name: list(cells) for name, cells in columns().items()}
    for name in NAMES:
        odd[name][: len(WRITTEN)] = WRITTEN
    written(Path("t.csv"), odd)
    assert said(number + 1)[0] == 0


@pytest.mark.parametrize("name", ["age", "y"])
def test_synthesis_says_the_same_of_neighbouring_tables(
    name: str, folder: Path, capsys: Any
) -> None:
    written(Path("t.csv"), columns())
    before = told(*call(capsys, *COMMANDS["synthesize"], "--out", "a", "--json"))
    odd = columns()
    odd[name][: len(WRITTEN)] = WRITTEN
    written(Path("t.csv"), odd)
    after = told(*call(capsys, *COMMANDS["synthesize"], "--out", "b", "--json"))
    assert before[0] == after[0] == 0
    assert before[2] == after[2]


def owned_table(path: Path, user: str, time: str) -> DataConfig:
    """A CSV file of records with owners and times; row `ODD` has these cells."""
    held = columns() | {"when": [f"2020-01-{1 + k % 28:02d}" for k in range(ROWS)]}
    held["id"][ODD], held["when"][ODD] = user, time
    written(path / "t.csv", held)
    return DataConfig(kind="csv", path="t.csv", schema="s.toml", **OWNED)


def owned_arrays(path: Path, user: str, time: str) -> DataConfig:
    """The same as arrays, in which a word may not end with a zero byte."""
    ids, when = [str(k // 3) for k in range(ROWS)], ["2020-01-05"] * ROWS
    ids[ODD], when[ODD] = user, time
    x, y = np.arange(2.0 * ROWS).reshape(ROWS, 2), np.arange(ROWS) % 2
    np.savez(path / "t.npz", x=x, y=y, id=np.array(ids), when=np.array(when))
    return DataConfig(kind="npz", path="t.npz", classes=2, **OWNED)


OWNED: Any = {"user": "id", "most_records": 2, "time": "when", "window": "day"}


@pytest.mark.parametrize("form", [owned_table, owned_arrays])
def test_no_cell_of_an_owner_or_a_time_is_told(
    form: Callable[[Path, str, str], DataConfig], folder: Path, caplog: Any, capsys: Any
) -> None:
    """What a run prints of its data, and every other row, is that of the table without the cell."""

    def loaded(user: str, time: str) -> tuple[str, set[bytes]]:
        with silence(caplog, capsys):
            found = source.load(form(folder, user, time), every_row=False)
            assert found.owned is not None
            found.owned.grouped(found.train)
        rows = [*found.train.tensors[0].numpy(), *found.test.tensors[0].numpy()]
        return found.description, {row.tobytes() for row in rows}

    words, rows = loaded(str(ODD // 3), "2020-01-05")
    for cell in WRITTEN:
        for user, time in ((cell, "2020-01-05"), (str(ODD // 3), cell)):
            told, others = loaded(user, time)
            assert told.split(":")[0] == words.split(":")[0]
            assert len(rows ^ others) <= 2 * OWNED["most_records"], (user, time)


def test_training_says_the_same_whatever_stands_for_an_owner_or_a_time(
    folder: Path, capsys: Any
) -> None:
    owned = [f"data.{key}={value}" for key, value in OWNED.items()]
    command = [*COMMANDS["train"], *(part for key in owned for part in ("--set", key)), "--json"]
    said = []
    for user, time in (("5", "2020-01-05"), ("", "2020-01-05"), ("canary\n", "canary-4711")):
        owned_table(folder, user, time)
        found = told(*call(capsys, *command, "--out", f"run{len(said)}"))
        assert "canary" not in "".join(map(str, found))
        said.append(found)
    assert said[0][0] == 0, said[0]
    assert said[1] == said[2] == said[0]
