"""Noise that comes with the contributions: every client adds its share before anybody sees a sum.
Here is what is public about it.

A round sums whole vectors modulo 2^bits (:mod:`dpfy.federated.shares` has clients and server).
Noise of a multiplier z is made of shares that together are what the charge says a Gaussian of z
bounds is: see `dpfy/accounting/rules/shares.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import Participation, Poisson
from dpfy.noise.strategy import Draw, Grads, State

DISCRETE, SKELLAM = "discrete-gaussian", "skellam"
LAWS: dict[str, Callable[[float, int, int, int], events.Event]] = {
    DISCRETE: events.DistributedDiscreteGaussian,
    SKELLAM: events.DistributedSkellam,
}
MOST_BITS, FINEST = 48, 2.0**24
ROUNDING, LEAST_SHARE = 4.0, 0.5
"""What a discrete Gaussian has more in variance than the real one that it is charged as; and its
least parameter.
"""
USUAL = math.exp(-0.5)
"""The chance that is left, at most, to one try of rounding a vector of being longer than charged."""
WAY_OUT = "let clients add their shares: use dpfy.federated.shares.DistributedRounds"


def padded(dimension: int) -> int:
    """The least power of two that is not below a dimension."""
    return 1 << (check.integer("dimension", dimension) - 1).bit_length()


def grown(length: float, coordinates: int) -> int:
    """The squared length that is charged for vectors of this length, in steps, after rounding.

    Guarantees: for every such vector one try is short enough with a probability of at least 1 -
    exp(-1/2) (Kairouz, Liu & Steinke 2021, Proposition 22); the second bound holds for every
    rounding.
    """
    usual = (
        length**2
        + coordinates / 4
        + math.sqrt(-2 * math.log(USUAL)) * (length + math.sqrt(coordinates) / 2)
    )
    return max(1, math.floor(min(usual, (length + math.sqrt(coordinates)) ** 2)))


@dataclass(frozen=True)
class Shares:
    """How the clients of a round encode vectors and share the noise, in units of the clip norm: the
    strategy of a plan.

    - `dimension`: of a vector
    - `clients`: how many take part in a round, at most; `least`: how many honest ones survive it,
      at the least
    - `bits`: whole numbers are sent modulo 2^bits; `scaled`: how many steps of the whole numbers a
      clip norm is long
    - `law`: "discrete-gaussian" or "skellam"; `rotation`: the public seed of the rotations
    """

    dimension: int
    clients: int
    least: int
    bits: int
    scaled: float
    law: str = DISCRETE
    rotation: int = 0

    def __post_init__(self) -> None:
        check.integer("dimension", self.dimension)
        check.integer("rotation", self.rotation, 0)
        check.integer("clients", self.clients)
        if check.integer("least", self.least) > self.clients:
            raise InvalidInput(
                "least", self.least, f"must be at most the number of clients, {self.clients}"
            )
        check.integer("bits", self.bits, 4, MOST_BITS)
        check.one_of("law", self.law, LAWS)
        if check.positive("scaled", self.scaled) > FINEST:
            raise InvalidInput(
                "scaled",
                self.scaled,
                "must be at most 2^24 steps: squared lengths must be small enough to be computed "
                "with",
            )

    @property
    def coordinates(self) -> int:
        """Of what is sent: the dimension, padded."""
        return padded(self.dimension)

    @property
    def squared(self) -> int:
        """The squared length that every whole vector keeps to, in steps."""
        return grown(self.scaled, self.coordinates)

    def share(self, noise_multiplier: float) -> float:
        """The standard deviation of one client's noise, in steps, so that `least` of them make a
        Gaussian of this multiplier.
        """
        discrete = self.law == DISCRETE
        share = math.sqrt(
            (noise_multiplier**2 * self.squared + (ROUNDING if discrete else 0.0)) / self.least
        ) * (1 + 1e-11)
        return max(share, LEAST_SHARE) if discrete else share

    def event(self, noise_multiplier: float) -> events.Event:
        """The charge of one round: that of `least` shares. Those who add more make it safer."""
        return LAWS[self.law](
            self.share(noise_multiplier), self.least, self.squared, self.coordinates
        )

    def overflow(self, share: float) -> float:
        """A bound on the probability that any coordinate of a round's sum wraps around: accuracy is
        lost then, never privacy.

        Guarantees: for any vectors that do not depend on the signs of the rotation. All clients may
        have rounded in one direction. Chernoff's bound for each coordinate: the signs make the
        signal sub-Gaussian (Hoeffding), of a variance of at most (clients * scaled)^2 /
        coordinates, a discrete Gaussian is sub-Gaussian of its parameter (Canonne, Kamath & Steinke
        2020), and the cumulants of Skellam noise are known.
        """
        room = (1 << (self.bits - 1)) - 1 - self.clients
        if room <= 0:
            return 1.0
        signal, noise = (
            (self.clients * self.scaled) ** 2 / self.coordinates,
            self.clients * share**2,
        )
        tilt = room / (signal + noise)
        if (
            self.law == SKELLAM
        ):  # where the derivative is zero, about: the bound holds for every tilt
            low, high = 0.0, min(tilt, 700.0)
            for _ in range(40):
                tilt = (low + high) / 2
                low, high = (
                    (tilt, high) if signal * tilt + noise * math.sinh(tilt) < room else (low, tilt)
                )
        added = noise * tilt**2 / 2 if self.law == DISCRETE else noise * (math.cosh(tilt) - 1)
        log = math.log(2 * self.coordinates) + signal * tilt**2 / 2 + added - tilt * room
        return math.exp(min(0.0, log))

    def words(self, noise_multiplier: float) -> str:
        """What clients do, for the report."""
        share = self.share(noise_multiplier)
        return (
            f"each client adds its share, {self.law} noise of {share:.6g} steps in each of "
            f"{self.coordinates} coordinates, to its rotated "
            f"vector of {self.scaled:.6g} steps, rounded to a squared length of at most "
            f"{self.squared}; sums are taken modulo "
            f"2^{self.bits}, and one wraps around with a probability of at most "
            f"{self.overflow(share):.2g} a round, which costs "
            "accuracy, not privacy"
        )

    def sensitivity(self, participation: Participation, steps: int) -> float:
        """1: rounds are composed by the accountant; who takes part in one is no secret to the
        server, and nothing is claimed for it.
        """
        if isinstance(participation, Poisson):
            return 1.0
        raise Unsupported(
            f"distributed noise with {type(participation).__name__} participation",
            "draw Poisson cohorts",
        )

    def fresh(self, step: int) -> float:
        """All of a round's noise is its own."""
        return 1.0

    def init(self, like: Grads) -> State:
        """Nothing to remember."""
        return {}

    def next(self, step: int, draw: Draw, state: State) -> tuple[Grads, State]:
        """Refused: a server has no part in the noise."""
        raise Unsupported("distributed noise that a server adds", WAY_OUT)
