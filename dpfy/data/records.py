"""Records: tensors that share their first dimension. The only thing that training reads."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset, TensorDataset

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.data.batch import Batch, Draw


class SingleRows:
    """Rows of a batch that hold one record each."""

    @property
    def records_each(self) -> int:
        """How many records of one unit a row holds."""
        return 1

    @property
    def rows_each(self) -> int:
        """How many rows of the model a row of the batch is for."""
        return self.records_each


@dataclass(frozen=True)
class Records(SingleRows):
    """An indexed set of records in memory, one tensor per field; row `i` of every tensor is record
    `i`.

    A batch is a tuple of fields, or of the `structure` that the tensors are the leaves of.

    Guarantees: all tensors have the same number of rows, at least one; the order of the rows never
    changes.
    """

    tensors: tuple[Tensor, ...]
    structure: pytree.TreeSpec | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(self.tensors))
        if not self.tensors:
            raise InvalidInput("records", "no tensor", "must hold at least one tensor")
        for position, tensor in enumerate(self.tensors):
            if not isinstance(tensor, Tensor) or tensor.dim() == 0:
                raise InvalidInput(
                    f"records[{position}]",
                    type(tensor).__name__,
                    "must be a tensor with a first dimension",
                )
        rows = [len(tensor) for tensor in self.tensors]
        if len(set(rows)) > 1:
            raise InvalidInput("records", rows, "every tensor must have the same number of rows")
        if rows[0] == 0:
            raise InvalidInput("records", 0, "must hold at least 1 record")

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __repr__(self) -> str:
        """Shapes only: a record never reaches a log through a traceback or a debugger's summary."""
        return f"Records({', '.join(f'{tuple(t.shape[1:])} {t.dtype}' for t in self.tensors)})"

    def take(self, indices: Tensor) -> Batch:
        """The rows at `indices` (int64, any device), one tensor per field."""
        fields = tuple(tensor.index_select(0, indices.to(tensor.device)) for tensor in self.tensors)
        return fields if self.structure is None else pytree.tree_unflatten(fields, self.structure)

    def read(self, draws: Iterable[Draw], device: torch.device) -> Generator[Batch]:
        """The batches of these draws, in their order."""
        return (self.take(torch.from_numpy(draw.indices).to(device)) for draw in draws)

    def to(self, device: torch.device | str) -> Records:
        """The same records on another device."""
        return replace(self, tensors=tuple(tensor.to(device) for tensor in self.tensors))

    @property
    def held(self) -> tuple[Tensor, ...]:
        """The tensors in memory that hold records."""
        return self.tensors

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """The fields with one record in each row, as a model takes them."""
        return self.tensors

    def content(self) -> Iterator[bytes | memoryview]:
        """Everything that identifies the records, in order: for each tensor its type and shape,
        then its bytes.

        Guarantees: two Records give the same bytes if and only if they are equal in structure,
        type, shape and content.
        """
        if self.structure is not None:
            yield f"{self.structure};".encode()
        for tensor in self.tensors:
            yield f"{tensor.dtype}{tuple(tensor.shape)};".encode()
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data

    def fingerprint(self, randomness: Randomness) -> str:
        """What recognises these records again at a resume, and tells nothing about them to who
        lacks the run's secret.
        """
        parts = "".join(randomness.tag("data", bytes(piece)) for piece in self.content())
        return randomness.tag("records", parts.encode())


def as_records(train: object) -> Records:
    """Records in memory from what the user holds: Records, tensors or arrays in any nesting, a
    TensorDataset or a map-style Dataset.

    A Dataset is read once, in order, and stacked, so a random transform in it is drawn once. Types
    of numbers are kept as given.

    Guarantees: floating-point fields are finite, and nothing else about the data is looked at.
    """
    if isinstance(train, Records):
        records = train
    elif isinstance(train, TensorDataset):
        records = Records(train.tensors)
    elif isinstance(train, Tensor | np.ndarray):
        records = Records((_tensor("train", train),))
    elif isinstance(train, tuple | list | dict):
        records = _nested(train)
    elif isinstance(train, IterableDataset):
        raise Unsupported(
            "an IterableDataset",
            "sampling needs records by index: give a map-style Dataset or tensors",
        )
    elif (
        hasattr(train, "__getitem__")
        and hasattr(train, "__len__")
        and not isinstance(train, str | bytes)
    ):
        records = _stacked(train)
    else:
        raise InvalidInput(
            "train",
            type(train).__name__,
            "must be Records, tensors, arrays, or a map-style Dataset",
        )
    require_finite("train", records)
    return records


def require_finite(name: str, records: Records) -> None:
    """Refuse NaN and infinity, naming field and record number but no value of any other record."""
    for position, tensor in enumerate(records.tensors):
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        bad = ~torch.isfinite(tensor).reshape(len(tensor), -1).all(dim=1)
        if bool(bad.any()):
            first = int(bad.nonzero()[0])
            raise InvalidInput(
                f"{name}[{position}]",
                f"NaN or infinity in record {first}",
                "every value must be finite",
            )


def require_labels(name: str, labels: Tensor, classes: int) -> None:
    """Refuse a label outside 0 .. classes - 1, naming the record number."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InvalidInput(name, str(labels.dtype), "labels must be whole numbers")
    bad = ((labels < 0) | (labels >= classes)).reshape(len(labels), -1).any(dim=1)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise InvalidInput(
            f"{name}[{first}]",
            "a value outside",
            f"must be a class from 0 to {classes - 1}, as declared",
        )


def _tensor(name: str, field: object) -> Tensor:
    if isinstance(field, Tensor):
        return field.detach()
    if isinstance(field, np.ndarray) and field.dtype.kind in "biufc":
        native = field.astype(field.dtype.newbyteorder("="), copy=False)
        return torch.from_numpy(
            np.ascontiguousarray(native if native.flags.writeable else native.copy())
        )
    kind = f"array of {field.dtype}" if isinstance(field, np.ndarray) else type(field).__name__
    raise InvalidInput(name, kind, "must be a tensor or a numeric array")


def _nested(train: tuple[object, ...] | list[object] | dict[object, object]) -> Records:
    """Records of tensors or arrays in tuples, lists and dicts; a flat tuple or list gives batches
    that are tuples.
    """
    found, structure = pytree.tree_flatten_with_path(train)
    fields = tuple(_tensor(f"train{pytree.keystr(path)}", leaf) for path, leaf in found)
    flat = (
        isinstance(train, tuple | list)
        and len(fields) == len(train)
        and all(len(path) == 1 for path, _ in found)
    )
    return Records(fields, None if flat else structure)


def _stacked(dataset: Any) -> Records:
    """Read a map-style dataset once and stack each field."""
    rows: list[tuple[Tensor, ...]] = []
    for index in range(len(dataset)):
        rows.append(_fields(index, dataset[index]))
        if len(rows[-1]) != len(rows[0]):
            raise InvalidInput(
                f"train[{index}]",
                f"{len(rows[-1])} fields",
                f"must have {len(rows[0])} fields like train[0]",
            )
        for position, (field, first) in enumerate(zip(rows[-1], rows[0], strict=True)):
            if field.shape != first.shape or field.dtype != first.dtype:
                seen, wanted = (
                    f"{field.dtype} {tuple(field.shape)}",
                    f"{first.dtype} {tuple(first.shape)}",
                )
                raise InvalidInput(
                    f"train[{index}][{position}]", seen, f"items must stack: train[0] has {wanted}"
                )
    if not rows:
        raise InvalidInput("train", 0, "must hold at least 1 record")
    return Records(tuple(torch.stack(column) for column in zip(*rows, strict=True)))


def _fields(index: int, item: object) -> tuple[Tensor, ...]:
    parts = tuple(item) if isinstance(item, tuple | list) else (item,)
    fields = []
    for position, part in enumerate(parts):
        if isinstance(part, bool | int | float | np.generic):
            fields.append(torch.as_tensor(part))
        elif isinstance(part, Tensor | np.ndarray):
            fields.append(_tensor(f"train[{index}][{position}]", part))
        else:
            rule = "must be a tensor, an array or a number; convert it in the dataset's transform"
            raise InvalidInput(f"train[{index}][{position}]", type(part).__name__, rule)
    return tuple(fields)
