"""Images in colour: CIFAR-10 and CIFAR-100 in the layouts they are published in, and any folder of
images with one sub-folder per class.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dpfy.core import check, errors, storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.files import DataFile, DataFolder
from dpfy.data.config import DataConfig
from dpfy.data.dataset import DataSource, Encoded, assemble, labelled
from dpfy.data.given import lazy
from dpfy.data.lazy import LazyRecords

SIDE = 32
PIXELS = 3 * SIDE * SIDE
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm")
MOST_IMAGE = 64 << 20
"""Bytes of one image file."""
MOST_PIXELS = 1 << 28
MOST_CLASSES = 1 << 16


@dataclass(frozen=True)
class Cifar:
    """How one of the two data sets is published: its files, and where a record's class is."""

    title: str
    classes: int
    binary: str
    python: str
    train: tuple[str, ...]
    test: str
    key: str
    labels: int
    column: str


CIFAR = {
    "cifar10": Cifar(
        "CIFAR-10",
        10,
        "cifar-10-batches-bin",
        "cifar-10-batches-py",
        tuple(f"data_batch_{n}" for n in range(1, 6)),
        "test_batch",
        "labels",
        1,
        "label",
    ),
    "cifar100": Cifar(
        "CIFAR-100",
        100,
        "cifar-100-binary",
        "cifar-100-python",
        ("train",),
        "test",
        "fine_labels",
        2,
        "fine_label",
    ),
}


def cifar(config: DataConfig) -> DataSource:
    """CIFAR-10 or CIFAR-100: the official binary or Python files (which is torchvision's folder),
    or the Parquet files of Hugging Face, in the data folder or in its sub-folder of the kind's
    name.

    Guarantees: of a pickled file nothing is made but lists, dicts, text, numbers and arrays of
    bytes.
    """
    what = CIFAR[config.kind]
    folder = DataFolder.find(config.dir)
    parts = _of_parquet(folder, config.kind, what) or _of_batches(folder, config.kind, what)
    train, test = (_encoded(*part, what) for part in parts)
    return assemble(train, test, config, what.classes, what.title)


Part = tuple[np.ndarray, np.ndarray, str]


def _encoded(pixels: np.ndarray, labels: np.ndarray, name: str, what: Cifar) -> Encoded:
    images = torch.from_numpy(pixels.reshape(-1, 3, SIDE, SIDE)).to(torch.float32).div_(255)
    return Encoded(labelled(images, torch.from_numpy(labels), what.classes, name))


def _of_batches(folder: DataFolder, kind: str, what: Cifar) -> tuple[Part, Part]:
    """From the official files, binary or pickled."""
    for layout, ending, reads in (
        (what.binary, ".bin", _binary),
        (what.python, "", _pickled),
    ):
        for inside in (f"{kind}/{layout}", layout, kind):
            first = folder.file(inside, f"{what.train[0]}{ending}")
            if first.path.is_file():
                files = [folder.file(inside, f"{n}{ending}") for n in (*what.train, what.test)]
                found = [(*reads(file, what), file.name) for file in files]
                pixels, labels, names = zip(*found[:-1], strict=True)
                return (np.concatenate(pixels), np.concatenate(labels), names[0]), found[-1]
    rule = (
        f"holds no {what.title}: expected {what.binary}/, {what.python}/ or Parquet files, there "
        f"or in {kind}/"
    )
    raise InvalidInput("data.dir", folder.name, rule)


def _binary(file: DataFile, what: Cifar) -> tuple[np.ndarray, np.ndarray]:
    """Rows of one or two bytes of class and the pixels."""
    content, row = file.read(), what.labels + PIXELS
    if not content or len(content) % row:
        raise Corrupt(file.name, f"{len(content)} bytes, not a whole number of rows of {row}")
    table = np.frombuffer(content, np.uint8).reshape(-1, row)
    return table[:, what.labels :].copy(), table[:, what.labels - 1].astype(np.int64)


class _Plain(pickle.Unpickler):
    """Reads arrays of bytes and what Python writes down by itself; any other name is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """The few functions that old and new NumPy write an array with."""
        if name == "_frombuffer" and module in ("numpy.core.numeric", "numpy._core.numeric"):
            return _of_buffer
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np._core.multiarray._reconstruct  # type: ignore[attr-defined]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return _latin
        raise pickle.UnpicklingError("a name that is not of an array")


def _of_buffer(content: object, dtype: object, shape: object, order: object) -> np.ndarray:
    if not isinstance(content, bytes | bytearray) or dtype != np.uint8 or order != "C":
        raise pickle.UnpicklingError("no array of bytes")
    return np.frombuffer(content, np.uint8).reshape(shape)  # type: ignore[arg-type, call-overload, no-any-return]


def _latin(written: object, encoding: object) -> bytes:
    if not isinstance(written, str) or encoding != "latin1":
        raise pickle.UnpicklingError("no bytes")
    return written.encode("latin1")


def _pickled(file: DataFile, what: Cifar) -> tuple[np.ndarray, np.ndarray]:
    """A pickled dict with an array `data` and a list of classes."""
    try:
        batch = _Plain(io.BytesIO(file.read()), encoding="latin1").load()
    # a damaged pickle raises many types, none of them a promise
    except errors.DpfyError:
        raise
    except Exception:
        raise Corrupt(file.name, f"not a pickled batch of {what.title}") from None
    batch = batch if isinstance(batch, dict) else {}
    pixels, labels = batch.get("data"), batch.get(what.key)
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or pixels.ndim != 2
        or pixels.shape[1] != PIXELS
        or not isinstance(labels, list)
        or len(labels) != len(pixels)
        or not all(type(label) is int and 0 <= label < what.classes for label in labels)
    ):
        raise Corrupt(file.name, f"not a batch of {what.title}: {PIXELS} bytes and a class a row")
    return pixels, np.array(labels, np.int64)


def _of_parquet(folder: DataFolder, kind: str, what: Cifar) -> tuple[Part, Part] | None:
    """From Parquet files as Hugging Face has them: columns of encoded images and of classes."""
    for inside in (kind, f"{kind}/plain_text", f"{kind}/data", f"{kind}/{kind}"):
        place = folder.path / inside
        found = [
            sorted(place.glob(f"{part}*.parquet")) if place.is_dir() else []
            for part in ("train", "test")
        ]
        if all(found):
            shown = f"{folder.name}/{inside}"
            train, test = (_parquet(files, shown, what) for files in found)
            return train, test
    return None


def _parquet(files: list[Path], shown: str, what: Cifar) -> Part:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise errors.missing("reading Parquet files", "pyarrow") from None
    pixels, labels = [], []
    name = f"{shown}/{files[0].name}"
    for path in files:
        name = f"{shown}/{path.name}"
        try:
            table = parquet.ParquetFile(path)
            columns = set(table.schema_arrow.names)
            image = next(c for c in ("img", "image") if c in columns)
            rows = table.read([image, what.column]).to_pylist()
        # pyarrow raises its own types for a file that is damaged or lacks a column
        except Exception:
            raise Corrupt(name, f"not a Parquet file with img and {what.column}") from None
        for row in rows:
            labels.append(row[what.column])
            held = row[image]
            content = held.get("bytes") if isinstance(held, dict) else held
            pixels.append(_decoded(content, name).numpy().reshape(-1))
    if not all(type(v) is int for v in labels) or {len(row) for row in pixels} != {PIXELS}:
        raise Corrupt(name, f"not images of {SIDE} x {SIDE} pixels, each with a class")
    return np.stack(pixels), np.array(labels, np.int64), name


def _decoded(content: object, name: str) -> Tensor:
    """The bytes of an image file as (3, height, width), one byte a value.

    Guarantees: an error names the file alone.
    """
    try:
        from PIL import Image
    except ImportError:
        raise errors.missing("reading image files", "PIL") from None
    if not isinstance(content, bytes):
        raise Corrupt(name, "not an image file")
    try:
        with Image.open(io.BytesIO(content)) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise ValueError("too large")
            pixels = np.asarray(opened.convert("RGB"))
    # a damaged image raises many types, none of them a promise
    except Exception:
        raise Corrupt(name, "not an image that can be read") from None
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images in a folder with one sub-folder per class, read when they are drawn: (3, size, size)
    with values from 0 to 1, and the number of the class.

    Args:
        path: The folder.
        classes: The names of the sub-folders, public: the first is class 0. Others are not read.
        size: Height and width that each image is resized to: its middle square.
        flip: Turn each image over, left to right, half of the time it is read.
        shift: Move each image by up to so many pixels each time it is read, mirrored at the border.

    Raises:
        InvalidInput: There is no such folder or class, or a value does not fit.

    Guarantees: a record is a function of one file, and of what torch's generator gives while it is
    read; what an error says of a file is its number.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> from dpfy.data.images import ImageFolder
        >>> place = Path(tempfile.mkdtemp())
        >>> for name in ("cat", "dog"):
        ...     (place / name).mkdir()
        ...     Image.new("RGB", (40, 30)).save(place / name / "1.png")
        >>> images = ImageFolder(place, ["cat", "dog"], size=16)
        >>> len(images), images[1][0].shape, images[1][1]
        (2, torch.Size([3, 16, 16]), 1)
    """

    def __init__(
        self,
        path: Path | str,
        classes: list[str] | tuple[str, ...],
        size: int,
        *,
        flip: bool = False,
        shift: int = 0,
    ) -> None:
        folder = Path(path)
        if not folder.is_dir():
            raise InvalidInput("path", str(path), "must be a folder")
        if isinstance(classes, str) or len(set(classes)) != len(classes) or not classes:
            raise InvalidInput("classes", classes, "must be a list of different folder names")
        if len(classes) > MOST_CLASSES:
            raise InvalidInput("classes", len(classes), f"must be at most {MOST_CLASSES}")
        self.size = check.integer("size", size, most=4096)
        self.shift = check.integer("shift", shift, least=0, most=size - 1)
        self.flip = flip
        files: list[Path] = []
        labels: list[int] = []
        for number, name in enumerate(classes):
            found = list(_images_in(folder, name))
            files += found
            labels += [number] * len(found)
        if not files:
            raise InvalidInput("path", str(path), f"holds no image in {', '.join(classes)[:200]}")
        self._files = np.array([str(file.relative_to(folder)) for file in files])
        self._labels, self._folder = np.array(labels, np.int64), str(folder)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        """The image and its class."""
        path = Path(self._folder) / str(self._files[number])
        name = f"image {int(number)}"
        content = storage.content("image", path, most=MOST_IMAGE, name=name)
        image = squared(_decoded(content, name), self.size)
        if self.flip and torch.rand(()) < 0.5:
            image = image.flip(2)
        if self.shift:
            image = moved(image, self.shift)
        return image, int(self._labels[number])

    def __repr__(self) -> str:
        """Its class and size alone."""
        return f"ImageFolder(size={self.size})"


def _images_in(folder: Path, name: str) -> Iterator[Path]:
    if not isinstance(name, str) or Path(name).name != name:
        raise InvalidInput("classes", name, "must be the name of a folder")
    if not (folder / name).is_dir():
        raise InvalidInput("classes", name, f"must be a folder in {folder}")
    for path in sorted((folder / name).iterdir()):
        if path.suffix.lower() in SUFFIXES and path.is_file():
            yield path


def squared(image: Tensor, size: int) -> Tensor:
    """The middle square of bytes (3, height, width), resized to `size`, from 0 to 1."""
    side = min(image.shape[1:])
    top, left = (image.shape[1] - side) // 2, (image.shape[2] - side) // 2
    square = image[:, top : top + side, left : left + side].to(torch.float32) / 255
    if side == size:
        return square
    return torch.nn.functional.interpolate(
        square[None], size=(size, size), mode="bilinear", antialias=True
    )[0].clamp(0, 1)


def moved(image: Tensor, most: int) -> Tensor:
    """`image` moved by up to `most` pixels each way, drawn from torch's generator, mirrored at the
    border.
    """
    down, right = torch.randint(2 * most + 1, (2,)).tolist()
    padded = torch.nn.functional.pad(image[None], (most,) * 4, mode="reflect")[0]
    return padded[:, down : down + image.shape[1], right : right + image.shape[2]]


class ImageViews(Dataset[tuple[Tensor, Tensor]]):
    """Images in memory, turned over and moved at random each time they are read: what
    :func:`augmented` reads.
    """

    def __init__(self, images: Tensor, labels: Tensor, flip: bool, shift: int) -> None:
        self.images, self.labels, self.flip, self.shift = images, labels, flip, shift

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """A view of the image, and its class."""
        image = self.images[number]
        if self.flip and torch.rand(()) < 0.5:
            image = image.flip(2)
        return (moved(image, self.shift) if self.shift else image), self.labels[number]


def augmented(
    images: Tensor,
    labels: Tensor,
    *,
    views: int = 1,
    flip: bool = True,
    shift: int = 4,
    workers: int = 0,
) -> LazyRecords:
    """Images in memory as records whose views are drawn afresh at every step.

    With several views the loss of an image is their mean, and its gradient is clipped once (De et
    al. 2022).

    Args:
        images: (n, channels, height, width).
        labels: (n,).
        views: How many views of an image are in a batch.
        flip: Turn views over, left to right, half of the time.
        shift: Move views by up to so many pixels.
        workers: How many processes make views ahead.

    Returns:
        The records, for `dpfy.fit` and `dpfy.PrivateTraining`.

    Raises:
        InvalidInput: The shapes do not fit.

    Guarantees: a view is a function of one image, and of numbers drawn by a key of the step, the
    record and the view.

    Example:
        >>> import torch
        >>> from dpfy.data.images import augmented
        >>> train = augmented(torch.rand(6, 3, 8, 8), torch.arange(6), views=4, shift=2)
        >>> [t.shape for t in train.take(torch.tensor([0, 5]))]
        [torch.Size([2, 4, 3, 8, 8]), torch.Size([2, 4])]
    """
    if images.dim() != 4 or labels.shape != (len(images),):
        seen = f"shapes {list(images.shape)} and {list(labels.shape)}"
        raise InvalidInput("images", seen, "must be [n, channels, height, width] and [n] labels")
    most = min(images.shape[2:]) - 1
    check.integer("shift", shift, least=0, most=most)
    return lazy(ImageViews(images, labels, flip, shift), views=views, workers=workers)


def of_folder(config: DataConfig) -> DataSource:
    """Images of a folder, read whole: one sub-folder per class, named in `classes` order by the
    configuration's `names`.
    """
    assert config.path is not None
    assert config.names is not None
    assert config.size is not None
    paths = [config.path] if config.test_path is None else [config.path, config.test_path]
    parts = [
        _whole(ImageFolder(path, config.names, config.size), len(config.names)) for path in paths
    ]
    test = parts[1] if len(parts) == 2 else None
    return assemble(parts[0], test, config, len(config.names), "images from a folder")


def _whole(images: ImageFolder, classes: int) -> Encoded:
    rows = [images[number] for number in range(len(images))]
    pixels = torch.stack([image for image, _ in rows])
    labels = torch.tensor([label for _, label in rows])
    return Encoded(labelled(pixels, labels, classes, "image folder"))
