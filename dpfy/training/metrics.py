"""metrics.jsonl: what a run tells about itself while it goes, one JSON object a line. Only public
values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dpfy.core import storage
from dpfy.core.codec import number
from dpfy.core.errors import Corrupt

FILE = "metrics.jsonl"


def rows(folder: Path) -> list[dict[str, Any]]:
    """All whole rows so far; a last line that a crash cut short does not count."""
    file = folder / FILE
    if not file.is_file():
        return []
    lines = storage.text(FILE, file).splitlines(keepends=True)
    found = [storage.parsed_json(FILE, line) for line in lines if line.endswith("\n")]
    if not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in found):
        raise Corrupt(FILE, "holds a line that is no row of metrics")
    return found


def last_step(folder: Path) -> int:
    """The step of the last row, 0 if there is none."""
    found = rows(folder)
    return int(found[-1]["step"]) if found else 0


def append(folder: Path, row: dict[str, Any]) -> None:
    """Add a row."""
    storage.append(
        folder / FILE,
        (json.dumps({k: number(v) for k, v in row.items()}, allow_nan=False) + "\n").encode(),
    )


def cut(folder: Path, step: int) -> None:
    """Forget rows written after `step`: the resumed run will write them again."""
    if not (folder / FILE).is_file():
        return
    kept = [row for row in rows(folder) if row["step"] <= step]
    storage.write_atomically(
        folder / FILE, "".join(json.dumps(row) + "\n" for row in kept).encode()
    )
