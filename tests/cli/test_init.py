"""`dpfy init`: a draft from names alone, whatever the names are; and a training that starts from
it.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from calls import HEADER, call, fill, refused, rows

from dpfy.core.files import DataFile
from dpfy.data import draft
from dpfy.tables import sources
from dpfy.tables.schema import Schema


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_from_a_table_to_a_verified_run(capsys, folder: Path) -> None:
    Path("people.csv").write_text(rows(400))
    status, out, _ = call(capsys, "init", "people.csv", "--label", "income")
    assert status == 0
    assert "no record was read" in out
    line = refused(capsys, "train", "people.job.toml", "--out", "run")
    for place in (
        "columns.age.range",
        "columns.job.categories",
        "columns.hours.range",
        "columns.income.classes",
        "privacy.records",
    ):
        assert place in line, "all open places are named at once"
    assert not Path("run").exists()
    fill(Path("people.schema.toml"))
    assert "privacy.records" in refused(capsys, "train", "people.job.toml", "--out", "run")
    given = ["--records", "320", "--steps", "5", "--delta", "1e-4"]
    status, out, err = call(capsys, "train", "people.job.toml", *given, "--out", "run", "--json")
    assert status == 0, err
    assert call(capsys, "verify", "run")[0] == 0


def test_no_value_of_a_private_table_is_read(capsys, folder: Path) -> None:
    """The bytes after the header are never asked for, and a canary in them is nowhere."""
    Path("people.csv").write_text(rows(50).replace("clerk", "CANARY"))
    assert call(capsys, "init", "people.csv")[0] == 0
    drafted = Path("people.schema.toml").read_text() + Path("people.job.toml").read_text()
    assert "CANARY" not in drafted
    assert "50" not in drafted.replace("MOST", "")
    Path("people.csv").write_bytes(HEADER.encode() + b"\n\xff\xfe\x00 not text at all")
    assert call(capsys, "init", "people.csv", "--force")[0] == 0, (
        "what follows the header does not matter"
    )
    again = Path("people.schema.toml").read_text() + Path("people.job.toml").read_text()
    assert again == drafted, "the draft is a function of the names"


def test_of_a_huge_file_the_header_alone_is_read(capsys, folder: Path) -> None:
    with open("huge.csv", "wb") as file:
        file.write(HEADER.encode() + b"\n")
        file.truncate(1 << 40)
    assert call(capsys, "init", "huge.csv")[0] == 0


def test_the_file_is_read_up_to_the_end_of_its_header(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("people.csv").write_text(rows(5))
    with open("people.csv", "rb") as file:
        assert sources._first_line(file, DataFile.given("people.csv")) == HEADER + "\n"
        assert file.tell() == len(HEADER) + 1


NAMES = [
    'say "hello"', "a,b", "a.b.c", "naïve "
                                   "café", "日本", "two\nlines", "[columns.x]", "#", "=", "tab\tname", "\\", "'", '"""', "?",  # noqa: E501
    "kind", "\x7fdel", "a = 1 # b", "😀",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_any_name_is_drafted_and_read_back(capsys, folder: Path, name: str, end: str) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    with open("t.csv", "w", newline="", encoding="utf-8-sig") as file:
        file.write(f"age,{quoted},label{end}30,x,yes{end}")
    status, _, err = call(capsys, "init", "t.csv", "--category", name)
    assert status == 0, err
    columns = tomllib.loads(Path("t.schema.toml").read_text())["columns"]
    assert list(columns) == ["age", name.strip(), "label"]
    text = (
        Path("t.schema.toml")
        .read_text()
        .replace('range = "?"', "range = [0, 9]")
        .replace('classes = "?"', 'classes = ["a", "b"]')
    )
    text = text.replace('categories = "?"', 'categories = ["x"]')
    assert [c.name for c in Schema.parse(text, "t", labelled=True).features] == [
        "age",
        name.strip(),
    ]


@pytest.mark.parametrize("mark", [";", "\t"])
def test_semicolons_and_tabs(capsys, folder: Path, mark: str) -> None:
    Path("t.csv").write_text(rows(40).replace(",", mark))
    assert call(capsys, "init", "t.csv", "--label", "income")[0] == 0
    fill(Path("t.schema.toml"))
    given = ["--records", "32", "--steps", "2", "--delta", "1e-3"]
    assert call(capsys, "train", "t.job.toml", *given, "--out", "run")[0] == 0


def test_a_semicolon_inside_quotes_separates_nothing() -> None:
    assert sources.delimiter_of('"a;b"\tc\n1;2;3\n') == "\t"
    assert sources.delimiter_of("a;b,c\n") == ","
    assert sources.delimiter_of("one\nx,y\n") == ",", "one column"
    assert sources.delimiter_of("one\nx;y\n") == ",", "what follows the header says nothing"


BAD = [
    (b"", "must begin with a line of column names"),
    (b"\n", "must begin with a line of column names"),
    (b"a,b,a\n", "two columns of one name"),
    (b"39,Private,77516\n40,State-gov,9\n", "looks like a record"),
    (b"name,1999-01-31\n", "looks like a record"),
    (b"\xff\xfea\x00,\x00b\x00\n", "not UTF-8"),
    (b'"a,b\n', "first line"),
    (b"x" * (1 << 21), "has no line of column names within"),
    (b"\x1f\x8bbroken", "gzip"),
]


@pytest.mark.parametrize(("content", "said"), BAD, ids=[said for _, said in BAD])
def test_what_is_no_header_is_one_line(capsys, folder: Path, content: bytes, said: str) -> None:
    Path("t.csv").write_bytes(content)
    line = refused(capsys, "init", "t.csv")
    assert said in line
    assert "Private" not in line, "a first line that may be a record is not shown"
    assert sorted(os.listdir()) == ["t.csv"]


def test_folders_pipes_and_missing_files(capsys, folder: Path) -> None:
    os.mkfifo("p.csv")
    Path("d.csv").mkdir()
    for name, said in (
        ("p.csv", "a pipe"),
        ("d.csv", "a folder"),
        ("none.csv", "does not exist"),
        ("/dev/zero", "a device"),
    ):
        assert said in refused(capsys, "init", name)


def test_names_that_are_numbers_are_taken_when_the_user_says_so(capsys, folder: Path) -> None:
    Path("t.csv").write_text("2019,2020,label\n1,2,a\n")
    assert "--header" in refused(capsys, "init", "t.csv")
    assert call(capsys, "init", "t.csv", "--header")[0] == 0


def test_gzip_and_other_folders(capsys, folder: Path) -> None:
    Path("t.csv.gz").write_bytes(gzip.compress(rows(10).encode()))
    Path("drafts").mkdir()
    _, out, _ = call(capsys, "init", "t.csv.gz", "--out", "drafts", "--json")
    assert json.loads(out)["job"] == "drafts/t.job.toml"
    job = tomllib.loads(Path("drafts/t.job.toml").read_text())
    assert job["data"]["kind"] == "csv"
    assert job["data"]["schema"] == "drafts/t.schema.toml"


@pytest.mark.parametrize(
    "name",
    [
        'a"b.csv',
        "two\nlines.csv",
        "[privacy]\nepsilon = 99.csv",
        "no suffix",
        ".csv",
        "é.csv",
        "-x.csv",
    ],
)
def test_any_file_name_is_drafted_and_read_back(capsys, folder: Path, name: str) -> None:
    Path(name).write_text(rows(3))
    status, out, err = call(capsys, "init", "--json", "--", name)
    assert status == 0, err
    job = tomllib.loads(Path(json.loads(out)["job"]).read_text())
    assert job["data"]["path"] == name
    assert job["privacy"]["epsilon"] == 3.0
    assert tomllib.loads(Path(job["data"]["schema"]).read_text())["columns"]


def test_nothing_is_overwritten(capsys, folder: Path) -> None:
    Path("t.csv").write_text(rows(3))
    Path("t.job.toml").write_text("mine")
    assert "--force" in refused(capsys, "init", "t.csv")
    assert Path("t.job.toml").read_text() == "mine"
    assert not Path("t.schema.toml").exists(), "both or neither"
    assert call(capsys, "init", "t.csv", "--force")[0] == 0
    assert "[data]" in Path("t.job.toml").read_text()


@pytest.mark.parametrize("out", ["nowhere", "t.csv", "/dev/zero", "a" * 300])
def test_a_folder_that_is_none(capsys, folder: Path, out: str) -> None:
    Path("t.csv").write_text(rows(3))
    assert "must be a folder that exists" in refused(capsys, "init", "t.csv", "--out", out)
    assert sorted(os.listdir()) == ["t.csv"]


def test_a_link_is_replaced_not_followed(capsys, folder: Path) -> None:
    Path("t.csv").write_text(rows(3))
    Path("precious").write_text("mine")
    Path("t.schema.toml").symlink_to("precious")
    assert "is there already" in refused(capsys, "init", "t.csv")
    assert call(capsys, "init", "t.csv", "--force")[0] == 0
    assert Path("precious").read_text() == "mine"


def test_columns_that_are_not_there_or_given_twice(capsys, folder: Path) -> None:
    Path("t.csv").write_text(rows(3))
    assert "must be a column of the file" in refused(capsys, "init", "t.csv", "--label", "wage")
    assert "give it once" in refused(capsys, "init", "t.csv", "--label", "age", "--number", "age")


def test_a_public_file_fills_its_own_draft(capsys, folder: Path) -> None:
    Path("t.csv").write_text(rows(60))
    _, out, _ = call(capsys, "init", "t.csv", "--public", "--label", "income", "--json")
    assert json.loads(out)["open"] == 0
    text = Path("t.schema.toml").read_text()
    assert "declared public" in text
    schema = Schema.parse(text, "t", labelled=True)
    assert schema.label.classes == ("high", "low")
    assert schema.features[1].categories == ("clerk", "nurse")


def test_a_parquet_file_states_its_types(capsys, folder: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    table = arrow.table(
        {
            "x1": [1.5, 2.5],
            "word": ["a", "b"],
            "label": ["no", "yes"],
            "when": arrow.array([1, 2], arrow.date32()),
        }
    )
    pyarrow.parquet.write_table(table, "t.parquet")
    assert call(capsys, "init", "t.parquet")[0] == 0
    text = Path("t.schema.toml").read_text()
    columns = tomllib.loads(text)["columns"]
    assert (columns["x1"]["kind"], columns["word"]["kind"], columns["label"]["kind"]) == (
        "number",
        "category",
        "label",
    )
    assert columns["when"] == {"ignore": True}
    assert "1.5" not in text, "the minimum in the file's statistics is a value"
    assert tomllib.loads(Path("t.job.toml").read_text())["data"]["kind"] == "parquet"


def test_users_are_asked_for(capsys, folder: Path) -> None:
    Path("t.csv").write_text(rows(3))
    assert call(capsys, "init", "t.csv", "--user", "id")[0] == 0
    assert tomllib.loads(Path("t.job.toml").read_text())["data"]["most_records"] == "?"
    assert "data.most_records: got '?'" in refused(capsys, "train", "t.job.toml", "--out", "run")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("age", "number"), ("hr_per_week", None), ("patientId", "ignore"), ("hoursPerWeek", "number"), ("marital_status", "category"),  # noqa: E501
     ("target", "label"), ("", "ignore"), ("x7", None), ("日本", None)],
)  # fmt: skip
def test_kinds_that_names_suggest(name: str, kind: str | None) -> None:
    assert draft.guessed(name).kind == kind


def test_there_is_one_label_at_most() -> None:
    kinds = [
        c.kind for c in draft.columns(["label", "target", "class"], [None] * 3, {"target": "label"})
    ]
    assert kinds.count("label") == 1
    assert [c.kind for c in draft.columns(["label", "y"], [None] * 2, {})] == ["label", None]


def test_every_problem_of_public_sample_rows_is_told_at_once(capsys, folder: Path) -> None:
    Path("s.toml").write_text(
        '[columns.age]\nkind = "number"\nrange = [0, 99]\n[columns.job]\nkind = "category"\n'
        'categories = ["a"]\n[columns.seen]\nkind = "date"\nrange = ["2020-01-01", "2020-12-31"]\n'
        "[columns.id]\nignore = true\n"
    )
    Path("sample.csv").write_text("age,job,id\n5,a,1\n$7,b,2\n,a,\n200,a,4\n")
    line = refused(capsys, "init", "s.toml", "--check", "sample.csv")
    assert "needs --public" in line
    status, out, _ = call(capsys, "init", "s.toml", "--check", "sample.csv", "--public")
    assert status == 1
    assert out.splitlines() == [
        "seen: is in the schema but not in sample.csv",
        "age: 3 of 4 cells do not fit (age from 0 to 99); the first is '$7' in row 2",
        "job: 1 of 4 cells do not fit (job: a); the first is 'b' in row 2",
    ]
    Path("sample.csv").write_text("age,job,seen,id\n5,a,2020-02-02,\n")
    status, out, _ = call(capsys, "init", "s.toml", "--check", "sample.csv", "--public")
    assert (status, out) == (0, "every cell fits\n")
