"""No text of an object that holds private data shows a value of it. A canary word and a canary
number are planted in every such class, found by walking the package; `repr`, `str`, HTML, and the
message of every error that handling it raises are searched for them.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import traceback
import warnings

import duckdb
import numpy as np
import pandas as pd
import pytest
import torch

import dpfy
from dpfy.data import owners, records, split, users
from dpfy.data.lazy import LazyRecords
from dpfy.estimators import columns as features
from dpfy.estimators import records as encoded
from dpfy.estimators.given import EngineTable, FileTable, HeldTable
from dpfy.runs.dataset import Dataset
from dpfy.tables.columns import Category, Number
from dpfy.tables.sources import TableFile
from dpfy.tables.table import PrivateTable
from dpfy.text.corpus import Texts

WORD, NUMBER = "canary4711", 47114711.0
FRAME = pd.DataFrame({"age": [NUMBER, 2.0], "job": [WORD, "nurse"], "who": [WORD, "b"]})
SCHEMA = [Number("age", 0, 100), Category("job", ["clerk", "nurse"])]
ROWS = (torch.tensor([[NUMBER], [1.0]]), torch.tensor([0, 1]))


def file(folder):
    path = folder / "people.csv"
    FRAME.to_csv(path, index=False)
    return path


def held(columns):
    return features.public(features.TableForm.of(columns), None, (0, 1), None)


MADE = {
    "Dataset of a frame": lambda folder: Dataset(FRAME, SCHEMA, unit=dpfy.Person("who", 7)),
    "Dataset of arrays": lambda folder: Dataset(dict(FRAME), SCHEMA),
    "Dataset of tensors": lambda folder: Dataset(ROWS),
    "Dataset of a file": lambda folder: Dataset(file(folder), SCHEMA),
    "Texts": lambda folder: Texts([WORD, WORD]),
    "PrivateTable": lambda folder: PrivateTable(FRAME, SCHEMA, owner="who"),
    "TableFile": lambda folder: TableFile(file(folder)),
    "FileTable": lambda folder: FileTable(file(folder)),
    "FileColumn": lambda folder: FileTable(file(folder)).target("job"),
    "HeldTable": lambda folder: HeldTable(FRAME, ("age", "job")),
    "Records": lambda folder: records.as_records(ROWS),
    "LazyRecords": lambda folder: LazyRecords([(NUMBER, 0), (1.0, 1)]),
    "Users": lambda folder: owners.Users([WORD, "b"], time=[NUMBER, 1.0], window="day"),
    "Owned": lambda folder: owners.Owned(ROWS, owners.Users([WORD, "b"]), 7),
    "UserSource": lambda folder: owners.Owned(ROWS, owners.Users([WORD, "b"]), 7).grouped(
        records.as_records(ROWS)
    ),
    "UserRecords": lambda folder: users.by_user(ROWS, np.array([3, 3]), 7),
    "SplitRecords": lambda folder: split.kept(records.as_records(ROWS), np.ones(2, bool), 2),
    "EncodedRecords": lambda folder: encoded.read(
        np.array([[NUMBER], [1.0]]), held(np.ones((2, 1)))
    ),
}
MADE["EngineTable"] = lambda folder: EngineTable(
    duckdb.sql(f"SELECT '{WORD}' AS word, {NUMBER} AS number UNION ALL SELECT 'b', 1.0")
)
COUNT = re.compile(r"\b2 (rows|records|users|x|of)\b")
"""How a text would tell that there are two rows."""
PRIVATE_FIELDS = ("source", "tensors", "given", "owners", "X", "y", "users")
"""Fields by which a class that holds records is recognised."""


def texts_of(made):
    yield repr(made)
    yield str(made)
    yield f"{made}"
    for name in ("_repr_html_", "_repr_mimebundle_"):
        if (shown := getattr(made, name, None)) is not None:
            yield str(shown())
    try:
        raise ValueError(made)
    except ValueError as error:
        yield "".join(traceback.format_exception(error))


@pytest.mark.parametrize("name", MADE)
def test_no_text_shows_a_value(name, tmp_path):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = MADE[name](tmp_path)
        shown = [*texts_of(made), *(str(w.message) for w in told)]
    for text in shown:
        assert WORD not in text
        assert "4711" not in text
        assert not COUNT.search(text)


HOLD = (records.Records, owners.DrawnRecords, TableFile, PrivateTable, Dataset, Texts, LazyRecords)
"""What holds private records; so does all that is made of them."""
MADE_OF_OTHERS = {
    "DrawnRecords",
    "KeptRecords",
    "SplitUsers",
    "WholeClients",
    "ClientNumbers",
    "SplitSource",
    "SharingClients",
    "VirtualClients",
}
"""Classes that cannot be made alone, or hold numbers of clients: their representation is inherited."""


def generated(kind):
    """Whether the representation of a class is a dataclass's, which shows its fields."""
    return kind.__repr__.__qualname__.endswith("__create_fn__.<locals>.__repr__")


def classes():
    for module in pkgutil.walk_packages(dpfy.__path__, "dpfy."):
        if module.name.startswith(
            ("dpfy.integrations", "dpfy.cli", "dpfy.testing", "dpfy.__main__")
        ):
            continue
        for name, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if kind.__module__ == module.name:
                yield name, kind


def test_every_class_that_holds_records_is_planted():
    """A class made of one that holds records, or a dataclass with a field of records, is among the
    classes above, or its representation shows no field.
    """
    planted, found = {key.split()[0] for key in MADE}, []
    for name, kind in classes():
        if issubclass(kind, HOLD) and name not in planted | MADE_OF_OTHERS:
            found.append(f"{name} is not planted")
        if not dataclasses.is_dataclass(kind) or not generated(kind):
            continue
        if issubclass(kind, HOLD):
            found.append(f"{name} shows its fields")
        elif name not in planted:
            shown = {f.name for f in dataclasses.fields(kind) if f.repr} & set(PRIVATE_FIELDS)
            found += [f"{name} shows {field}" for field in shown]
    assert "; ".join(found) == ""


REFUSED = {
    "a Dataset of a Dataset": lambda d: Dataset(d),
    "a schema beside it": lambda d: dpfy.query(d, "count()", schema=SCHEMA, epsilon=1.0),
    "a delta in words": lambda d: dpfy.query(d, "count()", epsilon=1.0, delta="one"),
    "an unknown column": lambda d: dpfy.query(d, "mean(wage)", epsilon=1.0, delta=1e-6),
    "no label": lambda d: dpfy.serve(d, epsilon=1.0, answers=3, delta=1e-6),
    "no budget": lambda d: d.left(),
    "no ledger": lambda d: d.spent(),
    "head": lambda d: d.head(),
    "pickled": lambda d: __import__("pickle").dumps(d),
}


@pytest.mark.parametrize("what", REFUSED)
def test_no_refusal_shows_a_value(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((dpfy.DpfyError, AttributeError)) as refused:
        REFUSED[what](Dataset(FRAME, SCHEMA))
    assert WORD not in str(refused.value)
    assert "4711" not in str(refused.value)


SHOWN_IN_NOTEBOOKS = {
    "guarantee": (lambda found: dpfy_plan().guarantee(), ("epsilon at delta", "neighbours")),
    "plan": (lambda found: dpfy_plan(), ("noise multiplier", "4 of 20")),
    "choice": (lambda found: dpfy.auto(20, 4, epochs=1, epsilon=1.0, delta=1e-3), ("dp-sgd",)),
    "result": (lambda found: found, ("differential privacy", "queried")),
    "answers": (lambda found: found.answers, ("mean(age)", "95% interval")),
    "ledger": (
        lambda found: dpfy.Ledger.read(found.run / "ledger.jsonl"),
        ("Ledger ledger.jsonl", "<td>1</td>"),
    ),
}


def dpfy_plan():
    return dpfy.dpsgd(records=20, batch_size=4, steps=2).with_noise(1.0, delta=1e-3)


@pytest.fixture(scope="module")
def queried(tmp_path_factory):
    """Statistics of the table with the planted word and number."""
    data = Dataset(FRAME, SCHEMA)
    run = tmp_path_factory.mktemp("shown") / "queried"
    return dpfy.query(data, "mean(age) by job", epsilon=1.0, delta=0, run=run)


@pytest.mark.parametrize("what", SHOWN_IN_NOTEBOOKS)
def test_notebooks_show_a_table_without_private_values(what, queried):
    made, parts = SHOWN_IN_NOTEBOOKS[what]
    shown = made(queried)._repr_html_()
    assert shown.count("<") == shown.count(">")
    assert [part for part in parts if part not in shown] == []
    assert WORD not in shown
    assert "4711" not in shown


def test_tables_of_notebooks_are_escaped():
    from dpfy.core.guarantee import html_table

    assert "<script>" not in html_table("<script>", [("<script>", "<script>")])
