"""Tables in files, for estimators: the header is read before anything is reserved, the rows when a
fit asks for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core.errors import InvalidInput
from dpfy.tables.sources import TableFile


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
