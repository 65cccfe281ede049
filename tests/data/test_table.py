from __future__ import annotations

import csv
import gzip
import io
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from dpfy.core.errors import Corrupt, DpfyError, InvalidInput
from dpfy.core.files import DataFile
from dpfy.data import DataConfig, table
from dpfy.data.source import load
from dpfy.tables.schema import training_schema
from dpfy.tables.sources import read_table

SCHEMA = """
missing = ["", "?"]
[columns.age]
kind = "number"
range = [20, 60]
[columns.gain]
kind = "number"
range = [0, 99]
transform = "log1p"
scale = "unit"
fill = 0
[columns.job]
kind = "category"
categories = ["clerk", "nurse"]
fill = "other"
[columns.id]
ignore = true
[columns.income]
kind = "label"
classes = ["low", "high"]
"""
ROWS = [
    ["high", "secret-1", "nurse", "40", "9"],
    ["low", "secret-2", "clerk", "10", "99"],  # age clamped
    ["low", "secret-3", "pilot", "60", "?"],  # job unknown, gain missing
    ["high", "secret-4", "?", "1e9", "0"],  # job missing, age clamped
]
HEADER = ["income", "id", "job", "age", "gain"]
EXPECTED = [
    [0.0, math.log(10) / math.log(100), 0.0, 1.0],
    [-1.0, 1.0, 1.0, 0.0],
    [1.0, 0.0, 0.0, 0.0],
    [1.0, 0.0, 0.0, 0.0],
]


def text(rows: list[list[str]], header: list[str] = HEADER) -> str:
    out = io.StringIO()
    csv.writer(out).writerows([header, *rows])
    return out.getvalue()


def config(
    folder: Path, content: str | bytes, kind: str = "csv", public: str = SCHEMA
) -> DataConfig:
    (folder / "schema.toml").write_text(public)
    (folder / "data").write_bytes(content.encode() if isinstance(content, str) else content)
    return DataConfig(
        kind=kind,
        path=str(folder / "data"),
        test_path=str(folder / "data"),
        schema=str(folder / "schema.toml"),
    )


def parquet(columns: dict[str, list[object]]) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


def test_the_encoding_is_the_one_the_schema_says(tmp_path: Path) -> None:
    source = load(config(tmp_path, text(ROWS)))
    np.testing.assert_allclose(source.train.tensors[0].numpy(), np.array(EXPECTED), atol=1e-6)
    assert source.train.tensors[1].tolist() == [1, 0, 0, 1]
    assert (source.features, source.classes) == ((4,), 2)


def test_gzip_and_a_byte_order_mark_and_spaces_change_nothing(tmp_path: Path) -> None:
    plain = load(config(tmp_path, text(ROWS))).train.tensors[0]
    spaced = text([[f" {cell} " for cell in row] for row in ROWS])
    packed = load(config(tmp_path, gzip.compress(b"\xef\xbb\xbf" + spaced.encode()))).train.tensors[
        0
    ]
    assert torch.equal(plain, packed)


def test_parquet_gives_what_csv_gives(tmp_path: Path) -> None:
    columns: dict[str, list[object]] = {
        "id": [1, 2, 3, 4], "age": [40.0, 10.0, 60.0, 1e9], "gain": [9, 99, None, 0], "job": ["nurse", "clerk", "pilot", None],  # noqa: E501
        "income": ["high", "low", "low", "high"],
    }  # fmt: skip
    source = load(config(tmp_path, parquet(columns), kind="parquet"))
    np.testing.assert_allclose(source.train.tensors[0].numpy(), np.array(EXPECTED), atol=1e-6)


def test_a_value_far_outside_changes_its_own_row_only(tmp_path: Path) -> None:
    rows = [row.copy() for row in ROWS]
    base = load(config(tmp_path, text(rows))).train.tensors[0]
    rows[0][3], rows[0][2] = "-1e30", "never seen"
    changed = load(config(tmp_path, text(rows))).train.tensors[0]
    assert torch.equal(base[1:], changed[1:])
    assert base.shape == changed.shape
    assert not torch.equal(base[0], changed[0])


def test_every_feature_lies_in_the_public_cube(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = [
        ["low", "i", "nurse", repr(float(a)), repr(float(b))]
        for a, b in rng.standard_cauchy((500, 2)) * 50
    ]
    features = load(config(tmp_path, text(rows))).train.tensors[0]
    assert float(features.abs().max()) <= 1.0
    assert float(features[:, 1].min()) >= 0.0


@pytest.mark.parametrize(
    ("rows", "header", "message"),
    [
        ([], HEADER, "must hold at least 1 row after the header"),
        (
            [ROWS[0]],
            ["income", "id", "job", "years", "gain"],
            r"column: got 'age'; is in the schema but not in the file",
        ),
        (
            [[*ROWS[0], "x"]],
            [*HEADER, "zip"],
            r"column: got 'zip'; is in the file but not in the schema; .*ignore = true",
        ),
        ([[*ROWS[0], "x"]], [*HEADER, "age"], r"column 'age' is there twice"),
    ],
)
def test_a_table_of_another_form_is_refused_in_one_line_without_its_content(
    tmp_path: Path, rows: list[list[str]], header: list[str], message: str
) -> None:
    with pytest.raises(DpfyError, match=message) as caught:
        load(config(tmp_path, text(rows, header)))
    said = str(caught.value)
    assert "\n" not in said
    assert "secret" not in said


ODD = {
    "forty": 0.0,
    "": 0.0,
    "nan": 0.0,
    "1_0": 0.0,
    "$40": 0.0,
    "-inf": -1.0,
    "1e400": 1.0,
    "inf": 1.0,
}


@pytest.mark.parametrize("cell", ODD)
def test_a_number_that_does_not_fit_is_the_middle_or_an_end(tmp_path: Path, cell: str) -> None:
    rows = [*ROWS, ["low", "i", "nurse", cell, "1"]]
    found = load(config(tmp_path, text(rows))).train.tensors[0]
    np.testing.assert_allclose(found[:4].numpy(), np.array(EXPECTED), atol=1e-6)
    assert float(found[4, 0]) == ODD[cell]


@pytest.mark.parametrize("cell", ["medium", "", "?", "secret"])
def test_a_row_without_a_usable_label_is_left_out_and_moves_no_other(
    tmp_path: Path, cell: str
) -> None:
    rows = [
        [label, str(k), "nurse", str(20 + k % 40), "1"]
        for k, label in enumerate(["low", "high"] * 20)
    ]
    whole = config(tmp_path, text(rows))
    made = replace(whole, test_path=None)
    base = load(made, every_row=False)
    for k in (0, 7, 39):
        (tmp_path / "data").write_text(text([*rows[:k], [cell, *rows[k][1:]], *rows[k + 1 :]]))
        found = load(made, every_row=False)
        assert found.description == base.description
        assert found.units == base.units == 32
        assert len(found.train) + len(found.test) == 39
        for mine, theirs in zip((found.train, found.test), (base.train, base.test), strict=True):
            left = [
                row for row in theirs.tensors[0].tolist() if row not in mine.tensors[0].tolist()
            ]
            assert len(theirs) - len(mine) == len(left)
        kept = load(made)
        assert len(kept.train) + len(kept.test) == 40
        assert torch.equal(kept.train.tensors[0], base.train.tensors[0])


def test_a_strict_schema_names_column_and_row(tmp_path: Path) -> None:
    load(
        config(tmp_path, text([["low", "i", "nurse", "40", "?"]]), public="strict = true" + SCHEMA)
    )
    for row, message in (
        (["low", "i", "nurse", "forty", "1"], "column age, row 2"),
        (["low", "i", "pilot", "40", "1"], "column job, row 2"),
        (["medium", "i", "nurse", "40", "1"], "column income, row 2"),
        (["low", "i", "nurse", "61", "1"], "column age, row 2"),
    ):
        rows = [["low", "i", "nurse", "40", "1"], row]
        with pytest.raises(InvalidInput, match=message):
            load(config(tmp_path, text(rows), public="strict = true" + SCHEMA))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must begin with a line of column names"),
        (b"\xff\xfe\x00a", "not UTF-8 text"),
        (gzip.compress(text(ROWS * 50).encode())[:-30], "gzip data is truncated or damaged"),
        (b'age,job\n"40,clerk', "not a comma-separated table"),
    ],
)
def test_a_file_that_is_no_csv_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DpfyError, match=message) as caught:
        load(config(tmp_path, content))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    whole = parquet({"age": [1.0] * 100})
    middle = bytearray(whole)
    middle[-12:-8] = b"\xff" * 4
    for content in (text(ROWS).encode(), whole[:-5], b"PAR1", bytes(middle)):
        with pytest.raises(Corrupt, match="Parquet"):
            load(config(tmp_path, content, kind="parquet"))


def test_a_split_holds_out_the_fraction(tmp_path: Path) -> None:
    path = config(tmp_path, text(ROWS * 25))
    source = load(DataConfig(kind="csv", path=path.path, schema=path.schema, test_fraction=0.25))
    assert (len(source.train), len(source.test)) == (75, 25)


def test_a_word_may_be_category_and_missing_marker(tmp_path: Path) -> None:
    public = SCHEMA.replace('"clerk", "nurse"', '"clerk", "?"').replace('fill = "other"', "")
    source = load(config(tmp_path, text([["low", "i", "?", "30", "1"]]), public=public))
    assert source.train.tensors[0][0, 2:].tolist() == [0.0, 1.0]


def test_the_adult_schema_covers_the_published_columns() -> None:
    adult = training_schema("adult")
    assert len(adult.names) == 15
    assert adult.label.classes == ("<=50K", ">50K")
    assert sum(column.width for column in adult.features) == 5 + 8 + 7 + 14 + 6 + 5 + 2 + 41
    row = {
        "age": ["45"], "type_employer": ["?"], "fnlwgt": ["1"], "education": ["9th"], "education_num": ["5"],
        "marital": ["Divorced"], "occupation": ["Sales"], "relationship": ["Wife"], "race": ["Black"], "sex": ["Female"],  # noqa: E501
        "capital_gain": ["0"], "capital_loss": ["0"], "hr_per_week": ["40"], "country": ["Cuba"], "income": [">50K"],
    }  # fmt: skip
    encoded = table.encode(row, adult, "row")
    assert encoded.records.tensors[1].tolist() == [1]


@pytest.mark.skipif("DPFY_DATA" not in os.environ, reason="needs DPFY_DATA")
def test_adult_loads_and_nothing_in_it_is_outside_the_schema() -> None:
    source = load("adult")
    assert len(source.train) + len(source.test) == 30_162


def test_reading_is_independent_of_the_order_of_the_columns(tmp_path: Path) -> None:
    turned = text([row[::-1] for row in ROWS], HEADER[::-1])
    first = load(config(tmp_path, text(ROWS))).train.tensors[0]
    assert torch.equal(first, load(config(tmp_path, turned)).train.tensors[0])


def test_a_missing_schema_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="data file: got 'adlut'; does not exist"):
        training_schema("adlut")
    with pytest.raises(InvalidInput, match="does not exist"):
        training_schema(str(tmp_path / "s.toml"))


def test_files_are_read_as_text_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(text(ROWS))
    assert list(read_table(DataFile.given(str(tmp_path / "a")))) == HEADER
