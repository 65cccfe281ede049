"""Memory-mapped arrays: records are copied out of the file when they are drawn, and the file's
pages are let go again.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpfy.core.errors import InvalidInput
from dpfy.data.batch import Batch

KEPT = 1 << 28
"""Bytes of a file that may stay in this process before its pages are let go."""

PAGE = 1 << 16
"""What the system maps around a byte that is read."""


class MappedArrays:
    """Arrays of the same number of rows, some of them memory-mapped, in any nesting of dicts,
    tuples and lists.

    Guarantees: no more than about KEPT bytes of the files stay resident, whatever their size.
    """

    def __init__(self, arrays: Any) -> None:
        if not isinstance(arrays, dict):  # batches are tuples then, as those of arrays in memory
            arrays = (arrays,) if isinstance(arrays, np.ndarray) else tuple(arrays)
        found, self._structure = pytree.tree_flatten_with_path(arrays)
        self._arrays = [_array(f"train{pytree.keystr(path)}", leaf) for path, leaf in found]
        rows = [len(array) for array in self._arrays]
        if len(set(rows)) > 1:
            raise InvalidInput("train", rows, "every array must have the same number of rows")
        self._read = 0

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return pytree.tree_map_only(Tensor, lambda t: t[0], self.rows([index]))

    def rows(self, indices: list[int]) -> Batch:
        """The records at `indices`, copied."""
        places = np.asarray(indices, dtype=np.int64)
        fields = [
            torch.from_numpy(np.ascontiguousarray(_native(array[places]))) for array in self._arrays
        ]
        self._read += sum(
            len(indices) * (array.nbytes // max(1, len(array)) + PAGE) for array in self._arrays
        )
        if self._read > KEPT:
            self._let_go()
        return pytree.tree_unflatten(fields, self._structure)

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which maps the files itself: pickled, a map would be a copy of its
        whole file.
        """
        return {**self.__dict__, "_arrays": [_Mapping.of(array) or array for array in self._arrays]}

    def __setstate__(self, held: dict[str, Any]) -> None:
        arrays = [
            array.opened() if isinstance(array, _Mapping) else array for array in held["_arrays"]
        ]
        self.__dict__.update({**held, "_arrays": arrays})

    def _let_go(self) -> None:
        """Take the pages out of this process; the file, and what was written to it, stay as they
        are.
        """
        for array in self._arrays:
            held = (
                getattr(array, "_mmap", None)
                if isinstance(array, np.memmap) and array.mode != "c"
                else None
            )
            if isinstance(held, mmap.mmap) and hasattr(held, "madvise"):
                held.madvise(mmap.MADV_DONTNEED)
        self._read = 0


@dataclass(frozen=True)
class _Mapping:
    """Where a memory-mapped array is found again."""

    file: str
    dtype: str
    mode: str
    offset: int
    shape: tuple[int, ...]
    order: Literal["C", "F"]

    @classmethod
    def of(cls, array: np.ndarray) -> _Mapping | None:
        """Of a whole mapping; None for an array in memory, or a part of one."""
        if (
            not isinstance(array, np.memmap)
            or not isinstance(array.base, mmap.mmap)
            or array.filename is None
            or array.mode == "c"
        ):
            return None
        order: Literal["C", "F"] = "C" if array.flags.c_contiguous else "F"
        return cls(
            str(array.filename), array.dtype.str, array.mode, array.offset, array.shape, order
        )

    def opened(self) -> np.ndarray:
        """The array, mapped here."""
        mode: Literal["r", "r+"] = "r" if self.mode == "r" else "r+"
        return np.memmap(self.file, np.dtype(self.dtype), mode, self.offset, self.shape, self.order)


def _native(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _array(name: str, leaf: object) -> np.ndarray:
    array = leaf.detach().cpu().numpy() if isinstance(leaf, Tensor) else leaf
    if not isinstance(array, np.ndarray) or array.ndim == 0 or array.dtype.kind not in "biufc":
        kind = f"array of {array.dtype}" if isinstance(array, np.ndarray) else type(leaf).__name__
        raise InvalidInput(
            name, kind, "must be a numeric array or tensor with a row for each record"
        )
    return array
