"""The public domain of a table: its columns as cells, and the combinations that cannot be. Nothing
in it is read from the records.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.synthetic.columns import TableColumn, table_column
from dpfy.synthetic.constraints import Constraint, parse_constraints
from dpfy.tables.columns import Number, OpenColumn
from dpfy.tables.schema import Schema

Clique = tuple[int, ...]
"""Numbers of columns, ascending: a marginal."""

MOST_COLUMNS = 1000


@dataclass(frozen=True)
class Domain:
    """The columns of a table in the order of the schema, the names of those that are left out, and
    the constraints.
    """

    columns: tuple[TableColumn, ...]
    ignored: frozenset[str] = frozenset()
    constraints: tuple[Constraint, ...] = ()
    strict: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.columns) <= MOST_COLUMNS:
            raise InvalidInput(
                "columns", len(self.columns), f"must be 1 to {MOST_COLUMNS} that are not ignored"
            )

    @classmethod
    def given(cls, schema: Any) -> Domain:
        """A domain as it is, or a schema: a packaged one, or a TOML file."""
        return schema if isinstance(schema, Domain) else cls.described(Schema.of(schema))

    @classmethod
    def parse(cls, text: str, name: str) -> Domain:
        """From the TOML of a schema."""
        return cls.described(Schema.parse(text, name))

    @classmethod
    def described(cls, schema: Schema) -> Domain:
        """From a schema."""
        ignored = frozenset(c.name for c in schema.columns if isinstance(c, OpenColumn))
        columns = tuple(
            table_column(column, schema.missing)
            for column in schema.columns
            if column.name not in ignored
        )
        rules = parse_constraints(list(schema.constraints), columns)
        return cls(columns, ignored, rules, schema.strict)

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Domain:
        """Columns of whole numbers from 0, so many each."""
        numbers = (
            Number(name, 0, check.integer(name, size, least=2) - 1, bins=size, required=True)
            for name, size in sizes.items()
        )
        return cls(tuple(map(table_column, numbers)))

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
