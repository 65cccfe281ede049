"""PATE-FM: teachers who share the labels among them and know all features; what leaves are their
noisy votes on some records.

Malek Esmaeili et al. 2021: the labels are dealt out to teachers, each learns from its own labels
and from all other records without theirs, after FixMatch (Sohn et al. 2020), and a student learns
from the classes that most of them say. Here a teacher is two linear solves:

1. ridge regression of its own labels on a few public coordinates (the weak view) gives every record
   a score for each class;
2. where these are sure, the class is what a regression on many coordinates (the strong view)
   learns, from all records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfy.core import events
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.values import Permit
from dpfy.labels.questions import HALF_L2, Question, Rows, Values
from dpfy.mechanisms.mechanism import source
from dpfy.mechanisms.votes import NoisyCounts

WEAK, STRONG = 96, 400
"""Coordinates of the two views, at most."""
PENALTY, STRONG_PENALTY = 0.5, 3.0
UNSURE = 0.3
"""The part of the records, those with the smallest margin, that pull to no class in the second
solve.
"""
MOST_UNLABELLED = 10_000
"""Records without labels that a teacher learns from, at most."""
EACH, MOST_TEACHERS = 20, 1000
LEAD = 5.0
"""Teachers for each standard deviation of the noise, where the number of questions is not
given.
"""


def planned(
    records: int, classes: int, noise_multiplier: float, teachers: int | None, asked: int | None
) -> tuple[int, int]:
    """How many teachers there are and how many records they are asked about, where it is not
    given: by public numbers alone.
    """
    found = max(2, min(MOST_TEACHERS, records // EACH)) if teachers is None else teachers
    if found > records:
        raise InvalidInput("teachers", found, f"must be at most the number of labels ({records})")
    most = math.floor((found / (LEAD * noise_multiplier * HALF_L2)) ** 2)
    return found, min(records, max(2 * classes, most)) if asked is None else asked


@dataclass(frozen=True, eq=False)
class PublicViews:
    """Public coordinates of all records: few and many. All of it follows from the features."""

    weak: Tensor
    strong: Tensor

    @cached_property
    def unlabelled(self) -> Tensor:
        """Which records teachers learn from without labels: evenly spread over all."""
        return (
            torch.linspace(0, len(self.weak) - 1, min(MOST_UNLABELLED, len(self.weak)))
            .round()
            .long()
        )

    @cached_property
    def factor(self) -> Tensor:
        """Of the second solve: the same for every teacher."""
        rows = self.strong[self.unlabelled]
        gram = rows.T @ rows
        gram.diagonal().add_(STRONG_PENALTY)
        return torch.linalg.cholesky(gram)

    def learnt(self, rows: Tensor, labels: Tensor, classes: int) -> Tensor:
        """Weights on the strong view that the labels of `rows` teach."""
        own = self.weak[rows]
        goal = torch.nn.functional.one_hot(labels, classes).to(own.dtype) - 1 / classes
        inner = own @ own.T
        inner.diagonal().add_(PENALTY)
        weights = own.T @ torch.cholesky_solve(goal, torch.linalg.cholesky(inner))
        scores = self.weak[self.unlabelled] @ weights
        best = scores.topk(2, dim=1).values
        margin = best[:, 0] - best[:, 1]
        sure = margin >= margin.quantile(UNSURE)
        targets = (
            torch.nn.functional.one_hot(scores.argmax(1), classes).to(own.dtype) - 1 / classes
        ) * sure[:, None]
        return torch.cholesky_solve(self.strong[self.unlabelled].T @ targets, self.factor)


@dataclass(frozen=True)
class TeacherVotes(Question):
    """Which class most of the teachers say about each of the records `about`, after Gaussian noise
    on every count.

    `places` says whose label each is: it is dealt out by the number of the record, so that
    replacing a label changes one teacher, who moves at most one vote on each of Q records: all
    counts together, by the root of 2 Q. Noise of `noise_multiplier` times half of that is a
    Gaussian release of all counts, of which the winners are a function.
    """

    noise_multiplier: float
    outcomes: int
    views: PublicViews
    places: NDArray[np.int64]
    teachers: int
    about: Rows

    @property
    def event(self) -> events.Event:
        """One Gaussian release of all counts."""
        return events.Gaussian(self.noise_multiplier)

    @property
    def sigma(self) -> float:
        """The noise on every count, in votes; rounded up."""
        return self.noise_multiplier * HALF_L2 * math.sqrt(len(self.about)) * (1 + 1e-12)

    def answer(
        self, labels: Values, permit: Permit, randomness: Randomness, step: int
    ) -> NDArray[Any]:
        """A class for each record. Guarantees: a teacher is a function of its own labels, and says
        one class about each record.
        """
        counts = self.counts(labels)
        bits = source(self.event, permit, randomness, step)
        return np.array(
            [NoisyCounts(row, Fraction(self.sigma), bits).largest() for row in counts], np.int64
        )

    @torch.no_grad()
    def counts(self, labels: Values) -> NDArray[np.int64]:
        """How many teachers say each class: as private as the labels."""
        order = np.argsort(self.places, kind="stable")
        ends = np.cumsum(np.bincount(self.places, minlength=self.teachers))
        asked = self.views.strong[torch.from_numpy(self.about)]
        found, records = (
            np.zeros((len(self.about), self.outcomes), np.int64),
            np.arange(len(self.about)),
        )
        for own in np.split(order, ends[:-1]):
            weights = self.views.learnt(
                torch.from_numpy(own), torch.from_numpy(labels[own]), self.outcomes
            )
            found[records, (asked @ weights).argmax(1).numpy()] += 1
        return found

    def public(self) -> bytes:
        """Which records are whose, which are asked about, and their coordinates."""
        known = (self.places, self.about, self.views.weak.numpy(), self.views.strong.numpy())
        return self.rows.tobytes() + b"".join(
            np.ascontiguousarray(part).tobytes() for part in known
        )


def dealt(records: int, teachers: int) -> NDArray[np.int64]:
    """Whose label each is: by a permutation that follows from the number of records alone, in parts
    of nearly one size.
    """
    order = np.random.Generator(np.random.Philox(key=records)).permutation(records)
    places = np.empty(records, np.int64)
    places[order] = np.arange(records) % teachers
    return places
