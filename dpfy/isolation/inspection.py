"""Whether a record of a batch reaches the row of another one before the model sees it: in the
collate function, or in the data set.

A batch is checked when it is one of the first that a reader makes, when it has more or fewer
records than all that were checked, when the run's secret says so
(:class:`dpfy.training.batches.Drawing`), and when its reading executed lines of code that no
reading executed before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dpfy.core.errors import Unsupported
from dpfy.isolation.lines import Lines

SHARE = 0.015
"""The part of a reader's time that may go to checks, beyond the least of each."""

FIRST = 2
"""So many checks of a reader try many random states, whatever its time so far."""

FIRST_SECONDS = 0.15
"""A first check stops trying after so long."""

FIRST_TRIES, TRIES, ASKED_TRIES, LEAST_TRIES = 16, 12, 6, 2
"""Random states that a check tries: a first one, one that has time, one that the secret asked for,
and any.
"""

WHOLE, FEW = 4, 8
"""One try in WHOLE takes the whole batch, the others FEW records of it, which is faster."""

APART_AT_MOST = 64
"""Steps in each part of a run; at one of each part, and of eight parts at least, a batch is
checked.
"""

APART = "collate each record by itself and keep their order; padding to the longest is fine"
ALONE = (
    "make an item of its own record alone; compute what is public, or released with a charge, "
    "before"
)
AGAIN = (
    "keep no records between calls, and draw from the global generators of torch, NumPy or Python"
)


class Mixing(Unsupported):
    """A record reaches the row of another one. It ends a run permanently."""


class Inspected(NamedTuple):
    """What readers checked, for the report.

    `batches` collate calls on `least` to `most` records were checked by `calls` pairs of calls;
    `items` items by `reads` pairs of readings. `unchecked` counts batches and items where user code
    failed on changed inputs, or where nothing could be replaced.
    """

    batches: int = 0
    calls: int = 0
    least: int = 0
    most: int = 0
    items: int = 0
    reads: int = 0
    unchecked: int = 0

    def joined(self, other: Inspected) -> Inspected:
        """What both checked."""
        counts = {
            name: getattr(self, name) + getattr(other, name)
            for name in ("batches", "calls", "items", "reads", "unchecked")
        }
        rows = [tally.least for tally in (self, other) if tally.batches]
        return Inspected(**counts, least=min(rows, default=0), most=max(self.most, other.most))

    @property
    def words(self) -> str:
        """One sentence for the report; empty if there was nothing to check."""
        said = []
        if self.batches:
            size = f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"
            said.append(
                f"{self.batches} batches of {size} records were collated again with other records "
                f"in their place ({self.calls} times): "
                "the rows of the records that stayed did not change"
            )
        if self.items:
            said.append(
                f"{self.items} items of the data set were read again with all other records "
                f"replaced ({self.reads} times): they did "
                "not change"
            )
        if self.unchecked:
            said.append(
                f"{self.unchecked} batches or items of the data set could not be checked for mixing"
            )
        return "; ".join(said)


@dataclass
class Inspection:
    """When a reader checks, and how long. It is made again in each process that reads.

    Guarantees: the first batches, and each with a new number of records beyond the least and the
    most so far, are checked; a check never raises anything but :class:`Mixing`.
    """

    inspected: Inspected = field(default_factory=Inspected)
    collating: Lines = field(default_factory=Lines)
    reading: Lines = field(default_factory=Lines)
    spent: float = 0.0
    _made: int = 0
    _least: int = 1 << 62
    _most: int = 0
    _began: float | None = None

    def __reduce__(self) -> tuple[type[Inspection], tuple[()]]:
        """For another process, which begins by itself."""
        return Inspection, ()

    def due(self, rows: int, asked: bool) -> bool:
        """Whether a batch of so many records is checked, as far as is known before it is read."""
        self._began = self._began or time.perf_counter()
        if rows < 2:
            return False
        return asked or self.first or not self._least <= rows <= self._most

    @property
    def first(self) -> bool:
        """Whether the next check is one of the first."""
        return self._made < FIRST

    def tries(self, least: int = LEAST_TRIES) -> Iterator[int]:
        """Numbers of the tries that one check may make: at least so many, more while there is
        time.
        """
        assert self._began is not None
        began, before, first = time.perf_counter(), self.spent, self.first
        for number in range(FIRST_TRIES if first else TRIES):
            now = time.perf_counter()
            took = now - began
            allowed = took < FIRST_SECONDS if first else before + took < SHARE * (now - self._began)
            if number >= least and not allowed:
                return
            yield number

    def check(
        self, rows: int, of_batch: Callable[[], int] | None, of_items: Sequence[Callable[[], int]]
    ) -> Inspected:
        """Check a batch of so many records, and items of it; each function says how many
        comparisons it made. What was checked.
        """
        began = time.perf_counter()
        try:
            calls = 0 if of_batch is None else _attempted(of_batch)
            reads = [_attempted(check) for check in of_items]
        finally:
            self.spent += time.perf_counter() - began
            self._made += 1
            self._least, self._most = min(rows, self._least), max(rows, self._most)
        found = Inspected(
            batches=int(calls > 0),
            calls=calls,
            least=rows if calls else 0,
            most=rows if calls else 0,
            items=sum(n > 0 for n in reads),
            reads=sum(reads),
            unchecked=sum(n == 0 for n in reads) + int(of_batch is not None and not calls),
        )
        self.inspected = self.inspected.joined(found)
        return found


def _attempted(check: Callable[[], int]) -> int:
    """How many comparisons a check made; none if the user's code failed on inputs that it never
    gets.
    """
    try:
        return check()
    except Mixing:
        raise
    except Exception:  # any error of user code on changed inputs: it could not be checked
        return 0


def secret_steps(steps: int, generator: np.random.Generator) -> frozenset[int]:
    """The steps whose first batch is checked in any case: one at a random place of each of at least
    eight parts of the run.

    Guarantees: of 200 steps at least two are among them.
    """
    parts = min(steps, max(8, -(-steps // APART_AT_MOST)))
    edges = np.linspace(0, steps, parts + 1)
    return frozenset(
        min(steps - 1, int(a + generator.random() * (b - a))) for a, b in pairwise(edges)
    )
