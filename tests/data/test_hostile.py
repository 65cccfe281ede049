"""Paths that are no files: each is refused in one line, without being waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dpfy.core.errors import InvalidInput
from dpfy.data import source
from dpfy.data.config import DataConfig


def pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe")
    return str(folder / "pipe")


PLACES: dict[str, Callable[[Path], str]] = {
    "pipe": pipe,
    "device": lambda folder: "/dev/zero",
    "full": lambda folder: "/dev/full",
    "folder": str,
    "home": lambda folder: "~nobody-is-here/x",
    "nul": lambda folder: "a\0b",
    "long": lambda folder: "x" * 5000,
    "surrogate": lambda folder: "a\ud800",
}


@pytest.mark.parametrize("kind", ["csv", "npz", "text", "idx", "parquet", "schema", "adult"])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_is_not_waited_for(tmp_path, place, kind):
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    path = PLACES[place](tmp_path)
    (tmp_path / "schema.toml").write_text(
        '[columns.x]\nkind = "number"\nrange = [0, 1]\n[columns.y]\nkind = "label"\nclasses = '
        '["0", "1"]\n'
    )
    table = {"path": path, "schema": str(tmp_path / "schema.toml")}
    settings = {
        "csv": table,
        "parquet": table,
        "schema": {"path": path, "schema": path},
        "npz": {"path": path, "classes": 2},
        "text": {"path": path},
        "idx": {"path": path, "labels_path": path, "classes": 2},
        "adult": {"dir": path},
    }[kind]
    with pytest.raises(InvalidInput):
        source.load(DataConfig(kind="csv" if kind == "schema" else kind, **settings))
