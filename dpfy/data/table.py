"""CSV and Parquet, encoded by a public schema: clamp, scale, one-hot. Nothing is learnt from the
cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dpfy.core.errors import InvalidInput
from dpfy.data import schema as schemas
from dpfy.data.cells import read_csv, read_parquet
from dpfy.data.config import DataConfig
from dpfy.data.dataset import DataSource, Encoded, assemble, labelled
from dpfy.data.files import DataFile, DataFolder
from dpfy.data.owners import owner_words
from dpfy.data.schema import OTHER, Category, Label, Number, Schema

Cells = Sequence[object]


def from_config(config: DataConfig) -> DataSource:
    """A table from the files and the schema that the configuration names."""
    assert config.path is not None
    assert config.schema is not None
    schema = schemas.load(config.schema)

    def part(path: str, owned: bool) -> Encoded:
        file = DataFile.given(path)
        columns: dict[str, Any] = dict(
            read_csv(file) if config.kind == "csv" else read_parquet(file)
        )
        owners = (
            owner_words(
                f"{file.name}: column {config.user}", _named(columns, schema, config, "user", file)
            )
            if owned
            else None
        )
        times = (
            _named(columns, schema, config, "time", file)
            if owned and config.time is not None
            else None
        )
        for name in {config.user, config.time} - schema.names:
            columns.pop(str(name), None)
        return replace(encode(columns, schema, file.name), owners=owners, times=times)

    charged = config.user is not None and config.test_use == "billed"
    test = None if config.test_path is None else part(config.test_path, charged)
    return assemble(
        part(config.path, config.user is not None),
        test,
        config,
        len(schema.label.classes),
        f"a table of {len(schema.features)} columns",
    )


def adult(config: DataConfig) -> DataSource:
    """UCI Adult (census income) from the data folder, by the packaged schema."""
    schema = schemas.load("adult")
    file = DataFolder.find(config.dir).file("adult", "adult.csv.gz", "adult.csv")
    train = encode(read_csv(file), schema, file.name)
    return assemble(train, None, config, len(schema.label.classes), "UCI Adult, census income")


def encode(
    columns: dict[str, list[str]] | dict[str, list[object]], schema: Schema, name: str
) -> Encoded:
    """Features and labels by the schema.

    Guarantees: each row is encoded by itself from public rules. A number outside its range is
    clamped, a category that is not listed becomes all zeros; both are counted and neither changes
    the encoding of another row.
    """
    _check_columns(columns, schema, name, schema.names)
    features, clamped = encode_features(columns, schema, name)
    labels = _labels(columns[schema.label.name], schema.label, name)
    return Encoded(
        labelled(features, torch.from_numpy(labels), len(schema.label.classes), name), clamped
    )


def unlabelled(columns: dict[str, Any], schema: Schema, name: str) -> tuple[torch.Tensor, int]:
    """Features of rows to predict on, and how many values had to be clamped: label and ignored
    columns may be missing.
    """
    _check_columns(columns, schema, name, frozenset(column.name for column in schema.features))
    return encode_features(columns, schema, name)


def encode_features(columns: dict[str, Any], schema: Schema, name: str) -> tuple[torch.Tensor, int]:
    """The features alone, and how many values had to be clamped."""
    blocks, clamped = [], 0
    for column in schema.features:
        cells = columns[column.name]
        if isinstance(column, Number):
            block, outside = _numbers(cells, column, schema.missing, name)
        else:
            block, outside = _one_hot(cells, column, schema.missing, name)
        blocks.append(block)
        clamped += outside
    return torch.from_numpy(np.concatenate(blocks, axis=1)), clamped


def _named(
    columns: dict[str, Any], schema: Schema, config: DataConfig, field: str, file: DataFile
) -> list[Any]:
    """The column that the configuration names in `field`, which is no feature."""
    name = getattr(config, field)
    if name not in columns:
        raise InvalidInput(f"data.{field}", name, f"must be a column of {file.name}")
    if name in schema.names - schema.ignored:
        rule = "is a feature or the label in the schema; leave it out there, or set ignore = true"
        raise InvalidInput(f"data.{field}", name, rule)
    return list(columns[name])


def _check_columns(
    columns: dict[str, Any], schema: Schema, name: str, needed: frozenset[str]
) -> None:
    for column in sorted(needed - set(columns)):
        raise InvalidInput(f"{name}: column", column, "is in the schema but not in the file")
    for column in columns:
        if column not in schema.names:
            rule = "is in the file but not in the schema; describe it or set ignore = true"
            raise InvalidInput(f"{name}: column", column, rule)


def _is_missing(cell: object, markers: tuple[str, ...]) -> bool:
    return cell is None or (isinstance(cell, str) and cell.strip() in markers)


def _no_value(name: str, column: str, row: int) -> InvalidInput:
    return InvalidInput(
        f"{name}: column {column}, row {row}",
        "no value",
        "give a public fill for the column in the schema",
    )


def _numbers(
    cells: Cells, column: Number, markers: tuple[str, ...], name: str
) -> tuple[np.ndarray, int]:
    low, high = column.range
    bottom, top = column.transformed(low), column.transformed(high)
    offset, span = (-1.0, 2.0) if column.scale == "symmetric" else (0.0, 1.0)
    outside = 0
    values = np.empty((len(cells), 1), dtype=np.float32)
    for row, cell in enumerate(cells):
        if _is_missing(cell, markers):
            if column.fill is None:
                raise _no_value(name, column.name, row + 1)
            value = column.fill
        else:
            value = _number(cell, column.name, row + 1, name)
        outside += not low <= value <= high
        share = (column.transformed(min(max(value, low), high)) - bottom) / (top - bottom)
        values[row, 0] = offset + span * share
    return values, outside


def _number(cell: object, column: str, row: int, name: str) -> float:
    try:
        if isinstance(cell, bool) or (isinstance(cell, str) and "_" in cell):
            raise ValueError
        value = float(cell)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InvalidInput(
            f"{name}: column {column}, row {row}", "a cell that is no number", "must be a number"
        ) from None
    if not math.isfinite(value):
        raise InvalidInput(
            f"{name}: column {column}, row {row}", "NaN or infinity", "must be finite"
        )
    return value


def _one_hot(
    cells: Cells, column: Category, markers: tuple[str, ...], name: str
) -> tuple[np.ndarray, int]:
    place = {word: position for position, word in enumerate(column.categories)}
    outside = 0
    values = np.zeros((len(cells), column.width), dtype=np.float32)
    for row, cell in enumerate(cells):
        word = _word(cell)
        # A listed category wins over a marker of the same spelling: the schema may list "?" as a
        # category of its own.
        if word not in place and _is_missing(cell, markers):
            if column.fill is None:
                raise _no_value(name, column.name, row + 1)
            word = column.fill
        elif word not in place:
            outside += 1
            continue
        if word in place or word != OTHER:
            values[row, place[word]] = 1.0
    return values, outside


def _labels(cells: Cells, column: Label, name: str) -> np.ndarray:
    place = {word: position for position, word in enumerate(column.classes)}
    values = np.empty(len(cells), dtype=np.int64)
    for row, cell in enumerate(cells):
        answer = place.get(_word(cell))
        if answer is None:
            rule = f"must be one of the declared classes: {', '.join(column.classes)}"
            raise InvalidInput(
                f"{name}: column {column.name}, row {row + 1}", "a label outside", rule
            )
        values[row] = answer
    return values


def _word(cell: object) -> str:
    return cell.strip() if isinstance(cell, str) else str(cell)
