"""Tables in files: their header is read before anything is reserved, their rows when a fit asks for
them.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core.errors import InvalidInput
from dpfy.data import header
from dpfy.data.cells import read_csv, read_parquet
from dpfy.data.files import DataFile


class FileTable:
    """A CSV or Parquet file as a table of private records. It is a table to estimators: `names`,
    and `column(name)`.

    Guarantees: nothing but the header is read before `column` is called.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = DataFile.given(str(path))
        self._parquet = str(path).lower().endswith((".parquet", ".pq"))
        self.names = header.read(self._file, parquet=self._parquet).names

    def column(self, name: str) -> NDArray[Any]:
        """A column as it is written."""
        if name not in self._cells:
            raise InvalidInput(
                "data column",
                name,
                f"is not a column of {self._file.name}: {', '.join(self.names)[:200]}",
            )
        return np.array(self._cells[name], object)

    def target(self, name: str) -> FileColumn:
        """A column that is read when it is asked for."""
        if name not in self.names:
            raise InvalidInput(
                "target",
                name,
                f"must be a column of {self._file.name}: {', '.join(self.names)[:200]}",
            )
        return FileColumn(self, name)

    @cached_property
    def _cells(self) -> dict[str, Any]:
        return dict(
            read_parquet(self._file, least=0) if self._parquet else read_csv(self._file, least=0)
        )


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
