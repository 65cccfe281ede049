"""CSV and Parquet files as records to train on, by a public schema. Nothing is learnt from the
cells.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dpfy.core.errors import InvalidInput
from dpfy.core.files import DataFile, DataFolder
from dpfy.data.config import DataConfig
from dpfy.data.dataset import DataSource, Encoded, assemble, labelled
from dpfy.data.features import encoded
from dpfy.tables.schema import Schema, training_schema
from dpfy.tables.sources import read_table
from dpfy.tables.table import PrivateTable, owner_names


def from_config(config: DataConfig, every_row: bool = True) -> DataSource:
    """A table from the files and the schema that the configuration names. See `encode`."""
    assert config.path is not None
    assert config.schema is not None
    schema = training_schema(config.schema)

    def part(path: str, owned: bool) -> Encoded:
        file = DataFile.given(path)
        cells = read_table(file, parquet=config.kind == "parquet")
        owners = times = None
        if owned:
            owners = [
                owner_names(_named(cells, schema, name, "user", file)) for name in config.owners
            ]
            if config.time is not None:
                times = _named(cells, schema, config.time, "time", file)
        for name in {*config.owners, config.time} - schema.names:
            cells.pop(str(name), None)
        found = encode(cells, schema, file.name, every_row)
        return found if owners is None else found.owned(owners, times, config)

    charged = config.user is not None and config.test_use == "billed"
    test = None if config.test_path is None else part(config.test_path, charged)
    return assemble(
        part(config.path, config.user is not None),
        test,
        config,
        len(schema.label.classes),
        f"a table of {len(schema.features)} columns",
    )


def adult(config: DataConfig, every_row: bool = True) -> DataSource:
    """UCI Adult (census income) from the data folder, by the packaged schema."""
    schema = training_schema("adult")
    file = DataFolder.find(config.dir).file("adult", "adult.csv.gz", "adult.csv")
    train = encode(read_table(file, parquet=False), schema, file.name, every_row)
    return assemble(train, None, config, len(schema.label.classes), "UCI Adult, census income")


def encode(cells: dict[str, Any], schema: Schema, name: str, every_row: bool = True) -> Encoded:
    """Features and labels by the schema.

    Rows without a usable label, and those that a column with `drop` leaves out, are left out. With
    `every_row`, where the number of rows is public, none can be: such a label is the first class.

    Guarantees: each row is encoded, or left out, by itself from public rules; no cell raises an
    error unless the schema is strict.
    """
    check_columns(cells, schema, name, schema.names)
    table, label = PrivateTable(cells, schema), schema.label
    features = torch.from_numpy(encoded(table, schema.features))
    codes = label.settle(table.found(label.name))
    left_out = table.left_out(label.name)
    labels = np.where(label.fits(codes), codes, 0)
    records = labelled(features, torch.from_numpy(labels), len(label.classes), name)
    return Encoded(records, left_out=None if every_row else left_out)


def unlabelled(cells: dict[str, Any], schema: Schema, name: str) -> torch.Tensor:
    """Features of rows to predict on: label and ignored columns may be missing."""
    check_columns(cells, schema, name, frozenset(column.name for column in schema.features))
    return torch.from_numpy(encoded(PrivateTable(cells, schema), schema.features))


def _named(
    cells: dict[str, Any], schema: Schema, name: str, field: str, file: DataFile
) -> list[Any]:
    """The column that the configuration names in `field`, which is no feature."""
    if name not in cells:
        raise InvalidInput(f"data.{field}", name, f"must be a column of {file.name}")
    if name in schema.names - schema.ignored:
        rule = "is a feature or the label in the schema; leave it out there, or set ignore = true"
        raise InvalidInput(f"data.{field}", name, rule)
    return list(cells[name])


def check_columns(cells: dict[str, Any], schema: Schema, name: str, needed: frozenset[str]) -> None:
    """Refuse a table that has not the columns `needed`, or has one that the schema has not."""
    for column in sorted(needed - set(cells)):
        raise InvalidInput(f"{name}: column", column, "is in the schema but not in the file")
    for column in cells:
        if column not in schema.names:
            rule = "is in the file but not in the schema; describe it or set ignore = true"
            raise InvalidInput(f"{name}: column", column, rule)
