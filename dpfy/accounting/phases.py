"""Phases of a plan from a TOML file: noise schedules, tuning plus training, several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpfy.accounting.patterns import Training
from dpfy.core import check, reading
from dpfy.core.errors import InvalidInput

FIELDS = ("noise_multiplier", "sampling_rate", "steps", "sampling", "records", "batch_size")


def read(path: Path) -> list[Training]:
    """The phases of a file of ``[[phase]]`` tables, in order. Unknown keys, wrong types and an
    empty list are errors.
    """
    return parse(reading.toml("--phases", path))


def parse(data: dict[str, Any]) -> list[Training]:
    """The phases of a parsed file."""
    check.known_keys("", data, ("phase",))
    tables = data.get("phase", [])
    if (
        not isinstance(tables, list)
        or not tables
        or not all(isinstance(table, dict) for table in tables)
    ):
        raise InvalidInput("phase", type(tables).__name__, "must be one or more [[phase]] tables")
    return [_phase(k, table) for k, table in enumerate(tables)]


def _phase(k: int, table: dict[str, Any]) -> Training:
    check.known_keys(f"phase[{k}]", table, FIELDS)
    if "noise_multiplier" not in table:
        raise InvalidInput(f"phase[{k}].noise_multiplier", None, "is needed")
    for name in ("noise_multiplier", "sampling_rate"):
        if name in table:
            check.nonnegative(f"phase[{k}].{name}", table[name])
    return Training(
        noise_multiplier=float(table["noise_multiplier"]),
        sampling_rate=float(table.get("sampling_rate", 1.0)),
        steps=check.integer(f"phase[{k}].steps", table.get("steps", 1), least=0),
        sampling=check.one_of(
            f"phase[{k}].sampling", table.get("sampling", "poisson"), _patterns()
        ),
        records=check.integer(f"phase[{k}].records", table.get("records", 0), least=0),
        batch_size=check.integer(f"phase[{k}].batch_size", table.get("batch_size", 0), least=0),
    )


def _patterns() -> tuple[str, ...]:
    from dpfy.accounting.patterns import PATTERNS

    return PATTERNS
