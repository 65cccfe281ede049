"""Where private pictures come from: a data set by name, an NPZ file, or arrays. Sizes and classes
are public, and never read off.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.files import DataFile
from dpfy.data import arrays
from dpfy.data.config import DataConfig
from dpfy.data.source import load
from dpfy.synthetic.evolution import Whole
from dpfy_lab.synthetic_images.claim import MOST_CLASSES
from dpfy_lab.synthetic_images.encoding import WHITE, Bytes
from dpfy_lab.synthetic_images.stages import Pictures

NAMES = ("x", "y"), ("x_train", "y_train")
ABOVE = 0.05
"""Where more than this share of the pixels is above 1, they are bytes in disguise, and clamping
them would leave white pictures.
"""
MOST_PICTURES = 1 << 25
"""So many can be added without an error."""


@dataclass(frozen=True)
class ImageSchema:
    """What is public about pictures: their size, and how many classes there are."""

    height: int
    width: int
    classes: int

    def __post_init__(self) -> None:
        check.integer("height", self.height)
        check.integer("width", self.width)
        check.integer("classes", self.classes, most=MOST_CLASSES)


KNOWN = {
    "mnist": ImageSchema(28, 28, 10),
    "fashion-mnist": ImageSchema(28, 28, 10),
    "embedded": ImageSchema(28, 28, 10),
    "digits": ImageSchema(8, 8, 10),
}
"""Data sets with a name. Their training parts are used."""


def read(data: Any, schema: ImageSchema, data_dir: Path | str | None = None) -> Pictures:
    """The private pictures: `data` is a name of `KNOWN`, an NPZ file with arrays x and y (or
    x_train and y_train), or a pair of arrays.

    Pixels are bytes, or numbers from 0 (black) to 1, which are clamped and rounded to bytes.
    """
    if isinstance(data, str) and data in KNOWN:
        source = load(DataConfig(kind=data), data_dir=data_dir)
        given, words = tuple(part.numpy() for part in source.train.tensors), data
    elif isinstance(data, str | Path):
        file = DataFile.given(str(data))
        given, words = _pair(arrays.read(file), file.name), file.name
    else:
        given, words = _given(data), "images"
    pixels, labels = (
        _pixels(np.asarray(given[0]), schema, words),
        _labels(np.asarray(given[1]), schema, words),
    )
    if len(pixels) != len(labels):
        raise InvalidInput(
            words,
            f"{len(pixels)} pictures, {len(labels)} labels",
            "must have one label for each picture",
        )
    check.integer(words, len(pixels), least=0, most=MOST_PICTURES)
    return Pictures(pixels, labels)


def _given(data: Any) -> tuple[Any, Any]:
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise InvalidInput(
            "images",
            type(data).__name__,
            "must be a file, the name of a data set, or (pictures, labels)",
        )
    return data[0], data[1]


def _pair(held: dict[str, np.ndarray], name: str) -> tuple[Any, Any]:
    for pictures, labels in NAMES:
        if pictures in held and labels in held:
            return held[pictures], held[labels]
    found = ", ".join(sorted(held)) or "nothing"
    raise InvalidInput(name, f"arrays {found}"[:200], "must hold x and y, or x_train and y_train")


def _pixels(held: np.ndarray, schema: ImageSchema, name: str) -> Bytes:
    size = (schema.height, schema.width)
    if held.ndim == 4 and held.shape[1] == 1:
        held = held[:, 0]
    if held.ndim != 3 or held.shape[1:] != size:
        raise InvalidInput(
            name,
            f"pictures of shape {held.shape[1:]}",
            f"must be grey pictures of {size[0]} x {size[1]} pixels",
        )
    if held.dtype == np.uint8:
        return held
    if held.dtype.kind != "f":
        raise InvalidInput(
            name, f"pixels of {held.dtype}", "must be bytes (uint8), or numbers from 0 to 1"
        )
    with np.errstate(invalid="ignore"):
        if held.size and float((held > 1).mean()) > ABOVE:
            raise InvalidInput(
                name,
                "many numbers above 1",
                "pixels must be numbers from 0 to 1, or bytes: .astype(numpy.uint8)",
            )
        return np.rint(np.clip(np.nan_to_num(held), 0, 1) * WHITE).astype(np.uint8)


def _labels(held: np.ndarray, schema: ImageSchema, name: str) -> Whole:
    if held.dtype.kind not in "iu" or held.ndim != 1:
        raise InvalidInput(
            name,
            f"labels of {held.dtype}, {held.ndim} axes",
            "must be whole numbers, one for each picture",
        )
    if len(held) and not (int(held.min()) >= 0 and int(held.max()) < schema.classes):
        raise InvalidInput(
            name,
            "labels",
            f"must lie from 0 to {schema.classes - 1}: there are {schema.classes} classes",
        )
    return held.astype(np.int64)
