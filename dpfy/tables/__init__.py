"""Tables of private records: one schema, one policy for cells, one table that every family reads.

Importing this package imports neither torch nor pandas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfy.core.plugins import lazy_names as _lazy_names

if TYPE_CHECKING:
    from dpfy.tables.columns import Category, Date, Label, Number, OpenColumn, Text
    from dpfy.tables.schema import Schema
    from dpfy.tables.table import PrivateTable

__getattr__, __dir__ = _lazy_names(
    __name__,
    {
        "dpfy.tables.columns": "Category Date Label Number OpenColumn Text",
        "dpfy.tables.schema": "Schema",
        "dpfy.tables.table": "PrivateTable",
    },
)

__all__ = ["Category", "Date", "Label", "Number", "OpenColumn", "PrivateTable", "Schema", "Text"]
