"""A schema and a job drafted for a table of one's own: from the names of its columns alone, unless
its owner says that it is public.

Reading a value, if only to see whether it is a number, is a look at the records. So for a private
table kinds are guessed from names (or given), and ranges, categories and classes are left open for
a person to fill in from what is public.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from dpfy.core import check, storage
from dpfy.core.errors import InvalidInput
from dpfy.core.files import DataFile
from dpfy.core.settings import toml
from dpfy.data.config import kind_of
from dpfy.tables.columns import OpenColumn
from dpfy.tables.schema import OPEN, Schema
from dpfy.tables.sources import Header, read_header, read_table
from dpfy.tables.table import PrivateTable

LABEL, NUMBER, CATEGORY, IGNORE = "label", "number", "category", "ignore"
DATE, TEXT = "date", "text"
WORDS = {
    IGNORE: "id uuid guid key index name surname forename email mail phone tel address street ssn "
    "url",
    DATE: "date time timestamp birthday born dob admitted discharged",
    TEXT: "comment comments note notes text description message remark remarks",
    LABEL: "label target class outcome y",
    NUMBER: "age year years hour hours day days month months income salary wage price cost charge fee amount "
    "balance rate ratio percent score "
    "count number num n size weight height length width area distance speed temperature temp "
    "latitude longitude lat lon "
    "bmi pressure glucose dose",
    CATEGORY: "sex gender race country city state region province type kind category status "
    "marital job occupation employer "
    "ward department code diagnosis icd "
    "education degree language color colour brand level group grade is has",
}
"""Words in the name of a column, and the kind that they suggest."""
MOST_CATEGORIES = 50
"""A public column with more different words than these is ignored."""


@dataclass(frozen=True)
class DraftColumn:
    """One column of a draft: its name, its kind (None: open), why, and what is filled in
    already.
    """

    name: str
    kind: str | None
    why: str
    filled: Mapping[str, object] = field(default_factory=dict)


def guessed(name: str) -> DraftColumn:
    """The kind that a name suggests: the last of its words that suggests one decides."""
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|[^\W\d_a-zA-Z]+", name)]
    if not words:
        return DraftColumn(
            name,
            IGNORE if not name else None,
            "has no name" if not name else "its name says nothing",
        )
    for word in reversed(words):
        for kind, known in WORDS.items():
            if word in known.split():
                return DraftColumn(name, kind, "guessed from the name")
    return DraftColumn(name, None, "the name does not say")


def columns(
    names: Iterable[str], stated: Iterable[str | None], given: Mapping[str, str]
) -> list[DraftColumn]:
    """The columns of a draft: their kinds as `given` by name, as `stated` by the file (one for
    each), or guessed from names.

    A label is never more than one: where one is given, others that only sound like one are open.
    """
    names, labelled = list(names), LABEL in given.values()
    for name in given:
        if name not in names:
            raise InvalidInput(f"--{given[name]}", name, "must be a column of the file")
    found: list[DraftColumn] = []
    for name, kind in zip(names, stated, strict=True):
        column = guessed(name)
        if name in given:
            column = DraftColumn(name, given[name], "as given")
        elif kind is not None and column.kind not in (LABEL, IGNORE):
            column = DraftColumn(name, kind, "the type in the file")
        if column.kind == LABEL and name not in given and labelled:
            column = DraftColumn(name, None, "the name does not say")
        labelled = labelled or column.kind == LABEL
        found.append(column)
    return found


def filled(column: DraftColumn, cells: Iterable[object]) -> DraftColumn:
    """The column with what its cells say. Only for a table that its owner declared public.

    Numbers get their range, words their list; a missing cell becomes the middle number, or no word
    at all.
    """
    present = [str(cell).strip() for cell in cells if cell is not None and str(cell).strip()]
    numbers = [value for value in map(_number, present) if value is not None]
    kind = column.kind
    if kind is None and present:
        kind = NUMBER if len(numbers) == len(present) and len(set(present)) > 2 else CATEGORY
    words = sorted(set(present))
    if kind == NUMBER and numbers and len(numbers) == len(present) and min(numbers) < max(numbers):
        middle = sorted(numbers)[len(numbers) // 2]
        return DraftColumn(
            column.name, kind, column.why, {"range": [min(numbers), max(numbers)], "fill": middle}
        )
    days = [cell[:10] for cell in present if _day(cell)]
    if kind == DATE and days and len(days) == len(present) and min(days) < max(days):
        return DraftColumn(column.name, kind, column.why, {"range": [min(days), max(days)]})
    if kind == LABEL and len(words) >= 2:
        return DraftColumn(column.name, kind, column.why, {"classes": words})
    if kind == CATEGORY and 0 < len(words) <= MOST_CATEGORIES:
        return DraftColumn(column.name, kind, column.why, {"categories": words, "fill": "other"})
    if kind == CATEGORY:
        return DraftColumn(
            column.name, IGNORE, f"holds no word, or more than {MOST_CATEGORIES} different ones"
        )
    return DraftColumn(column.name, kind, column.why)


def _day(cell: str) -> bool:
    try:
        return bool(date.fromisoformat(cell[:10]))
    except ValueError:
        return False


def _number(cell: str) -> float | int | None:
    try:
        value = float(cell) if "_" not in cell else math.nan
    except ValueError:
        return None
    return (int(value) if value.is_integer() else value) if math.isfinite(value) else None


KEYS = {NUMBER: "range", DATE: "range", CATEGORY: "categories", LABEL: "classes"}
"""What must be known of a column of each kind."""
HINTS = {
    "kind": '"number", "category", "date", "text" or "label"; or put ignore = true in its place',
    "range": "[low, high]: numbers beyond it are moved to its end",
    "dates": '["2020-01-01", "2023-12-31"]: dates beyond it are moved to its end',
    "categories": '["word", "word"]: what is not listed becomes all zeros',
    "classes": '["no", "yes"]: what is to be predicted; rows with anything else are left out',
}


def schema(title: str, drafted: Iterable[DraftColumn], *, public: bool) -> str:
    """The draft as TOML. Every open place is a "?"."""
    origin = (
        "from its values: the file was declared public (--public). Check every line."
        if public
        else "from the names of its columns: no record was read."
    )
    lines = [
        f"# Schema of {toml(title)}, drafted by dpfy init {origin}",
        '# A "?" is a place for you to fill in from what is public (a code book, the law, common '
        "sense), not from a look at the records.",
        "# dpfy train refuses the schema, and lists every such place, while one is left. Change a "
        "kind where it was guessed wrongly.",
        'missing = [""]',
    ]
    for column in drafted:
        lines += ["", f"[columns.{_key(column.name)}]", *_entry(column)]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml(name)


def _entry(column: DraftColumn) -> list[str]:
    if column.kind == IGNORE:
        return [f"ignore = true  # {column.why}"]
    if column.kind is None:
        return [f"kind = {toml(OPEN)}  # {column.why}: {HINTS['kind']}"]
    if column.kind == TEXT:
        return [
            f"kind = {toml(TEXT)}  # {column.why}; with buckets = 64 learners read it, as so many "
            f"hashed features"
        ]
    key = KEYS[column.kind]
    lines = [
        f"kind = {toml(column.kind)}  # {column.why}",
        f"{key} = {toml(column.filled.get(key, OPEN))}  # "
        f"{HINTS['dates' if column.kind == DATE else key]}",
    ]
    fill = column.filled.get("fill", "other" if column.kind == CATEGORY else None)
    return lines + ([] if fill is None else [f"fill = {toml(fill)}  # what a missing cell becomes"])


def open_places(drafted: Iterable[DraftColumn]) -> int:
    """How many places of the schema are open."""
    return sum(
        column.kind is None or (column.kind in KEYS and KEYS[column.kind] not in column.filled)
        for column in drafted
    )


def job(
    kind: str, path: str, schema_path: str, name: str, user: str | None, at_most: int | None
) -> str:
    """A job for the table, with the number of its records left open; and of those of one person,
    unless it is given.
    """
    owner = (
        [
            f"user = {toml(user)}",
            f"most_records = {toml(at_most or OPEN)}  # of one user: of more, others each time",
        ]
        if user
        else []
    )
    units = "users" if user else "records"
    parted = "a public hash of their names" if user else "a fixed public permutation"
    lines = [
        f"# dpfy train {_key(name)}.job.toml --out runs/{_key(name)}        (every key: dpfy train "
        f"--show-config)",
        "[data]",
        f"kind = {toml(kind)}",
        f"path = {toml(path)}",
        f"schema = {toml(schema_path)}",
        f"test_fraction = 0.2  # this share of the {units} is held out, by {parted}",
        'test = "withheld"  # or "billed": noisy figures of the held-out records, paid for; '
        '"public": exact ones, not protected',
        *owner,
        "",
        "[model]",
        'name = "linear"  # or "mlp" with hidden = [32]',
        "",
        "[privacy]",
        "epsilon = 3.0",
        "delta = 1e-5  # must be below 1/records",
        f"records = {toml(OPEN)}  # public number of {units} to train on: 8000 of 10000, with a "
        f"fifth held out.",
        "# The count itself is protected, so give a number that is public. If the exact count is "
        'public say records = "public" and',
        '# adjacency = "replace-one": the guarantee then hides what a record holds, not that it is '
        "there.",
        "",
        "[training]",
        "steps = 120",
        "learning_rate = 0.5",
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class ColumnChoices:
    """What the user said about columns, by name."""

    label: str | None = None
    number: tuple[str, ...] = ()
    category: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    user: str | None = None
    at_most: int | None = None
    date: tuple[str, ...] = ()
    text: tuple[str, ...] = ()

    def kinds(self) -> dict[str, str]:
        """Kind by column; a column that is given twice is refused."""
        said = [(self.label, LABEL), (self.user, IGNORE)]
        said += [(n, NUMBER) for n in self.number] + [(n, CATEGORY) for n in self.category]
        said += [(n, IGNORE) for n in self.ignore] + [(n, DATE) for n in self.date]
        said += [(n, TEXT) for n in self.text]
        found: dict[str, str] = {}
        for name, kind in said:
            if name is None:
                continue
            if found.setdefault(name, kind) != kind:
                raise InvalidInput(
                    f"--{kind}", name, f"is given as {found[name]} too; give it once"
                )
        return found


def write(
    data: str, out: Path, given: ColumnChoices, *, public: bool, header: bool, force: bool
) -> dict[str, Any]:
    """Draft schema and job of the table `data` into the folder `out`.

    Guarantees: unless `public`, nothing after the header is read; both files are written or
    neither, and none that is there is replaced unless `force`.
    """
    if given.at_most is not None and given.user is None:
        raise InvalidInput("--at-most", given.at_most, "goes with --person, the column of names")
    if given.at_most is not None:
        check.integer("--at-most", given.at_most)
    if not os.path.isdir(out):
        raise InvalidInput("--out", str(out), "must be a folder that exists")
    file, kind = DataFile.given(data), kind_of(data) or "csv"
    if kind not in ("csv", "parquet"):
        raise InvalidInput(
            "DATA",
            data,
            "must be a table, CSV or Parquet; dpfy train reads this kind without a schema",
        )
    found = read_header(file, parquet=kind == "parquet")
    _check(found, data, header)
    drafted = columns(found.names, found.kinds, given.kinds())
    if public:
        table: dict[str, Any] = read_table(file, 0, kind == "parquet")
        drafted = [filled(column, table[column.name]) for column in drafted]
    name = file.path.name.removesuffix(".gz").rpartition(".")[0] or file.path.name
    schema_file, job_file = out / f"{name}.schema.toml", out / f"{name}.job.toml"
    texts = {
        schema_file: schema(file.path.name, drafted, public=public),
        job_file: job(kind, data, str(schema_file), name, given.user, given.at_most),
    }
    _save_all(texts, force)
    return {
        "columns": len(drafted),
        "open": open_places(drafted),
        "label": next((column.name for column in drafted if column.kind == LABEL), None),
        "public": public,
        "schema": str(schema_file),
        "job": str(job_file),
    }


def _check(found: Header, data: str, header: bool) -> None:
    if len(set(found.names)) != len(found.names):
        raise InvalidInput("DATA", data, "has two columns of one name; rename one")
    if not header and looks_like_a_record(found.names):
        rule = (
            "its first line holds a number or a date, so it looks like a record and not like "
            "names; add a line of names, or say --header"
        )
        raise InvalidInput("DATA", data, rule)


def _save_all(texts: dict[Path, str], force: bool) -> None:
    for path in texts:
        if os.path.lexists(path) and not force:
            raise InvalidInput("--out", str(path), "is there already; --force replaces it")
        if os.path.lexists(path) and not path.is_file():
            raise InvalidInput("--out", str(path), "is there already and is no file")
    for path, text in texts.items():
        try:
            content = text.encode()
            storage.write_atomically(path, content) if force else storage.create(path, content)
        except OSError as problem:
            raise InvalidInput(
                "--out", str(path), storage.why(problem, "cannot be written")
            ) from None


def misfits(schema: str, sample: str) -> list[str]:
    """A line for each column of public sample rows that has cells which do not fit: how many, and
    the first of them with its row. Only for rows that their owner declared public.
    """
    held = Schema.of(schema)
    table = PrivateTable(sample, replace(held, strict=False))
    found = [f"{name}: is in the schema but not in {sample}" for name in sorted(held.names)
             if not table.has(name)]  # fmt: skip
    for column in held.columns:
        if isinstance(column, OpenColumn) or not table.has(column.name):
            continue
        wrong = np.flatnonzero(table.unfit(column.name))
        if len(wrong):
            cells, row = table.cells(column.name), int(wrong[0])
            first = repr(cells[row])[:60]
            found.append(
                f"{column.name}: {len(wrong)} of {table.size} cells do not fit ({column}); the "
                f"first is {first} in row {row + 1}"
            )
    return found


def looks_like_a_record(names: tuple[str, ...]) -> bool:
    """Whether a line of names holds a number or a date: then it is more likely somebody's data."""
    return any(_is_value(name) for name in names)


def _is_value(name: str) -> bool:
    for read_as in (float, date.fromisoformat):
        try:
            read_as(name)
            return name.lower() not in ("nan", "inf", "infinity")
        except ValueError:
            pass
    return False
