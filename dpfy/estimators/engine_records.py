"""Records that stay in their engine: an estimator asks for sums of whole numbers, which are those
that `dpfy.estimators.records` makes of the same records in memory.

Every number that a record adds is an expression over its own cells, made of the same operations on
doubles as in memory. So both ways give equal sums, and noise and model are made by the same code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dpfy.core.errors import Unsupported
from dpfy.engines.aggregates import KeepRequest, KeptColumn, KeptRows, TableEngine, left_in
from dpfy.engines.contributions import ContributionLimit
from dpfy.engines.expressions import (
    Expression,
    choose,
    code,
    counted_where,
    kept,
    number,
    of,
    raw,
)
from dpfy.engines.sources import opened
from dpfy.estimators.columns import FeatureColumns
from dpfy.estimators.given import EngineTable
from dpfy.estimators.records import CONTENT, EncodedRecords
from dpfy.estimators.target import ClassTarget, NumberTarget, Target
from dpfy.tables.columns import Category, Column, Date, Number, OpenColumn
from dpfy.tables.schema import Schema

FILES = "give one file, which is read into memory"


@dataclass(frozen=True, repr=False)
class EngineRecords:
    """Records of an engine, by their public columns; see `EncodedRecords`, whose sums these are.

    Args:
        columns: The public columns.
        engine: The table.
        aim: What is public about the target; None where nothing is predicted.
        target: The column of the target.
        at_most: How many records of a person are used; None where a record is the unit.
        key: Chooses them.
    """

    columns: FeatureColumns
    engine: TableEngine
    aim: Target | None = None
    target: str | None = None
    at_most: int | None = None
    key: str = ""
    weights: None = None
    _open: list[KeptRows] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        table: EngineTable,
        columns: FeatureColumns,
        aim: Target | None,
        target: str | None,
        person: tuple[str, int] | None,
        key: bytes,
    ) -> EngineRecords:
        """The records of a table. The engine is opened here."""
        sources: list[Column] = list(columns.sources)
        if target is not None and isinstance(aim, ClassTarget) and isinstance(aim.labels[0], str):
            sources.append(Category(target, tuple(map(str, aim.labels))))
        elif target is not None and isinstance(aim, NumberTarget):
            sources.append(Number(target, aim.low, aim.high, fill=aim.fill))
        elif target is not None:
            sources.append(OpenColumn(target))
        schema = Schema(tuple(sources), missing=columns.missing, strict=columns.strict)
        owner, at_most = (None, None) if person is None else person
        if owner is not None:
            schema = Schema((*sources, OpenColumn(owner)), columns.missing, strict=columns.strict)
        engine = opened(table.source, schema, owner)
        return cls(columns, engine, aim, target, at_most, key.hex())

    @property
    def classes(self) -> int:
        """How many classes there are."""
        assert isinstance(self.aim, ClassTarget)
        return len(self.aim.labels)

    def keep(
        self, columns: Mapping[str, tuple[Expression, int, int]], once: bool = False
    ) -> KeptRows:
        """Rows with these whole numbers, each between two public ones; they are kept until `close`.

        Guarantees: rows that the schema leaves out, and rows without a usable target, are not among
        them. Of a person at most `at_most` rows are, chosen by the rows of that person alone.
        """
        held = {name: KeptColumn(*column) for name, column in columns.items()}
        group = counted_where(of(0), left_in(self.engine.schema) & self._labelled())
        limit, content = ContributionLimit(1), tuple[Expression, ...]()
        if self.at_most is not None:
            limit, content = ContributionLimit(self.at_most), tuple(self._content())
        rows = self.engine.keep_rows(KeepRequest(group, held, content, limit, self.key, once))
        self._open.append(rows)
        return rows

    def close(self) -> None:
        """Forget what is kept."""
        for rows in self._open:
            rows.close()
        self._open.clear()

    def share(self, column: Number, width: float = 1.0, start: float = 0.0) -> Expression:
        """A number as a share of its range, times `width`, from `start` on. Missing where it is
        missing and has a cell of its own.
        """
        factor = width / (column.range[1] - column.range[0])
        value = self._filled(column)
        return (value * factor + (start - column.range[0] * factor)).clip(start, start + width)

    def scaled(self, column: Number) -> Expression:
        """A number on its scale."""
        return self.share(column, *((2.0, -1.0) if column.scale == "symmetric" else (1.0, 0.0)))

    def cell(self, column: Number, bins: int) -> Expression:
        """A number in so many equal cells of its range; the next one where it is missing and has a
        cell of its own.
        """
        share = self.share(column)
        place = (share * float(bins)).floor().clip(0.0, bins - 1.0)
        if self.columns.cell_of_missing and column.fill is None:
            place = choose(share.missing(), float(bins), place)
        return place.whole()

    def places(self, bins: int) -> list[tuple[Expression, int]]:
        """The cell of every column, and how many it has; `EncodedRecords.cells`."""
        return [
            (self.cell(column, bins), bins)
            if isinstance(column, Number)
            else (code(column.name), len(column.words) + 1)
            for column in self.columns.columns
            if not isinstance(column, OpenColumn)
        ]

    def class_cells(self, bins: int) -> NDArray[np.float64]:
        """See `EncodedRecords.class_cells`."""
        places = self.places(bins)
        named = {f"c{k}": (cell, 0, size - 1) for k, (cell, size) in enumerate(places)}
        rows = self.keep(named | {"label": (self.label, 0, self.classes - 1)}, once=True)
        cells = [
            (kept("label") * size + kept(f"c{k}"), self.classes * size)
            for k, (_, size) in enumerate(places)
        ]
        found = rows.sums(cells)
        parts = [part.reshape(self.classes, -1) for part in found]
        return np.concatenate(parts, axis=1).astype(np.float64)

    @property
    def numeric(self) -> tuple[NumberTarget, Expression]:
        """The range of a numeric target, and its values."""
        assert isinstance(self.aim, NumberTarget)
        return self.aim, self.value

    @property
    def label(self) -> Expression:
        """The place of the class; -1, or the number of classes, where there is none."""
        assert isinstance(self.aim, ClassTarget)
        assert self.target is not None
        labels = self.aim.labels
        if isinstance(labels[0], str):
            found = code(self.target)
            other = len(labels)
            if self.aim.fill is None:
                return found
            return choose(found.equals(other), labels.index(self.aim.fill), found)
        found = of(-1)
        for k, label in enumerate(labels):
            found = choose(raw(self.target).equals(float(label)), k, found)
        return found

    @property
    def value(self) -> Expression:
        """The target as a number in its range; missing where there is none."""
        assert self.target is not None
        return number(self.target)

    def _labelled(self) -> Expression:
        """Whether a row has a usable target."""
        if isinstance(self.aim, ClassTarget):
            return (self.label >= 0) & (self.label < self.classes)
        return ~self.value.missing() if self.aim is not None else of(True)

    def _filled(self, column: Number) -> Expression:
        value = number(column.name)
        if column.fill is not None or not self.columns.cell_of_missing:
            value = value.filled(column.middle if column.fill is None else column.fill)
        return value

    def _content(self) -> Sequence[Expression]:
        """What the choice of a person's rows looks at; `EncodedRecords.content`."""
        found = []
        for column in self.columns.columns:
            if isinstance(column, Number):
                share = self.share(column)
                found.append(choose(share.missing(), -1.0, share * CONTENT).whole())
            else:
                found.append(code(column.name))
        if isinstance(self.aim, ClassTarget):
            found.append(self.label)
        elif isinstance(self.aim, NumberTarget):
            aim = self.aim
            share = (self.value - aim.low) * (1 / (aim.high - aim.low))
            found.append((share.filled(0.0) * CONTENT).whole())
        return found


Records = EncodedRecords | EngineRecords


def refusal(columns: FeatureColumns) -> str | None:
    """Why an engine cannot make the features of these columns; None where it can."""
    for column in columns.sources:
        if getattr(column, "buckets", None) is not None:
            return f"hashed words of the column {column.name}"
        if getattr(column, "transform", "none") != "none":
            return f"the transform of the column {column.name}"
        if not isinstance(column, Number | Category | Date):
            return f"the range of the column {column.name}, which is not public,"
    return None


def unsupported(what: str) -> Unsupported:
    """What is not made where the table is."""
    return Unsupported(f"{what} on a table that stays in its engine", FILES)
