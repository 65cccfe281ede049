"""Files as cells by column: whatever stands in a row, the others are read alike."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from dpfy.core.errors import Corrupt, DpfyError, InvalidInput
from dpfy.core.files import DataFile
from dpfy.tables.sources import TableFile, cells_of, chunks, read_header, read_table


def saved(folder: Path, content: bytes, name: str = "a.csv") -> DataFile:
    (folder / name).write_bytes(content)
    return DataFile.given(str(folder / name))


ROWS = b"a,b\n1,x\n2,y\n"


@pytest.mark.parametrize(
    "row",
    [b"3", b"3,z,4,5", b"", b"3,\xff\xfe", b"3,\0", b"3,\xed\xa0\x80", b"3," + b"z" * 10**6]
    + [b'3,"a\nb"', b'3,5" pipe', b"3,\r"],
    ids=range(10),
)
def test_a_row_of_another_form_changes_no_other_row(tmp_path: Path, row: bytes) -> None:
    for packed in (bytes, gzip.compress):
        found = read_table(saved(tmp_path, packed(ROWS + row + b"\n4,w\n")))
        assert list(found) == ["a", "b"]
        assert (found["a"][:2], found["b"][:2]) == (["1", "2"], ["x", "y"])
        assert (found["a"][-1], found["b"][-1]) == ("4", "w")
        assert len(found["a"]) == len(found["b"])


def test_chunks_are_the_table_in_parts(tmp_path: Path) -> None:
    text = "a,b\n" + "".join(f"{k},{k % 7}\n" for k in range(1000))
    file = saved(tmp_path, text.encode())
    whole = read_table(file)
    for rows in (1, 7, 999, 1000, 5000):
        parts = list(chunks(file, rows))
        assert [c for p in parts for c in p["a"]] == whole["a"]
        assert max(len(p["a"]) for p in parts) <= rows
    pyarrow.parquet.write_table(pyarrow.table(whole), tmp_path / "a.parquet")
    packed = DataFile.given(str(tmp_path / "a.parquet"))
    assert read_table(packed) == whole
    assert [c for p in chunks(packed, 300) for c in p["b"]] == whole["b"]


@pytest.mark.parametrize("mark", [";", "\t"])
def test_the_header_says_what_separates(tmp_path: Path, mark: str) -> None:
    text = f'\ufeffa{mark}"b,c"\n1{mark}2\n'
    assert read_table(saved(tmp_path, text.encode())) == {"a": ["1"], "b,c": ["2"]}


def test_only_the_header_is_read_before_a_column_is_asked_for(tmp_path: Path) -> None:
    file = saved(tmp_path, ROWS + b'"torn')
    assert read_header(file).names == ("a", "b")
    table = TableFile(tmp_path / "a.csv")
    assert table.names == ("a", "b")
    assert "a.csv" in repr(table)
    with pytest.raises(InvalidInput, match="data column: got 'z'; is not a column of"):
        table.column("z")
    with pytest.raises(Corrupt, match="not a comma-separated table"):
        table.column("a")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must begin with a line of column names"),
        (b"\xff\xfe\x00a", "not UTF-8 text"),
        (b"a,a\n1,2\n", "column 'a' is there twice"),
        (b"a,b\n", "must hold at least 1 row after the header"),
        (gzip.compress(ROWS * 50, mtime=0)[:-30], "gzip data is truncated or damaged"),
        (b'a,b\n"40,clerk', "not a comma-separated table"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DpfyError, match=message) as caught:
        read_table(saved(tmp_path, content))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"a": [1.0] * 100}), out)
    whole, middle = out.getvalue(), bytearray(out.getvalue())
    middle[-12:-8] = b"\xff" * 4
    for content in (ROWS, whole[:-5], b"PAR1", bytes(middle)):
        with pytest.raises(Corrupt, match="Parquet"):
            read_table(saved(tmp_path, content, "a.parquet"))


def test_a_cell_without_a_value_in_python_is_missing(tmp_path: Path) -> None:
    days = pyarrow.array([0, 10**8], pyarrow.int32()).cast(pyarrow.date32())
    pyarrow.parquet.write_table(pyarrow.table({"a": days}), tmp_path / "a.parquet")
    found = read_table(DataFile.given(str(tmp_path / "a.parquet")))
    assert [str(cell) for cell in found["a"]] == ["1970-01-01", "None"]


def test_every_form_of_a_table_gives_its_columns() -> None:
    columns = {"a": [1, 2], "b": ["x", "y"]}
    frame = pandas.DataFrame(columns)
    records = np.array([(1, "x"), (2, "y")], [("a", "i8"), ("b", "U1")])
    for held in (columns, frame, pyarrow.table(columns), records, np.array([[1, "x"], [2, "y"]])):
        found = cells_of(held, ["a", "b"])
        assert [list(map(str, found[name])) for name in ("a", "b")] == [["1", "2"], ["x", "y"]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "must be a CSV or Parquet file"),
        (np.zeros((2, 3)), "must be a CSV or Parquet file"),
        ({"a": [1], "b": [1, 2]}, "columns of different lengths"),
        ({"a": "text"}, "one cell for each record"),
        ({"a": np.zeros((2, 2))}, "one cell for each record"),
        (pandas.DataFrame([[1, 2]], columns=["a", "a"]), "must have different names"),
    ],
)
def test_what_is_no_table_is_refused(data: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        cells_of(data, ["a", "b"])
