"""The public schema of a table: what every column may hold, written by a person who did not look at
the private records.

A schema is TOML, one section per column of the file:

    missing = ["", "?"]                 # cells that mean "no value" (default: the empty cell)

    [columns.age] kind = "number"                     # clamped to the range, then mapped to [-1, 1]
    range = [17, 90] scale = "symmetric"                 # or "unit": to [0, 1] transform = "none"
    # or "log1p": range and value go through log(1 + x) first fill = 40                           #
    what a missing cell becomes; without it a missing cell is an error

    [columns.job] kind = "category"                   # one-hot; a category that is not listed
    becomes all zeros and is counted categories = ["clerk", "nurse"] fill = "nurse"
    # or "other": all zeros, not counted

    [columns.income]
    kind = "label"                      # exactly one column; a label that is not listed is an error
    classes = ["low", "high"]

    [columns.id]
    ignore = true                       # must be in the file, is never read

`dpfy synthesize` reads the same file, with more in it (`bins`, `required`, `ordered`, columns of
kind date, `[[constraints]]`): see docs/synthetic.md. What only it needs is skipped here.

A value "?" is a place that `dpfy init` left open: a schema with one is a draft, and is refused with
all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from dpfy.core import check, errors, settings, storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.data.config import interval
from dpfy.data.files import DataFile

OTHER = "other"
OPEN = "?"
MAY_BE_OPEN = ("kind", "range", "categories", "classes")
SCALES = ("symmetric", "unit")
TRANSFORMS = ("none", "log1p")


@dataclass(frozen=True)
class Number:
    """A number in a public range. Encoded as one feature."""

    name: str
    range: tuple[float, float]
    scale: str = "symmetric"
    transform: str = "none"
    fill: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "range", interval(f"columns.{self.name}.range", self.range))
        check.one_of(f"columns.{self.name}.scale", self.scale, SCALES)
        check.one_of(f"columns.{self.name}.transform", self.transform, TRANSFORMS)
        if self.transform == "log1p" and self.range[0] <= -1:
            raise InvalidInput(
                f"columns.{self.name}.range", self.range, "must lie above -1 for log1p"
            )
        if self.fill is not None:
            fill = check.real(f"columns.{self.name}.fill", self.fill)
            if not self.range[0] <= fill <= self.range[1]:
                raise InvalidInput(
                    f"columns.{self.name}.fill", fill, f"must lie in the range {list(self.range)}"
                )

    @property
    def width(self) -> int:
        """How many features it becomes."""
        return 1

    def transformed(self, value: float) -> float:
        """A value inside the range, through the transform, before scaling."""
        return math.log1p(value) if self.transform == "log1p" else value


@dataclass(frozen=True)
class Category:
    """One of a public list of words. Encoded as one feature per word."""

    name: str
    categories: tuple[str, ...]
    fill: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "categories", _words(f"columns.{self.name}.categories", self.categories, least=1)
        )
        if self.fill is not None:
            check.one_of(f"columns.{self.name}.fill", self.fill, (*self.categories, OTHER))

    @property
    def width(self) -> int:
        """How many features it becomes."""
        return len(self.categories)


@dataclass(frozen=True)
class Label:
    """What is to be predicted, one of a public list of classes. The first class is 0."""

    name: str
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "classes", _words(f"columns.{self.name}.classes", self.classes, least=2)
        )


SYNTHESIS = frozenset({"bins", "required", "ordered"})
"""Keys of columns that are for synthetic tables alone."""

KINDS: dict[
    str, tuple[type[Number] | type[Category] | type[Label], frozenset[str], frozenset[str]]
] = {
    "number": (Number, frozenset({"range"}), frozenset({"scale", "transform", "fill"})),
    "category": (Category, frozenset({"categories"}), frozenset({"fill"})),
    "label": (Label, frozenset({"classes"}), frozenset()),
}
"""kind -> (type, required keys, optional keys)."""


@dataclass(frozen=True)
class Schema:
    """All columns of a table. Features are laid out in the order of the schema, whatever the order
    in the file.
    """

    features: tuple[Number | Category, ...]
    label: Label
    ignored: frozenset[str]
    missing: tuple[str, ...] = ("",)

    @property
    def width(self) -> int:
        """Number of features of one record."""
        return sum(column.width for column in self.features)

    @property
    def names(self) -> frozenset[str]:
        """Every column that the file must have, and may have."""
        return frozenset(column.name for column in self.features) | {self.label.name} | self.ignored


def parse(text: str, name: str) -> Schema:
    """A schema from TOML. Unknown keys, unknown kinds and contradictions are errors that name the
    column; all are told at once.
    """
    columns, missing = _read(text, name)
    built, ignored, found = _built(columns, name)
    kinds = [entry.get("kind") for entry in columns.values() if isinstance(entry, Mapping)]
    if kinds.count("label") != 1:
        found.append(
            InvalidInput(
                "columns",
                f"{kinds.count('label')} columns of kind label",
                "must hold exactly one label",
            )
        )
    features = tuple(column for column in built if not isinstance(column, Label))
    if not found and not features:
        found.append(
            InvalidInput("columns", "no feature", "must hold at least one number or category")
        )
    errors.raise_all(found)
    return Schema(
        features, next(column for column in built if isinstance(column, Label)), ignored, missing
    )


def parse_columns(
    text: str, name: str
) -> tuple[list[Number | Category | Label], frozenset[str], tuple[str, ...]]:
    """The columns of a schema whatever they are for: those described, the names of those ignored,
    and how a missing cell is written.
    """
    columns, missing = _read(text, name)
    built, ignored, found = _built(columns, name)
    errors.raise_all(found)
    return built, ignored, missing


def sections(text: str, name: str) -> tuple[dict[str, Any], tuple[str, ...], Any]:
    """The columns of a schema as they are written, none of them open; how a missing cell is
    written; and the constraints.
    """
    columns, missing = _read(text, name)
    errors.raise_all(_draft(name, columns))
    return columns, missing, storage.parsed_toml("schema", name, text).get("constraints", [])


def _read(text: str, name: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    try:
        document = storage.parsed_toml("schema", name, text)
    except InvalidInput as problem:
        raise Corrupt(name, f"not valid TOML: {problem.rule}".replace("\n", " ")) from None
    check.known_keys("", document, {"columns", "missing", "constraints"})
    columns = document.get("columns")
    if not isinstance(columns, dict) or not columns:
        raise InvalidInput(
            "columns", columns, f"{name} must describe at least one column as [columns.NAME]"
        )
    return columns, _words("missing", document.get("missing", [""]), least=0)


def _built(
    columns: Mapping[str, Any], name: str
) -> tuple[list[Number | Category | Label], frozenset[str], list[InvalidInput]]:
    """The columns that are described, the names of those ignored, and what is wrong with the
    others.
    """
    built: list[Number | Category | Label] = []
    ignored, found = set(), _draft(name, columns)
    for column, entry in columns.items():
        try:
            if _is_ignored(column, entry):
                ignored.add(column)
            elif not _open_keys(entry):
                built.append(_column(column, entry))
        except InvalidInput as problem:
            found.append(problem)
    return built, frozenset(ignored), found


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


def rendered(schema: Schema) -> str:
    """The schema as TOML that `parse` reads back: what it says about the columns, and nothing else
    that its file may have held.
    """
    lines = [f"missing = {settings.toml(schema.missing)}"]
    for column in (*schema.features, schema.label):
        kind = next(name for name, (known, _, _) in KINDS.items() if type(column) is known)
        lines += ["", f"[columns.{settings.toml(column.name)}]", f'kind = "{kind}"']
        said = {
            name: value
            for name, value in vars(column).items()
            if name != "name" and value is not None
        }
        lines += [f"{name} = {settings.toml(value)}" for name, value in said.items()]
    for name in sorted(schema.ignored):
        lines += ["", f"[columns.{settings.toml(name)}]", "ignore = true"]
    return "\n".join(lines) + "\n"


def load(given: str) -> Schema:
    """The packaged schema of that name ("adult"), or the TOML file at that path."""
    return parse(*written(given))


def written(given: str) -> tuple[str, str]:
    """The text and the name of a schema: a packaged one ("adult"), or the TOML file at that
    path.
    """
    packaged = resources.files("dpfy.data").joinpath("schemas", f"{given}.toml")
    if len(given) < 64 and given.replace("-", "").isalnum() and packaged.is_file():
        return packaged.read_text("utf-8"), given
    file = DataFile.given(given)
    return file.text(), file.name


def _is_ignored(column: str, entry: object) -> bool:
    if not isinstance(entry, Mapping):
        raise InvalidInput(
            f"columns.{column}", entry, "must be a section with a kind, or ignore = true"
        )
    if "ignore" not in entry:
        return False
    if entry["ignore"] is not True or len(entry) > 1:
        raise InvalidInput(
            f"columns.{column}.ignore", entry["ignore"], "must be true and stand alone"
        )
    return True


def _column(column: str, entry: Mapping[str, object]) -> Number | Category | Label:
    kind, required, optional = KINDS[
        check.one_of(f"columns.{column}.kind", entry.get("kind"), KINDS)
    ]
    check.known_keys(f"columns.{column}", entry, required | optional | {"kind"} | SYNTHESIS)
    for key in sorted(required - set(entry)):
        raise InvalidInput(f"columns.{column}.{key}", None, f"must be given for a {entry['kind']}")
    fields = {key: value for key, value in entry.items() if key != "kind" and key not in SYNTHESIS}
    return kind(column, **fields)  # type: ignore[arg-type]


def _words(name: str, value: object, least: int) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise InvalidInput(name, value, "must be a list of words in quotes")
    if len(set(value)) != len(value):
        raise InvalidInput(name, value, "must not name one word twice")
    if len(value) < least:
        raise InvalidInput(name, value, f"must name at least {least}")
    return tuple(value)
