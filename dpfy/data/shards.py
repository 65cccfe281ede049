"""Shards on disk, larger than memory, by record number: tables in Parquet or Arrow files, and
samples in tar files.

Making one of these reads what stands around the records: footers with numbers of rows, headers with
names and sizes. A record is read when it is drawn.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpfy.core import check, errors
from dpfy.core.errors import Corrupt, InvalidInput, Unsupported
from dpfy.data.batch import Batch

CACHE = 1 << 28
"""Bytes of decoded row groups that a process keeps."""

PARQUET, ARROW = (".parquet", ".pq"), (".arrow", ".feather", ".ipc")


class TableShards:
    """The rows of Parquet or Arrow (IPC) files, one after the other; a batch is a dict with a
    tensor for each column.

    Arrow files are mapped, and without compression a draw reads its rows alone. Of a Parquet file
    the whole row group of a row is decoded, and kept until others of `cache` bytes were used after
    it. Draws are spread over all groups, so row groups should be small (some thousand rows) or fit
    into the cache together; else write the table to Arrow files once.

    Guarantees: at most `cache` bytes of decoded groups, or one group, are held.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        columns: Sequence[str] | None = None,
        cache: int = CACHE,
    ) -> None:
        self._paths = _files(paths, (*PARQUET, *ARROW))
        self._columns, self._most = (
            None if columns is None else list(columns),
            check.integer("cache", cache),
        )
        sizes = [
            (file, group, rows)
            for file, path in enumerate(self._paths)
            for group, rows in enumerate(self._groups(path))
        ]
        self._places = [(file, group) for file, group, _ in sizes]
        self._ends = np.cumsum([rows for *_, rows in sizes], dtype=np.int64)
        self._kept: OrderedDict[int, dict[str, np.ndarray]] = OrderedDict()
        if not len(self):
            raise InvalidInput("shards", 0, "must hold at least 1 record")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {name: column[0] for name, column in self.rows([index]).items()}

    def rows(self, indices: list[int]) -> Batch:
        """The rows at `indices`: a tensor for each column, in their order."""
        asked = np.asarray(indices, dtype=np.int64)
        groups = np.searchsorted(self._ends, asked, side="right")
        found: dict[str, np.ndarray] = {}
        for group in np.unique(groups):
            mine, first = (
                np.flatnonzero(groups == group),
                0 if group == 0 else int(self._ends[group - 1]),
            )
            for name, column in self._taken(int(group), asked[mine] - first).items():
                if name not in found:
                    found[name] = np.empty((len(asked), *column.shape[1:]), column.dtype)
                if found[name].shape[1:] != column.shape[1:] or found[name].dtype != column.dtype:
                    raise InvalidInput(
                        f"column {name}",
                        "another type or length in another shard",
                        "must be one in all shards",
                    )
                found[name][mine] = column
        return {name: torch.from_numpy(column) for name, column in found.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Without what was decoded: another process keeps its own."""
        return {**self.__dict__, "_kept": OrderedDict()}

    def _taken(self, group: int, places: np.ndarray) -> dict[str, np.ndarray]:
        """The columns of a group's rows at `places`."""
        file, number = self._places[group]
        if self._paths[file].suffix in PARQUET:
            return {name: column[places] for name, column in self._decoded(group).items()}
        arrow = _arrow()
        with arrow.memory_map(str(self._paths[file])) as held:
            batch = arrow.ipc.open_file(held).get_batch(number)
            chosen = (batch if self._columns is None else batch.select(self._columns)).take(
                arrow.array(places)
            )
            return {
                name: _numbers(name, chosen.column(place))
                for place, name in enumerate(chosen.schema.names)
            }

    def _decoded(self, group: int) -> dict[str, np.ndarray]:
        """A row group of a Parquet file, from what is kept if it is."""
        if group in self._kept:
            self._kept.move_to_end(group)
            return self._kept[group]
        file, number = self._places[group]
        with _arrow().parquet.ParquetFile(self._paths[file]) as held:
            table = held.read_row_group(number, columns=self._columns)
        columns = {
            name: _numbers(name, table.column(name).combine_chunks()) for name in table.column_names
        }
        size = _bytes(columns)
        while self._kept and size + sum(map(_bytes, self._kept.values())) > self._most:
            self._kept.popitem(last=False)
        self._kept[group] = columns
        return columns

    def _groups(self, path: Path) -> list[int]:
        """Rows of each group of a file."""
        arrow = _arrow()
        try:
            if path.suffix in PARQUET:
                about = arrow.parquet.read_metadata(path)
                return [about.row_group(group).num_rows for group in range(about.num_row_groups)]
            with arrow.memory_map(str(path)) as held:
                reader = arrow.ipc.open_file(held)
                return [
                    reader.get_batch(batch).num_rows for batch in range(reader.num_record_batches)
                ]
        except (OSError, arrow.ArrowInvalid):
            raise Corrupt(
                path.name, "is no Parquet file, nor an Arrow file with record batches"
            ) from None


class TarShards:
    """Samples in tar files as WebDataset writes them: members that share a name up to the first dot
    are one sample.

    `decode` makes a record of a sample, a dict from ending to bytes; by default numbers (`.cls`,
    `.json`), arrays (`.npy`) and images (`.png`, `.jpg`: bytes, [channels, height, width]) are
    decoded and a record is the dict of them.

    Guarantees: members are found by the headers, which are read once; a record reads its own bytes
    alone.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        decode: Callable[[dict[str, bytes]], Any] | None = None,
    ) -> None:
        self._paths, self._decode = _files(paths, (".tar",)), decode or _sample
        self._samples: list[tuple[int, dict[str, tuple[int, int]]]] = []
        for file, path in enumerate(self._paths):
            self._samples += [(file, parts) for parts in _members(path).values()]
        if not self._samples:
            raise InvalidInput("shards", 0, "must hold at least 1 record")

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        file, parts = self._samples[index]
        with self._paths[file].open("rb", buffering=0) as held:
            read = {
                ending: os.pread(held.fileno(), size, start)
                for ending, (start, size) in parts.items()
            }
        if any(len(read[ending]) != size for ending, (_, size) in parts.items()):
            raise Corrupt(self._paths[file].name, "is shorter than it was")
        return self._decode(read)


def _members(path: Path) -> dict[str, dict[str, tuple[int, int]]]:
    """By sample, in the order of the file, where each part begins and how long it is."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        with tarfile.open(path, "r:") as held:
            for member in held:
                if member.isreg():
                    folder, _, name = member.name.rpartition("/")
                    stem, _, ending = name.partition(".")
                    found.setdefault(f"{folder}/{stem}", {})[ending.lower()] = (
                        member.offset_data,
                        member.size,
                    )
    except tarfile.TarError:
        raise Corrupt(
            path.name, "is no tar file without compression, which records by number need"
        ) from None
    return found


def _sample(parts: dict[str, bytes]) -> dict[str, Any]:
    return {ending.replace(".", "_"): _part(ending, content) for ending, content in parts.items()}


def _part(ending: str, content: bytes) -> Any:
    kind = ending.rpartition(".")[2]
    if kind in ("cls", "index"):
        return int(content)
    if kind == "json":
        return json.loads(content)
    if kind == "npy":
        return np.load(io.BytesIO(content), allow_pickle=False)
    if kind in ("png", "jpg", "jpeg"):
        try:
            from PIL import Image
        except ImportError:
            raise errors.missing("images", "PIL") from None
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.array(image)
        return torch.from_numpy(
            pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy()
        )
    raise Unsupported(
        f"a part of a sample that ends in .{ending}",
        "give TarShards(..., decode=...) that makes tensors of it",
    )


def _numbers(name: str, column: Any) -> np.ndarray:
    """A column as an array; one of lists of equal length as a matrix."""
    arrow = _arrow()
    if column.null_count:
        raise InvalidInput(
            f"column {name}",
            "a missing value",
            "every value must be there: fill it by a public rule first",
        )
    if (
        arrow.types.is_list(column.type)
        or arrow.types.is_large_list(column.type)
        or arrow.types.is_fixed_size_list(column.type)
    ):
        inner = _numbers(name, column.flatten())
        if len(column) and (len(inner) % len(column) or len(set(np.diff(_offsets(column)))) > 1):
            raise InvalidInput(
                f"column {name}",
                "lists of several lengths",
                "must have one length: pad them, or use a Dataset with a collate",
            )
        return inner.reshape(len(column), -1, *inner.shape[1:])
    if arrow.types.is_boolean(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=bool)
    if not (arrow.types.is_integer(column.type) or arrow.types.is_floating(column.type)):
        raise InvalidInput(
            f"column {name}",
            str(column.type),
            "must be numbers: choose columns=, or encode it by a public schema",
        )
    return np.array(column.to_numpy(zero_copy_only=False))


def _bytes(columns: dict[str, np.ndarray]) -> int:
    return sum(column.nbytes for column in columns.values())


def _offsets(column: Any) -> np.ndarray:
    return np.asarray(column.offsets) if hasattr(column, "offsets") else np.arange(len(column) + 1)


def _files(paths: str | Path | Sequence[str | Path], endings: tuple[str, ...]) -> list[Path]:
    """The files, in the order given; those of a folder by name."""
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    found: list[Path] = []
    for path in map(Path, given):
        found += (
            sorted(p for p in path.iterdir() if p.suffix in endings) if path.is_dir() else [path]
        )
    for path in found:
        if path.suffix not in endings:
            raise InvalidInput("shards", path.name, f"must end in one of {', '.join(endings)}")
        if not path.is_file():
            raise InvalidInput("shards", str(path), "there is no such file")
    return found


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise errors.missing("Parquet", "pyarrow") from None
    return pyarrow
