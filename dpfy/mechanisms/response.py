"""Randomized response: every person's own answer is changed at random before anybody sees it (local
differential privacy).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.core.values import Bounded, Permit, Private
from dpfy.mechanisms.discrete import whole
from dpfy.mechanisms.exact import Bits, coins, uniform
from dpfy.mechanisms.mechanism import Stated, source

UP = 1 + 2.0**-50


@dataclass(frozen=True)
class RandomizedResponseMechanism:
    """Answers 0 to buckets - 1, one a unit, each replaced by a uniform one with probability
    `noise_parameter`.

    Reference: Warner 1965; Kairouz, Bonawitz & Ramage 2016.
    """

    noise_parameter: float
    buckets: int = 2

    def __post_init__(self) -> None:
        check.rate("noise_parameter", self.noise_parameter)
        check.integer("buckets", self.buckets, least=2, most=1 << 31)

    @classmethod
    def of(cls, epsilon: float, buckets: int = 2) -> RandomizedResponseMechanism:
        """With the least noise for a pure epsilon under replace-one."""
        grown = math.exp(min(check.epsilon("epsilon", epsilon), 700.0))
        return cls(
            min(1.0, check.integer("buckets", buckets, least=2) / (grown + buckets - 1) * UP),
            buckets,
        )

    @property
    def event(self) -> events.Event:
        """One answer of every unit."""
        return events.RandomizedResponse(self.noise_parameter, self.buckets)

    def release(
        self,
        answers: Bounded[Any],
        permit: Permit,
        randomness: Randomness | None = None,
        step: int = 0,
    ) -> Private[NDArray[np.int64]]:
        """The answers as they may be seen. An answer outside of the public range counts as the
        nearest inside.

        Guarantees: each answer depends on the answer of its own unit alone. Every probability is
        exact.
        """
        given = np.clip(whole(answers.value), 0, self.buckets - 1)
        return Private(self.draw(given, source(self.event, permit, randomness, step)))

    def draw(self, given: NDArray[np.int64], bits: Bits) -> NDArray[np.int64]:
        """Each of the answers, which lie in the public range, as it may be seen."""
        changed, others = (
            coins(given.size, Fraction(self.noise_parameter), bits),
            uniform(given.size, self.buckets, bits),
        )
        return np.where(changed.reshape(given.shape), others.reshape(given.shape), given)

    def frequencies(self, released: NDArray[np.int64]) -> NDArray[np.float64]:
        """Unbiased estimates of the share of every answer among units: post-processing of a
        release.
        """
        shares = np.bincount(np.ravel(released), minlength=self.buckets) / max(1, np.size(released))
        p = self.noise_parameter
        return (
            (shares - p / self.buckets) / (1 - p)
            if p < 1
            else np.full(self.buckets, 1 / self.buckets)
        )


@dataclass(frozen=True)
class UnaryResponse(Stated):
    """An answer as a row of bits, one for each bucket, each of them flipped by chance (Erlingsson
    et al. 2014; Wang et al. 2017).

    Symmetric: every bit is flipped with probability 1 / (exp(epsilon / 2) + 1). Optimised: the one
    is kept by a fair coin, and a zero becomes one with probability 1 / (exp(epsilon) + 1): less
    variance where there are many buckets. Answers differ in two bits at most.
    """

    buckets: int = 2
    optimised: bool = True
    adjacency: Adjacency = field(default=Adjacency.REPLACE_ONE, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("buckets", self.buckets, least=2, most=1 << 20)
        if self.adjacency is Adjacency.ADD_OR_REMOVE_ONE:
            raise Unsupported(
                "unary response under add-or-remove-one",
                "an answer cannot be absent; use replace-one or zero-out",
            )

    @property
    def event(self) -> events.Event:
        """Pure epsilon, once for every unit."""
        return events.EpsilonDelta(self.epsilon)

    @property
    def chances(self) -> tuple[Fraction, Fraction]:
        """The chance of a one where the answer is, and where it is not: rounded to the private
        side.
        """
        part = self.epsilon if self.optimised else self.epsilon / 2
        low = Fraction(min(0.5, UP / (math.exp(min(part, 700.0)) + 1)))
        return (Fraction(1, 2) if self.optimised else 1 - low), low

    def release(
        self,
        answers: Bounded[Any],
        permit: Permit,
        randomness: Randomness | None = None,
        step: int = 0,
    ) -> Private[NDArray[np.bool_]]:
        """A row of bits for every answer. Guarantees: as :meth:`RandomizedResponse.release`."""
        given = np.clip(whole(answers.value), 0, self.buckets - 1)
        if given.ndim != 1:
            raise InvalidInput(
                "answers", f"{given.ndim} axes", "must be a list, one answer for each unit"
            )
        return Private(self.draw(given, self._source(permit, randomness, step)))

    def draw(self, given: NDArray[np.int64], bits: Bits) -> NDArray[np.bool_]:
        """A row of bits for each of the answers, which lie in the public range."""
        high, low = self.chances
        kept = coins(len(given), high, bits)
        rows = coins(len(given) * self.buckets, low, bits).reshape(len(given), self.buckets)
        rows[np.arange(len(given)), given] = kept
        return rows

    def frequencies(self, released: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Unbiased estimates of the share of every answer: post-processing of a release."""
        high, low = (float(p) for p in self.chances)
        return np.asarray(
            (released.mean(axis=0) - low) / (high - low)
            if len(released)
            else np.zeros(self.buckets)
        )
