"""Frozen dataclasses to JSON and back, through a fixed table of names: loading never imports what a
file names.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from typing import Any

from dpfy.core import check
from dpfy.core.errors import InvalidInput

KIND = "kind"


class Codec:
    """Encodes objects of the classes in `table` as ``{"kind": name, field: value, ...}`` and
    decodes them again, equal.

    A class may name in `LATER` fields that it did not have in earlier versions: they are left out
    while they have their default, so that what was written before reads, and is written, as it was.

    Guarantees: an unknown kind, an unknown field and a missing field are errors; nothing outside
    the table is ever constructed.
    """

    def __init__(self, what: str, table: Mapping[str, type]) -> None:
        self.what = what
        self.table = dict(table)
        self.names = {cls: name for name, cls in table.items()}

    def encode(self, value: Any) -> Any:
        """The JSON form of `value`."""
        if isinstance(value, Enum):
            return value.value
        if is_dataclass(value) and not isinstance(value, type):
            if type(value) not in self.names:
                raise InvalidInput(
                    self.what,
                    type(value).__name__,
                    f"must be one of {', '.join(sorted(self.table))}",
                )
            held = {
                f.name: getattr(value, f.name) for f in fields(value) if not _left_out(value, f)
            }
            return {KIND: self.names[type(value)]} | {
                name: self.encode(part) for name, part in held.items()
            }
        if isinstance(value, (tuple, list)):
            return [self.encode(v) for v in value]
        if isinstance(value, float) and not math.isfinite(value):
            return {KIND: "float", "value": repr(value)}
        return value

    def decode(self, data: Any) -> Any:
        """The object whose JSON form is `data`."""
        if isinstance(data, list):
            return tuple(self.decode(v) for v in data)
        if not isinstance(data, dict):
            return data
        rest = dict(data)
        name = rest.pop(KIND, None)
        if name == "float":
            return float(rest["value"])
        cls = self.table[check.one_of(f"{self.what}.{KIND}", name, sorted(self.table))]
        known = {f.name for f in fields(cls)}
        check.known_keys(f"{self.what}.{name}", rest, known)
        if missing := known - set(rest) - set(getattr(cls, "LATER", ())):
            raise InvalidInput(
                f"{self.what}.{name}", sorted(rest), f"misses {', '.join(sorted(missing))}"
            )
        return cls(**{k: self.decode(v) for k, v in rest.items()})


def _left_out(value: Any, field: Field[Any]) -> bool:
    return field.name in getattr(value, "LATER", ()) and bool(
        getattr(value, field.name) == field.default
    )


def number(value: float | None) -> float | str | None:
    """A float for JSON, which has no infinity. What is not a number (the loss of a model that
    diverged) counts as infinite.
    """
    return "infinity" if value is not None and not math.isfinite(value) else value


def canonical(data: Any) -> str:
    """The one textual form of a JSON value: sorted keys, no spaces, no NaN."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(data: Any) -> str:
    """SHA-256 of the canonical form, as hex."""
    return hashlib.sha256(canonical(data).encode()).hexdigest()
