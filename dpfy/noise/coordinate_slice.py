"""Some coordinates of a release, as a rank of a run holds them: where they lie among all of them,
laid end to end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from dpfy.core.errors import InvalidInput


@dataclass(frozen=True)
class CoordinateSlice:
    """Coordinates `runs` (first, after the last; in order, none twice) of those of tensors of these
    `sizes`.

    Guarantees: the noise of a coordinate depends on its place among all of them and on their
    number, not on the parts that they are held in.
    """

    runs: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        at = 0
        for first, last in self.runs:
            if not at <= first <= last <= self.total:
                raise InvalidInput(
                    "part.runs",
                    (first, last),
                    f"must follow each other among {self.total} coordinates",
                )
            at = last

    @classmethod
    @lru_cache(maxsize=64)
    def whole(cls, total: int) -> CoordinateSlice:
        """All of them."""
        return cls(((0, total),), (total,))

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int]], sizes: Iterable[int]) -> CoordinateSlice:
        """Of tensors of these sizes; runs that touch become one."""
        joined: list[tuple[int, int]] = []
        for first, last in runs:
            if joined and joined[-1][1] == first:
                joined[-1] = (joined[-1][0], last)
            elif first < last:
                joined.append((first, last))
        return cls(tuple(joined), tuple(sizes))

    @cached_property
    def total(self) -> int:
        """The number of all coordinates."""
        return sum(self.sizes)

    @cached_property
    def pieces(self) -> tuple[tuple[int, int], ...] | None:
        """Of each tensor, where the coordinates held begin in it and where they end; None if those
        of some tensor are not in one piece.
        """
        found, runs, start = [], list(reversed(self.runs)), 0
        for size in self.sizes:
            mine: list[tuple[int, int]] = []
            while runs and runs[-1][0] < start + size:
                first, last = runs.pop()
                mine.append((first - start, min(last, start + size) - start))
                if last > start + size:
                    runs.append((start + size, last))
            if len(mine) > 1:
                return None
            found.append(mine[0] if mine else (0, 0))
            start += size
        return tuple(found)

    @cached_property
    def size(self) -> int:
        """How many there are."""
        return sum(last - first for first, last in self.runs)
