"""The public schema of a table: what every column may hold, written by a person who did not look at
the private records. One for all commands; docs/data.md describes the file.

A value "?" is a place that `dpfy init` left open: a schema with one is a draft, and is refused with
all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from dpfy.core import check, errors, settings, storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.files import DataFile
from dpfy.tables.columns import (
    Category,
    Column,
    Date,
    Label,
    Number,
    OpenColumn,
    Text,
    word_list,
)

OPEN = "?"
MAY_BE_OPEN = ("kind", "range", "categories", "classes")
KINDS: dict[str, type[Column]] = {k.kind: k for k in (Number, Category, Date, Text, Label)}
FROM_RANGE = {Number: ("low", "high"), Date: ("first", "last")}
REQUIRED = {
    Number: ("range",),
    Category: ("categories",),
    Date: ("range",),
    Text: (),
    Label: ("classes",),
}


@dataclass(frozen=True)
class Schema:
    """What is public about the columns of a table.

    Args:
        columns: The columns, in an order of their own.
        missing: How a missing cell is written.
        strict: The caller declares the data clean. A cell that does not fit is then an error that
            names column and row.
        constraints: For synthesis, rules that every record keeps.

    Raises:
        InvalidInput: A column is there twice, or a value does not fit its rule.

    Example:
        >>> import dpfy
        >>> schema = dpfy.Schema.of([dpfy.Number("age", 0, 100), dpfy.Label("sick", ["no", "yes"])])
        >>> schema.features[0].name, schema.label.name
        ('age', 'sick')
    """

    columns: tuple[Column, ...]
    missing: tuple[str, ...] = ("",)
    strict: bool = False
    constraints: tuple[Mapping[str, str], ...] = ()

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if not names or len(set(names)) < len(names):
            raise InvalidInput("schema", names, "must name at least one column, each once")
        if not isinstance(self.strict, bool):
            raise InvalidInput("strict", self.strict, "must be true or false")

    @classmethod
    def of(cls, given: Any) -> Schema:
        """A schema from whatever describes one: a schema, a TOML file or the name of a packaged
        one, a list of columns, or columns by name.

        Raises:
            InvalidInput: It describes none, or one that contradicts itself.
        """
        if isinstance(given, Schema):
            return given
        if isinstance(given, str | Path):
            return cls.parse(*written(str(given)))
        if isinstance(given, Mapping):
            given = tuple(given.values())
        held = tuple(given) if isinstance(given, Sequence) else (given,)
        for column in held:
            if not isinstance(column, Column):
                rule = (
                    "must be a TOML file, the name of a packaged schema, or columns (dpfy.Number, "
                    "Category, Date, Text, Label)"
                )
                raise InvalidInput("schema", column, rule)
        return cls(held)

    @classmethod
    def parse(cls, text: str, name: str, labelled: bool = False) -> Schema:
        """A schema from TOML. Unknown keys, unknown kinds and contradictions are errors that name
        the column; all are told at once. `labelled`: it must have features and one label.
        """
        try:
            document = storage.parsed_toml("schema", name, text)
        except InvalidInput as problem:
            raise Corrupt(name, f"not valid TOML: {problem.rule}".replace("\n", " ")) from None
        check.known_keys("", document, {"columns", "missing", "constraints", "strict"})
        entries = document.get("columns")
        if not isinstance(entries, dict) or not entries:
            rule = f"{name} must describe at least one column as [columns.NAME]"
            raise InvalidInput("columns", entries, rule)
        missing = word_list("missing", document.get("missing", [""]))
        rules = document.get("constraints", [])
        if not isinstance(rules, list):
            rule = "must be sections [[constraints]], each with a rule"
            raise InvalidInput("constraints", rules, rule)
        built, found = [], _draft(name, entries)
        for key, entry in entries.items():
            try:
                if not _open_keys(entry):
                    built.append(column_of(key, entry))
            except InvalidInput as problem:
                found.append(problem)
        kinds = [entry.get("kind") for entry in entries.values() if isinstance(entry, Mapping)]
        if labelled and (count := kinds.count("label")) != 1:
            seen = f"{count} columns of kind label"
            found.append(InvalidInput("columns", seen, "must hold exactly one label"))
        if labelled and not found and not any(map(is_feature, built)):
            rule = "must hold at least one number or category"
            found.append(InvalidInput("columns", "no feature", rule))
        errors.raise_all(found)
        return cls(tuple(built), missing, document.get("strict", False), tuple(rules))

    @cached_property
    def named(self) -> dict[str, Column]:
        """The columns by name, with the parts of dates."""
        parts = {p.name: p for c in self.columns if isinstance(c, Date) for p in c.part_columns()}
        return parts | {column.name: column for column in self.columns}

    @property
    def names(self) -> frozenset[str]:
        """Every column that a file must have, and may have."""
        return frozenset(column.name for column in self.columns)

    @property
    def features(self) -> tuple[Column, ...]:
        """The columns that learners read, in their order."""
        return tuple(column for column in self.columns if is_feature(column))

    @property
    def ignored(self) -> frozenset[str]:
        """The names of columns that learners do not read."""
        return frozenset(
            c.name for c in self.columns if not is_feature(c) and not isinstance(c, Label)
        )

    @property
    def label(self) -> Label:
        """What is to be predicted."""
        found = [column for column in self.columns if isinstance(column, Label)]
        if len(found) != 1:
            seen = f"{len(found)} columns of kind label"
            raise InvalidInput("columns", seen, "must hold exactly one label")
        return found[0]

    def to_toml(self) -> str:
        """The schema as TOML that `parse` reads back: what it says about the columns, and nothing
        else that its file may have held.
        """
        lines = [f"missing = {settings.toml(self.missing)}"] + ["strict = true"] * self.strict
        for column in self.columns:
            lines += ["", f"[columns.{settings.toml(column.name)}]"]
            lines += [f"{k} = {settings.toml(v)}" for k, v in entry_of(column).items()]
        for rule in self.constraints:
            lines += [
                "",
                "[[constraints]]",
                *(f"{k} = {settings.toml(v)}" for k, v in rule.items()),
            ]
        return "\n".join(lines) + "\n"


def training_schema(given: Any) -> Schema:
    """A schema for training: with at least one feature, and one label."""
    if isinstance(given, str | Path):
        return Schema.parse(*written(str(given)), labelled=True)
    found = Schema.of(given)
    if not found.features:
        raise InvalidInput("columns", "no feature", "must hold at least one number or category")
    _ = found.label
    return found


def is_feature(column: Column) -> bool:
    """Whether learners read it."""
    if isinstance(column, OpenColumn):
        return isinstance(column, Text) and column.buckets is not None
    return not isinstance(column, Label)


def written(given: str) -> tuple[str, str]:
    """The text and the name of a schema: a packaged one ("adult"), or the TOML file at that
    path.
    """
    packaged = resources.files("dpfy.tables").joinpath("schemas", f"{given}.toml")
    if len(given) < 64 and given.replace("-", "").isalnum() and packaged.is_file():
        return packaged.read_text("utf-8"), given
    file = DataFile.given(given)
    return file.text(), file.name


def entry_of(column: Column) -> dict[str, Any]:
    """What the file of a schema says about a column."""
    if type(column) is OpenColumn:
        return {"ignore": True}
    ends = FROM_RANGE.get(type(column), ())  # type: ignore[call-overload]
    said = {"kind": column.kind} | (
        {"range": [getattr(column, end) for end in ends]} if ends else {}
    )
    for item in dataclasses.fields(column):
        value = getattr(column, item.name)
        if item.name not in ("name", *ends) and value != item.default and value is not None:
            said[item.name] = list(value) if isinstance(value, tuple) else value
    return said


def column_of(name: str, entry: object) -> Column:
    """The column that a section of a file describes."""
    if not isinstance(entry, Mapping):
        rule = "must be a section with a kind, or ignore = true"
        raise InvalidInput(f"columns.{name}", entry, rule)
    if "ignore" in entry:
        if entry["ignore"] is not True or len(entry) > 1:
            rule = "must be true and stand alone"
            raise InvalidInput(f"columns.{name}.ignore", entry["ignore"], rule)
        return OpenColumn(name)
    kind = KINDS[check.one_of(f"columns.{name}.kind", entry.get("kind"), KINDS)]
    ends = FROM_RANGE.get(kind, ())  # type: ignore[call-overload]
    known = {item.name for item in dataclasses.fields(kind)} - {"name", *ends}
    check.known_keys(f"columns.{name}", entry, known | {"kind"} | ({"range"} if ends else set()))
    for key in REQUIRED[kind]:  # type: ignore[index]
        if key not in entry:
            raise InvalidInput(f"columns.{name}.{key}", None, f"must be given for a {kind.kind}")
    held = {key: _plain(value) for key, value in entry.items() if key not in ("kind", "range")}
    if ends:
        pair = entry["range"]
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            what = (
                "numbers: [low, high]" if kind is Number else 'dates, ["2020-01-01", "2023-12-31"]'
            )
            raise InvalidInput(f"columns.{name}.range", pair, f"must be two {what}")
        held |= dict(zip(ends, map(_plain, pair), strict=True))
    return kind(name, **held)


def _plain(value: Any) -> Any:
    """A value of a file; TOML has dates of its own."""
    return value.isoformat() if isinstance(value, date) else value


def _draft(name: str, columns: Mapping[str, object]) -> list[InvalidInput]:
    """One problem that lists every place that is still open; none where none is."""
    left = [
        f"columns.{column}.{key}" for column, entry in columns.items() for key in _open_keys(entry)
    ]
    rule = (
        f"is a draft with {len(left)} open: {', '.join(left)}; fill in what is public, never what "
        f"was read from the records"
    )
    return [errors.UnabridgedError("schema", name, rule)] if left else []


def _open_keys(entry: object) -> list[str]:
    return (
        [key for key in MAY_BE_OPEN if entry.get(key) == OPEN] if isinstance(entry, Mapping) else []
    )
