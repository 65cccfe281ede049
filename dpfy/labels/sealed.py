"""Labels that can be read once: each is taken for one question, and is gone from its place then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core.errors import InvalidInput, Unsupported

Values = NDArray[np.int64]
Rows = NDArray[np.int64]


class SealedLabels:
    """The labels of `records` records, as whole numbers from 0 to `outcomes` - 1, until they are
    taken.

    `given` holds them, or is a function that opens them; it is called when the first label is
    taken, once. With `span` labels are real numbers, which are read on a grid of `outcomes` points
    from its low to its high end.

    Guarantees: a label is handed out once, and overwritten here when it is: taking it again is an
    error, whoever asks. What lies outside of the public range counts as its end, and what is no
    number as the low end: nothing is raised because of a value. It has no copy.
    """

    def __init__(
        self, given: Any, records: int, outcomes: int, span: tuple[float, float] | None = None
    ) -> None:
        self._given, self._records, self._outcomes, self._span = given, records, outcomes, span
        self._values: Values | None = None
        self._there = np.ones(records, np.bool_)

    def __reduce_ex__(self, protocol: object) -> str:
        raise Unsupported(
            "a copy of labels that can be read once",
            "give the labels to one fit; release them again under another claim",
        )

    def __repr__(self) -> str:
        return f"Sealed({self._records} labels, {int(self._there.sum())} not yet taken)"

    def take(self, rows: Rows) -> Values:
        """The labels of these records, which can then not be taken again."""
        if len(np.unique(rows)) < len(rows) or not self._there[rows].all():
            raise InvalidInput(
                "labels", f"{len(rows)} records", "a label takes part in one question, once"
            )
        values = self._opened()
        taken = values[rows].copy()
        values[rows] = 0
        self._there[rows] = False
        return taken

    def _opened(self) -> Values:
        if self._values is None:
            given = self._given() if isinstance(self._given, Callable) else self._given  # type: ignore[arg-type]
            self._given = None
            self._values = self._whole(given)
        return self._values

    def _whole(self, given: Any) -> Values:
        held = np.asarray(
            given.numpy()
            if hasattr(given, "numpy") and not isinstance(given, np.ndarray)
            else given
        )
        if held.shape != (self._records,):
            raise InvalidInput(
                "labels",
                f"shape {held.shape}",
                f"must be {self._records} labels, one for each record",
            )
        if held.dtype.kind not in ("biuf" if self._span else "biu"):
            rule = (
                "must be numbers"
                if self._span
                else "must be whole numbers, the classes counted from 0"
            )
            raise InvalidInput("labels", str(held.dtype), rule)
        if self._span is None:
            return np.clip(held.astype(np.int64), 0, self._outcomes - 1)
        low, high = self._span
        steps = np.nan_to_num(
            (held.astype(np.float64) - low) / (high - low), nan=0.0, posinf=1.0, neginf=0.0
        )
        return np.rint(np.clip(steps, 0.0, 1.0) * (self._outcomes - 1)).astype(np.int64)
