"""Votes of nearest records in public features: of each shard's nearest one, or of the nearest ones
in a sample of all records.

Distances are whole numbers, computed exactly: numbers are rounded to a grid first. Sums of floating
point numbers depend, in their last digits, on how many records there are; a unit that comes or goes
could so change which record is nearest for voters that it has nothing to do with.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.values import Bounded
from dpfy.mechanisms.exact import Bits, coins
from dpfy.prediction.rules import Ask, moved
from dpfy.prediction.voters import fixed, tally

AT_ONCE = 1 << 24
"""Distances that are computed at a time."""
STEPS, LARGEST = 1 << 12, 8.0
"""Steps of the grid in 1, and where numbers are cut."""
MOST_FEATURES = 1 << 20
"""3 (2^15)^2 times as many is below 2^53: every sum of products is exact in double precision, in
any order.
"""


def on_grid(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Whole numbers of steps."""
    return np.rint(np.clip(rows.astype(np.float64), -LARGEST, LARGEST) * STEPS)


@dataclass(frozen=True, eq=False, repr=False)
class _Records:
    """Private records: rows of public features, and their classes. Numbers of more than `LARGEST`
    count as that.
    """

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    classes: int

    def __post_init__(self) -> None:
        check.integer("classes", self.classes, least=2)
        if self.x.ndim != 2 or self.x.dtype != np.float32 or self.y.shape != (len(self.x),):
            raise InvalidInput(
                "x",
                f"{self.x.dtype} of shape {self.x.shape}",
                "must be rows of float32, with one class each",
            )
        check.integer("features", self.x.shape[1], most=MOST_FEATURES)
        if not np.isfinite(self.x).all():
            raise InvalidInput("x", "NaN or infinity", "must be finite numbers")
        if len(self.y) and not 0 <= int(self.y.min()) <= int(self.y.max()) < self.classes:
            raise InvalidInput(
                "y",
                "a class outside of the public ones",
                f"must be a whole number from 0 to {self.classes - 1}",
            )

    @property
    def features(self) -> int:
        """How many numbers a question has."""
        return int(self.x.shape[1])

    @cached_property
    def _laid(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Records on the grid, and their squared lengths."""
        held = on_grid(self.x)
        return held, np.asarray(np.einsum("ij,ij->i", held, held))

    def _distances(self, questions: NDArray[np.float32]) -> NDArray[np.float64]:
        """Squared distances of questions and records, less the length of the question: whole
        numbers.

        Guarantees: the distance of a record depends on it and the question alone.
        """
        held, lengths = self._laid
        return np.asarray(lengths - 2 * (on_grid(questions) @ held.T))

    def fingerprint(self) -> bytes:
        """See `predictor.Voters`."""
        whole = hashlib.blake2b(f"{type(self).__name__} {self.x.shape} {self.classes}".encode())
        for part in (self.x, self.y):
            whole.update(part.tobytes())
        return whole.digest()


@dataclass(frozen=True, eq=False, repr=False)
class NearestVoters(_Records):
    """Voters who each say the class of their own record that is nearest to the question; `places`
    says whose each record is.

    A voter without records says class 0.
    """

    places: NDArray[np.int64]
    count: int

    @cached_property
    def _cells(self) -> tuple[NearestVoters, NDArray[np.int64], NDArray[np.int64]]:
        """The same with records in the order of voter and class, the cells that hold any, and where
        each begins.
        """
        cell = self.places * self.classes + self.y
        order = np.argsort(cell, kind="stable")
        held, starts = np.unique(cell[order], return_index=True)
        return (
            NearestVoters(
                self.x[order], self.y[order], self.classes, self.places[order], self.count
            ),
            held,
            starts,
        )

    def asked(self, questions: NDArray[np.float32]) -> list[Ask]:
        """See `predictor.Voters`."""
        return fixed(self.votes(questions))

    def votes(self, questions: NDArray[np.float32]) -> NDArray[np.int64]:
        """How many voters say each class, question by question."""
        inside, held, starts = self._cells
        found = [np.empty((0, self.classes), np.int64)]
        step = max(1, AT_ONCE // max(1, len(self.x), self.count * self.classes))
        for start in range(0, len(questions), step):
            part = questions[start : start + step]
            nearest = np.full((len(part), self.count * self.classes), np.inf)
            if len(held):
                nearest[:, held] = np.minimum.reduceat(inside._distances(part), starts, axis=1)
            said = nearest.reshape(len(part), self.count, self.classes).argmin(axis=2)
            found.append(tally(said, self.classes))
        return np.concatenate(found)


@dataclass(frozen=True, eq=False, repr=False)
class NeighbourVotes(_Records):
    """The `count` nearest records vote, among those of a sample at `rate` that is drawn anew for
    every question.

    A record that comes or goes takes the place of another among the nearest: one vote moves. Where
    there are fewer records than votes, the votes that are left are for class 0, so that this holds
    then too.
    """

    count: int
    rate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("neighbours", self.count, most=1 << 20)
        check.sampling_rate("rate", check.positive("rate", self.rate))

    def asked(self, questions: NDArray[np.float32]) -> list[Ask]:
        """See `predictor.Voters`."""

        def of(row: NDArray[np.float32]) -> Ask:
            return lambda bits: self._votes(row, bits)

        return [of(row) for row in questions]

    def _votes(
        self, question: NDArray[np.float32], bits: Bits | None
    ) -> Bounded[NDArray[np.int64]]:
        distances, labels = self._distances(question[None])[0], self.y
        if self.rate < 1:
            if bits is None:
                raise Unsupported(
                    "votes of a sample without its random bits", 'use the rule "sampled"'
                )
            from fractions import Fraction

            present = coins(len(labels), Fraction(self.rate), bits)
            distances, labels = distances[present], labels[present]
        if len(labels) > self.count:
            # Equal distances are told apart by the order of the records, so that which are nearest
            # depends on them alone.
            labels = labels[np.argsort(distances, kind="stable")[: self.count]]
        counts = np.bincount(labels, minlength=self.classes)
        counts[0] += self.count - len(labels)
        return moved(counts)
