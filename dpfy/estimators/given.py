"""A `dpfy.Dataset` as an estimator reads it: its table, its schema, its persons, and what all
releases on it may cost.

Tables in files, for estimators: the header is read before anything is reserved, the rows when a
fit asks for them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.engines.sources import column_names, parquet_files
from dpfy.runs.dataset import Dataset
from dpfy.tables.sources import TableFile, cells_of

if TYPE_CHECKING:
    from dpfy.estimators.estimator import PrivateEstimator


class FileTable(TableFile):
    """A CSV or Parquet file as a table of private records."""

    def column(self, name: str) -> NDArray[Any]:
        """A column as it is written."""
        return np.array(super().column(name), object)

    def target(self, name: str) -> FileColumn:
        """A column that is read when it is asked for."""
        if name not in self.names:
            raise InvalidInput(
                "target",
                name,
                f"must be a column of {self._file.name}: {', '.join(self.names)[:200]}",
            )
        return FileColumn(self, name)


class EngineTable(FileTable):
    """A table that stays in its engine: Parquet files, a table of a DuckDB database, a relation."""

    def __init__(self, source: Any) -> None:
        self.source = source
        names = column_names(source)
        self.names = tuple(TableFile(source).names if names is None else names)
        shown = Path(source).name if isinstance(source, str | Path) else type(source).__name__
        self._file = Path(shown)  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"EngineTable({self._file.name!r})"

    def column(self, name: str) -> NDArray[Any]:
        """No column leaves the engine."""
        rule = "give one file, which is read into memory"
        raise Unsupported(f"the column {name} of a table that stays in its engine", rule)


class FileColumn:
    """A column of a file: one value for each record."""

    def __init__(self, table: FileTable, name: str) -> None:
        self._table, self._name = table, name

    def to_numpy(self) -> NDArray[Any]:
        """Its cells, as numbers where all of them are."""
        cells = self._table.column(self._name)
        try:
            return cells.astype(np.float64)
        except (TypeError, ValueError):
            return cells


"""Delta of a fit where neither it nor a number of records nor a budget is given."""


class HeldTable(FileTable):
    """A table in memory, or cells by column, as a file's is read: by the names of the schema."""

    def __init__(self, source: Any, names: tuple[str, ...]) -> None:
        self._held = cells_of(source, names)
        self.names = tuple(self._held)
        self._file = Path(type(source).__name__)  # type: ignore[assignment]

    @classmethod
    def at(cls, table: FileTable, rows: NDArray[np.int64]) -> HeldTable:
        """Some rows of a table."""
        cells = {name: table.column(name)[rows] for name in table.names}
        return cls(cells, tuple(cells))

    def __repr__(self) -> str:
        return f"HeldTable({', '.join(self.names)})"

    @cached_property
    def _cells(self) -> Mapping[str, Any]:  # type: ignore[override]
        return self._held


def table_for(
    estimator: PrivateEstimator, source: Any, names: tuple[str, ...], target: str | None
) -> FileTable:
    """The table of an estimator: one that stays in its engine, where there is an engine for it and
    the estimator needs nothing but its sums.

    Raises:
        Unsupported: Only an engine reads it, and the estimator needs more than sums.
    """
    engine = column_names(source) is not None
    if engine or (isinstance(source, str | Path) and parquet_files(str(source)) is not None):
        why = estimator._not_in_engine(target)
        if why is None:
            return EngineTable(source)
        if engine:
            way = "use one file or a table in memory, or another estimator or solver"
            raise Unsupported(f"{why} on a table that stays in its engine", way)
    return FileTable(source) if isinstance(source, str | Path) else HeldTable(source, names)


def taken(
    estimator: PrivateEstimator, data: Dataset, target: str | None
) -> tuple[PrivateEstimator, FileTable, FileColumn | None]:
    """(a copy of `estimator` in which what the data set says stands instead of its parameters, the
    table, what is predicted).

    Raises:
        InvalidInput: Both say something, or the target is no column of the schema.
    """
    for name in ("schema", "bounds", "unit", "ledger", "records"):
        if getattr(estimator, name, None) is not None:
            rule = "must be left out with a Dataset, which says it"
            raise InvalidInput(name, type(getattr(estimator, name)).__name__, rule)
    made = copy.copy(estimator)
    made.schema, made.unit, made.ledger = data.table_schema, data.unit, data.ledger
    made.__dict__.update(_budget=data.budget, _rule=data.rule(estimator.delta))
    source = data.source
    names = tuple(column.name for column in data.schema.columns)
    table = table_for(made, source, names, target)
    said = target if target is not None else getattr(estimator, "target", None)
    if not hasattr(estimator, "target"):
        if target is not None:
            rule = f"is not for {type(estimator).__name__}, which predicts nothing"
            raise InvalidInput("target", target, rule)
        return made, table, None
    said = said if said is not None else data.schema.label.name
    made.target = said  # type: ignore[attr-defined]
    return made, table, table.target(said)


def fitted_to(
    estimator: PrivateEstimator, data: Dataset, target: str | None, sample_weight: Any = None
) -> Any:
    """`estimator`, fitted to a data set: see :func:`taken`."""
    made, table, y = taken(estimator, data, target)
    made._fit(table, y, None, None, sample_weight)
    estimator._load(made.release_)
    return estimator
