"""What can be asked of labels: mechanisms with public parameters, one row of them for each label
that answers.

A question is made of public features and of earlier answers. The labels meet it in `answer`, which
draws exactly from the run's secret.

Labels that can be read once: each is taken for one question, and is gone from its place then.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, Permit
from dpfy.labels.claim import LABEL, laplace_multiplier
from dpfy.mechanisms.additive import GaussianMechanism, LaplaceMechanism
from dpfy.mechanisms.discrete import DiscreteLaplaceMechanism
from dpfy.mechanisms.exact import coins, uniform
from dpfy.mechanisms.mechanism import source
from dpfy.mechanisms.response import RandomizedResponseMechanism

Values = NDArray[np.int64]
Rows = NDArray[np.int64]


class SealedLabels:
    """The labels of `records` records, as whole numbers from 0 to `outcomes` - 1, until they are
    taken.

    `given` holds them, or is a function that opens them; it is called when the first label is
    taken, once. With `span` labels are real numbers, which are read on a grid of `outcomes` points
    from its low to its high end.

    Guarantees: a label is handed out once, and overwritten here when it is: taking it again is an
    error, anyone who asks. What lies outside of the public range counts as its end, and what is no
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


Reals = NDArray[np.float64]
Matrix = NDArray[np.float32]
HALF_L1 = 1.0
"""Half of what replacing a label moves its one-hot vector by in the L1 norm. Replace-one is charged
as two bounds.
"""
HALF_L2 = math.nextafter(math.sqrt(0.5), 1.0)
"""The same in the L2 norm: one-hot vectors are the root of two apart."""


@dataclass(frozen=True)
class Question(ABC):
    """Something asked of the labels of `rows`. `event` is what it costs each of them."""

    rows: Rows

    @property
    @abstractmethod
    def event(self) -> events.Event:
        """The charge for one label, replaced."""

    @abstractmethod
    def answer(
        self, labels: Values, permit: Permit, randomness: Randomness, step: int
    ) -> NDArray[Any]:
        """What is released. Guarantees: depends on each label as `event` says, and on nothing else
        that is not public.
        """

    @abstractmethod
    def public(self) -> bytes:
        """Everything that was asked, as bytes: what the noise of this step must never meet anything
        else than.
        """


@dataclass(frozen=True)
class Response(Question):
    """Randomized response over all `outcomes`: an answer for each label."""

    epsilon: float
    outcomes: int

    @property
    def mechanism(self) -> RandomizedResponseMechanism:
        """With the least noise for epsilon."""
        return RandomizedResponseMechanism.of(self.epsilon, self.outcomes)

    @property
    def event(self) -> events.Event:
        """One response of every label."""
        return self.mechanism.event

    def answer(
        self, labels: Values, permit: Permit, randomness: Randomness, step: int
    ) -> NDArray[Any]:
        """A label for each label."""
        return self.mechanism.release(
            Bounded(labels, Bound.scalar(1.0), LABEL), permit, randomness, step
        ).value

    def public(self) -> bytes:
        """Which records."""
        return self.rows.tobytes()


@dataclass(frozen=True, repr=False)
class PriorResponse(Question):
    """Randomized response among the `sizes[i]` first outcomes of `order[i]`, for each label `i`
    (RRWithPrior; Ghazi et al. 2021).

    A label outside of them is answered by a uniform one of them. Whatever order and sizes are, the
    chances of an answer under two labels differ by a factor of at most exp(epsilon): with k
    outcomes they are exp(epsilon) / (exp(epsilon) + k - 1), 1 / (exp(epsilon) + k - 1) and, from
    outside, 1 / k, which lies between the two.
    """

    epsilon: float
    order: NDArray[np.int16]
    sizes: NDArray[np.int16]

    def __post_init__(self) -> None:
        check.epsilon("epsilon", self.epsilon)
        if self.order.shape[:1] != self.rows.shape or self.sizes.shape != self.rows.shape:
            raise InvalidInput(
                "prior",
                f"{self.order.shape[:1]} rows",
                f"must be one for each of {len(self.rows)} labels",
            )
        if len(self.rows) and (self.sizes.min() < 1 or self.sizes.max() > self.order.shape[1]):
            raise InvalidInput(
                "prior sizes",
                int(self.sizes.max()),
                f"must lie between 1 and {self.order.shape[1]}",
            )

    @property
    def event(self) -> events.Event:
        """Pure epsilon."""
        return events.EpsilonDelta(self.epsilon)

    def answer(
        self, labels: Values, permit: Permit, randomness: Randomness, step: int
    ) -> NDArray[Any]:
        """A label for each label, among those that the prior names."""
        bits = source(self.event, permit, randomness, step)
        found = np.empty(len(labels), np.int64)
        for size in np.unique(self.sizes).tolist():
            at = np.flatnonzero(self.sizes == size)
            named = self.order[at, :size].astype(np.int64)
            others = named[np.arange(len(at)), uniform(len(at), size, bits)]
            kept = ~coins(len(at), chance_changed(self.epsilon, size), bits) & (
                named == labels[at, None]
            ).any(axis=1)
            found[at] = np.where(kept, labels[at], others)
        return found

    def public(self) -> bytes:
        """Which records, with which priors."""
        return b"".join(part.tobytes() for part in (self.rows, self.order, self.sizes))


def chance_changed(epsilon: float, size: int) -> Fraction:
    """The chance with which a label is replaced by a uniform one of `size`: exact, rounded to the
    private side.
    """
    return (
        Fraction(1)
        if size == 1
        else Fraction(RandomizedResponseMechanism.of(epsilon, size).noise_parameter)
    )


@dataclass(frozen=True)
class NoisyOneHot(Question):
    """One-hot vectors with Laplace noise of scale 2 / epsilon in every coordinate: one for each
    label.
    """

    epsilon: float
    outcomes: int

    @property
    def mechanism(self) -> LaplaceMechanism:
        """Its noise is that of two bounds, since replace-one is charged as two."""
        return LaplaceMechanism(laplace_multiplier(self.epsilon))

    @property
    def event(self) -> events.Event:
        """One Laplace release."""
        return self.mechanism.event

    def answer(
        self, labels: Values, permit: Permit, randomness: Randomness, step: int
    ) -> NDArray[Any]:
        """A row of real numbers for each label."""
        one_hot = (labels[:, None] == np.arange(self.outcomes)).astype(np.int64)
        released = self.mechanism.release(
            Bounded(one_hot, Bound(l1=HALF_L1), LABEL), permit, randomness, step
        )
        return np.asarray(released.value, np.float32)

    def public(self) -> bytes:
        """Which records."""
        return self.rows.tobytes()


@dataclass(frozen=True, repr=False)
class Counts(Question):
    """How many labels of each outcome there are in each of `cells` groups of records, with integer
    Laplace noise.
    """

    epsilon: float
    outcomes: int
    groups: NDArray[np.int32]
    cells: int

    @property
    def event(self) -> events.Event:
        """Pure epsilon: replacing a label takes one from a count and adds one to another."""
        return events.EpsilonDelta(self.epsilon)

    def answer(
        self, labels: Values, permit: Permit, randomness: Randomness, step: int
    ) -> NDArray[Any]:
        """A row of counts for each group."""
        places = self.groups.astype(np.int64) * self.outcomes + labels
        counts = np.bincount(places, minlength=self.cells * self.outcomes)
        noise = DiscreteLaplaceMechanism(self.epsilon / 2).noise(
            counts.size, source(self.event, permit, randomness, step)
        )
        return np.asarray((counts + noise).reshape(self.cells, self.outcomes))

    def public(self) -> bytes:
        """Which records are in which group."""
        return self.rows.tobytes() + self.groups.tobytes()


@dataclass(frozen=True)
class Projection(Question):
    """A'Y with Gaussian noise: one-hot labels Y summed along the columns of the public matrix A,
    whose rows are of length at most one.
    """

    noise_multiplier: float
    outcomes: int
    matrix: Matrix

    @property
    def event(self) -> events.Event:
        """One Gaussian release."""
        return events.Gaussian(self.noise_multiplier)

    def answer(
        self, labels: Values, permit: Permit, randomness: Randomness, step: int
    ) -> NDArray[Any]:
        """[columns of A, outcomes].

        Guarantees: rows of A are clipped and laid on a public grid, and added as integers: what
        replacing a label moves is bounded whatever A holds and however many labels there are. A row
        that is not finite adds nothing.
        """
        width = self.matrix.shape[1]
        mechanism = GaussianMechanism(self.noise_multiplier)
        grid = mechanism.grid(Bound(l2=HALF_L2), max(1, width * self.outcomes))
        total = np.zeros((width, self.outcomes), np.int64)
        row = Bound(l2=1.0)
        for outcome in range(self.outcomes):
            part = grid.sum(self.matrix[labels == outcome], row)
            total[:, outcome], row_bound = part.value.counts, part.bound.l2
        laid = type(part.value)(grid, total)
        bounded = Bounded(laid, Bound(l2=HALF_L2 * row_bound * (1 + 2.0**-50)), LABEL)
        return np.asarray(mechanism.release(bounded, permit, randomness, step).value, np.float64)

    def public(self) -> bytes:
        """The matrix."""
        return self.rows.tobytes() + np.ascontiguousarray(self.matrix).tobytes()


@dataclass(frozen=True, repr=False)
class BinResponse(Question):
    """Randomized response among `count` bins: each outcome, a step of a grid of numbers, lies in
    the bin `bin_of` it.
    """

    epsilon: float
    bin_of: NDArray[np.int16]
    count: int

    @property
    def event(self) -> events.Event:
        """Pure epsilon."""
        return events.EpsilonDelta(self.epsilon)

    def answer(
        self, labels: Values, permit: Permit, randomness: Randomness, step: int
    ) -> NDArray[Any]:
        """A bin for each label."""
        bits = source(self.event, permit, randomness, step)
        others, exchanged = (
            uniform(len(labels), self.count, bits),
            coins(len(labels), chance_changed(self.epsilon, self.count), bits),
        )
        return np.where(exchanged, others, self.bin_of[labels].astype(np.int64))

    def public(self) -> bytes:
        """Which records, and the bins."""
        return self.rows.tobytes() + self.bin_of.tobytes()
