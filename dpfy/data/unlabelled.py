"""Records without labels, to predict on: encoded by the same public rules as those that a model was
trained on.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dpfy.core.errors import InvalidInput
from dpfy.core.files import DataFile
from dpfy.data import arrays, idx, table
from dpfy.data.config import DataConfig
from dpfy.tables.schema import Schema
from dpfy.tables.sources import read_table

SCALES = {
    **dict.fromkeys(("embedded", "mnist", "fashion-mnist", "cifar10", "cifar100", "idx"), 255.0),
    "images": 255.0,
    "digits": 16.0,
}
"""The largest value of a pixel, by which a kind of data is divided."""
LABEL = "label"
"""A column of this name in a table of plain numbers is not read."""


def of_table(path: str, schema: Schema, user: str | None) -> Tensor:
    """The rows of a CSV or Parquet file by `schema`. Columns of labels and users may be there."""
    file = DataFile.given(path)
    columns = read_table(file)
    if user is not None and user not in schema.names:
        columns.pop(user, None)
    return table.unlabelled(columns, schema, file.name)


def of_numbers(path: str, config: DataConfig, shape: tuple[int, ...]) -> Tensor:
    """Arrays of a record's `shape`, scaled as `config` says: the array `x` of an NPZ file, an IDX
    file of images, or a CSV file with a column for each number of a record.
    """
    file = DataFile.given(path)
    if path.lower().endswith(".npz"):
        held = arrays.read(file)
        if "x" not in held or held["x"].dtype.kind not in "buif":
            raise InvalidInput(
                file.name,
                f"arrays {', '.join(sorted(held)) or 'none'}",
                "must hold an array x of numbers",
            )
        found = held["x"]
    elif path.lower().endswith((".csv", ".csv.gz")):
        found = _cells(file, math.prod(shape))
        if config.kind == "npz" and config.range is None:
            raise InvalidInput(
                "data",
                path,
                "the model reads arrays as they are; give them as .npz with an array x of the same "
                "type",
            )
    else:
        found = idx.read(file, 3)
    if found.ndim < 1 or not len(found):
        raise InvalidInput("data file", file.name, "must hold at least 1 record")
    if math.prod(found.shape[1:]) != math.prod(shape):
        rule = f"must be the shape of a record that the model was trained on, {list(shape)}"
        raise InvalidInput(f"{file.name}: record", f"shape {list(found.shape[1:])}", rule)
    features = _scaled(found, config)
    if not bool(torch.isfinite(features).all()):
        first = int((~torch.isfinite(features.flatten(1)).all(1)).nonzero()[0]) + 1
        raise InvalidInput(
            f"{file.name}: record {first}", "NaN or infinity", "every value must be finite"
        )
    return features.view(len(features), *shape)


def _scaled(values: np.ndarray, config: DataConfig) -> Tensor:
    if config.kind == "npz":
        return arrays.scaled(values, config.range)
    most = SCALES[config.kind]
    held = values.astype(np.float32)
    return torch.from_numpy(np.clip(held, 0, most) / np.float32(most))


def _cells(file: DataFile, width: int) -> np.ndarray:
    columns = {
        name: cells
        for name, cells in read_table(file, parquet=False).items()
        if name.lower() != LABEL
    }
    if len(columns) != width:
        rule = f"must be {width}, one for each number of a record (a column {LABEL!r} is not read)"
        raise InvalidInput(f"{file.name}: columns", len(columns), rule)
    made = []
    for name, cells in columns.items():
        try:
            made.append(np.array([float(cell) for cell in cells]))
        except ValueError:
            raise InvalidInput(
                f"{file.name}: column {name}", "a cell that is no number", "must be numbers"
            ) from None
    return np.stack(made, axis=1)
