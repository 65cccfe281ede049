"""Tables in JSON Lines: an object on each line, whose keys are the columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.files import DataFile

SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson")
PLAIN = (str, int, float, bool, type(None))


def is_json_lines(file: DataFile) -> bool:
    """Whether the name of a file says that it is JSON Lines."""
    return str(file.path).lower().endswith(SUFFIXES)


def read_json_lines(file: DataFile) -> dict[str, Sequence[Any]]:
    """All columns by name: those of the first line.

    Guarantees: no cell raises an error. A key that a line lacks, and a value that is a list or an
    object, is a missing cell; keys that the first line does not have are not read. A line that is
    no object means that the file is damaged: an error that does not say which.
    """
    found: dict[str, list[Any]] = {}
    for line in file.text().split("\n"):
        if not line.strip():
            continue
        row = _object(line, file)
        if not found:
            found = {key: [] for key in row}
        for key, cells in found.items():
            value = row.get(key)
            cells.append(value if isinstance(value, PLAIN) else None)
    if not found:
        raise InvalidInput("data file", file.name, "must hold a line with an object that has keys")
    return dict(found)


def _object(line: str, file: DataFile) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise Corrupt(file.name, "not JSON Lines: every line must be one object")
    return row
