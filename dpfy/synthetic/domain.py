"""The public domain of a table: its columns as cells, and the combinations that cannot be. Nothing
in it is read from the records.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.data import schema as schemas
from dpfy.synthetic.columns import TableColumn, date_column, listed_column, number_column
from dpfy.synthetic.constraints import Constraint, parse_constraints

Clique = tuple[int, ...]
"""Numbers of columns, ascending: a marginal."""

BUILDERS = {
    "number": number_column,
    "category": listed_column,
    "label": listed_column,
    "date": date_column,
}
KEYS = {
    "number": {"range", "bins", "fill", "required", "scale", "transform"},
    "category": {"categories", "fill", "ordered", "required"},
    "label": {"classes", "ordered", "required"},
    "date": {"range", "every", "required"},
}
MOST_COLUMNS = 1000


@dataclass(frozen=True)
class Domain:
    """The columns of a table in the order of the schema, the names of those that are left out, and
    the constraints.
    """

    columns: tuple[TableColumn, ...]
    ignored: frozenset[str] = frozenset()
    constraints: tuple[Constraint, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.columns) <= MOST_COLUMNS:
            raise InvalidInput(
                "columns", len(self.columns), f"must be 1 to {MOST_COLUMNS} that are not ignored"
            )

    @classmethod
    def given(cls, schema: Domain | str | Path) -> Domain:
        """A domain as it is, or a schema: a packaged one, or a TOML file."""
        return schema if isinstance(schema, Domain) else cls.parse(*schemas.written(str(schema)))

    @classmethod
    def parse(cls, text: str, name: str) -> Domain:
        """From the TOML of a schema."""
        entries, missing, rules = schemas.sections(text, name)
        ignored = frozenset(column for column, entry in entries.items() if _ignored(column, entry))
        columns = tuple(
            _column(column, entry, missing)
            for column, entry in entries.items()
            if column not in ignored
        )
        return cls(columns, ignored, parse_constraints(rules, columns))

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Domain:
        """Columns of whole numbers from 0, so many each."""
        entry = {
            name: {"range": [0, check.integer(name, size, least=2) - 1], "bins": size}
            for name, size in sizes.items()
        }
        return cls(
            tuple(
                number_column(name, held | {"required": True}, ("",))
                for name, held in entry.items()
            )
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(column.name for column in self.columns)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The cells of each column."""
        return tuple(column.cells for column in self.columns)

    def cells(self, clique: Clique) -> int:
        """The cells of a marginal."""
        return math.prod(self.columns[number].cells for number in clique)

    def shape(self, clique: Clique) -> tuple[int, ...]:
        """The cells of each of its columns."""
        return tuple(self.columns[number].cells for number in clique)

    def number(self, field: str, name: str) -> int:
        """The number of the column called `name`."""
        return self.names.index(check.one_of(field, name, self.names))

    def clique(self, field: str, names: Sequence[str]) -> Clique:
        """The marginal over the columns of these names."""
        found = tuple(sorted(self.number(field, name) for name in names))
        if not found or len(set(found)) < len(found):
            raise InvalidInput(field, list(names), "must name at least one column, each once")
        return found

    def words(self, clique: Clique) -> str:
        """A marginal by the names of its columns."""
        return " x ".join(self.columns[number].name for number in clique)

    def __str__(self) -> str:
        """All that is public, in one line; cut where it is long, and ending in a hash of the
        whole.
        """
        whole = "; ".join(str(column) for column in self.columns)
        rules = "".join(f"; {rule.text}" for rule in self.constraints)
        safe = "".join(c if c.isprintable() else "?" for c in whole + rules)
        return (
            f"{safe[:900]} "
            f"({hashlib.sha256(repr(self).encode('utf-8', 'surrogatepass')).hexdigest()[:16]})"
        )


def _ignored(column: str, entry: object) -> bool:
    if not isinstance(entry, Mapping):
        raise InvalidInput(
            f"columns.{column}", entry, "must be a section with a kind, or ignore = true"
        )
    if "ignore" in entry and (entry["ignore"] is not True or len(entry) > 1):
        raise InvalidInput(
            f"columns.{column}.ignore", entry["ignore"], "must be true and stand alone"
        )
    return "ignore" in entry


def _column(column: str, entry: dict[str, Any], missing: tuple[str, ...]) -> TableColumn:
    kind = check.one_of(f"columns.{column}.kind", entry.get("kind"), BUILDERS)
    check.known_keys(f"columns.{column}", entry, KEYS[kind] | {"kind"})
    made: TableColumn = BUILDERS[kind](column, entry, missing)
    return made
