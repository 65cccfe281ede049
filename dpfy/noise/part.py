"""Some coordinates of a release, as a rank of a run holds them: where they lie among all of them, laid end to end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from dpfy.core.errors import InvalidInput


@dataclass(frozen=True)
class Part:
    """Coordinates `runs` (first, after the last; in order, none twice) of `total`, which are those of `tensors` tensors.

    Guarantees: the noise of a coordinate depends on its place among all of them and on their number, not on the parts that they are
    held in.
    """

    runs: tuple[tuple[int, int], ...]
    total: int
    tensors: int = 1

    def __post_init__(self) -> None:
        at = 0
        for first, last in self.runs:
            if not at <= first <= last <= self.total:
                raise InvalidInput("part.runs", (first, last), f"must follow each other among {self.total} coordinates")
            at = last

    @classmethod
    @lru_cache(maxsize=64)
    def whole(cls, total: int) -> Part:
        """All of them."""
        return cls(((0, total),), total)

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int]], sizes: Iterable[int]) -> Part:
        """Of tensors of these sizes; runs that touch become one."""
        joined: list[tuple[int, int]] = []
        for first, last in runs:
            if joined and joined[-1][1] == first:
                joined[-1] = (joined[-1][0], last)
            elif first < last:
                joined.append((first, last))
        held = list(sizes)
        return cls(tuple(joined), sum(held), len(held))

    @property
    def size(self) -> int:
        """How many there are."""
        return sum(last - first for first, last in self.runs)
