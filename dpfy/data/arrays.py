"""NPZ: arrays by name. Pickled objects are never loaded."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import torch
from torch import Tensor

from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.files import DataFile, unpacked
from dpfy.data.config import DataConfig
from dpfy.data.dataset import DataSource, Encoded, assemble, labelled
from dpfy.tables.table import owner_names

WHOLE = ("x", "y")
PARTS = ("x_train", "y_train", "x_test", "y_test")


def read(file: DataFile) -> dict[str, np.ndarray]:
    """Every array of the archive. A foreign, torn or pickled archive is an error."""
    content = file.read()
    if content[:2] != b"PK":
        raise Corrupt(file.name, "not an NPZ archive")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            size = sum(part.file_size for part in packed.infolist())
        if size > unpacked(len(content)):
            raise InvalidInput(
                "data file", file.name, f"unpacks to {size} bytes, too many for its size"
            )
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except InvalidInput:
        raise
    # a damaged archive raises a dozen types from three libraries, none of them a promise
    except Exception as error:
        if isinstance(error, ValueError) and "pickle" in str(error).lower():
            rule = "holds pickled objects, which are never loaded; save plain arrays"
            raise InvalidInput("data file", file.name, rule) from None
        raise Corrupt(file.name, "the NPZ archive is truncated or damaged") from None


def from_config(config: DataConfig) -> DataSource:
    """Arrays `x` and `y` (split by fraction or with a test file), or `x_train`, `y_train`,
    `x_test`, `y_test` in one file.

    With `config.user` the array of that name (`user_train` beside `x_train`) says whose each record
    is.
    """
    assert config.path is not None
    assert config.classes is not None
    file = DataFile.given(config.path)
    arrays = read(file)
    what = "arrays from an NPZ file"
    if set(PARTS) <= set(arrays):
        if config.test_path is not None:
            raise InvalidInput(
                "data.test_path", config.test_path, f"{config.path} already holds x_test and y_test"
            )
        train = _owned(
            _encode(arrays["x_train"], arrays["y_train"], config, file.name),
            arrays,
            config,
            "_train",
        )
        test = _encode(arrays["x_test"], arrays["y_test"], config, file.name)
        return assemble(
            train,
            _owned(test, arrays, config, "_test") if config.test_use == "billed" else test,
            config,
            config.classes,
            what,
        )
    train = _owned(_encode(*_pair(arrays, file), config, file.name), arrays, config)
    other: Encoded | None = None
    if config.test_path is not None:
        held_out = DataFile.given(config.test_path)
        apart = read(held_out)
        other = _encode(*_pair(apart, held_out), config, held_out.name)
        other = _owned(other, apart, config) if config.test_use == "billed" else other
    return assemble(train, other, config, config.classes, what)


def _owned(
    part: Encoded, arrays: dict[str, np.ndarray], config: DataConfig, end: str = ""
) -> Encoded:
    """The records with whose they are, where the configuration names an array of owners."""
    if config.user is None:
        return part
    owners = arrays.get(f"{config.user}{end}")
    if owners is None or owners.dtype.kind not in "iuU" or owners.shape != (len(part.records),):
        rule = (
            f"must be an array {config.user}{end} of whole numbers or words, one for each of the "
            f"{len(part.records)} records"
        )
        raise InvalidInput("data.user", config.user, rule)
    times = None if config.time is None else arrays.get(f"{config.time}{end}")
    if config.time is not None and (times is None or times.shape != (len(part.records),)):
        raise InvalidInput(
            "data.time",
            config.time,
            f"must be an array {config.time}{end}, one value for each record",
        )
    return part.owned([owner_names(owners)], times, config)


def _pair(arrays: dict[str, np.ndarray], file: DataFile) -> tuple[np.ndarray, np.ndarray]:
    if not set(WHOLE) <= set(arrays):
        found = ", ".join(sorted(arrays)) or "nothing"
        raise InvalidInput(
            file.name, f"arrays {found}", f"must hold {' and '.join(WHOLE)}, or {', '.join(PARTS)}"
        )
    return arrays["x"], arrays["y"]


def _encode(x: np.ndarray, y: np.ndarray, config: DataConfig, name: str) -> Encoded:
    if x.dtype.kind not in "buif" or y.dtype.kind not in "ui":
        raise InvalidInput(
            name, f"x of {x.dtype}, y of {y.dtype}", "x must be numbers and y whole numbers"
        )
    if x.ndim < 2 or y.ndim != 1 or len(x) != len(y):
        raise InvalidInput(
            name,
            f"x of shape {x.shape}, y of shape {y.shape}",
            "x needs one row per label, y one dimension",
        )
    assert config.classes is not None
    labels = torch.from_numpy(y.astype(np.int64))
    return Encoded(labelled(scaled(x, config.range), labels, config.classes, name))


def scaled(x: np.ndarray, public: tuple[float, float] | None) -> Tensor:
    """Features as float32: with a public range clamped and mapped to [0, 1]; else bytes over 255,
    others as is.
    """
    if public is None:
        return torch.from_numpy(x.astype(np.float32) / (255.0 if x.dtype == np.uint8 else 1.0))
    low, high = public
    values = x.astype(np.float64)
    # NaN survives the clip and is refused with its record number by the check that follows;
    # infinity is refused here.
    values = np.where(
        np.isfinite(values), (np.clip(values, low, high) - low) / (high - low), np.nan
    )
    return torch.from_numpy(values.astype(np.float32))
