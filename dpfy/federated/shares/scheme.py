"""From a client's vector to whole numbers modulo 2^bits that may be summed by anybody, and from
their sum back to a vector.

    client:  clip -> rotate -> scale -> round at random, no longer than billed -> add a share of
    noise -> modulo 2^bits server:  sum modulo 2^bits -> centre -> unscale -> rotate back

The server, and whoever sees its messages, learns the sum alone: secure aggregation hides the rest.
The sum is protected by the shares of all honest clients together; what follows it is
post-processing. That goes for the wrap-around at 2^bits too: it costs accuracy and never privacy.
`SharingScheme.overflow` bounds its probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.federated.shares import rounding
from dpfy.federated.shares.rotation import Array, Rotation
from dpfy.mechanisms import integers
from dpfy.mechanisms.bits import Bits
from dpfy.mechanisms.skellam import skellam
from dpfy.noise.shares import SKELLAM, Shares

Message = NDArray[np.uint64]
"""Whole numbers from 0 to below 2^bits: what a client sends."""


@dataclass(frozen=True)
class SharingScheme:
    """How the clients of a round encode vectors of an L2 norm of at most `clip`. Public, and known
    before any data is read.

    Guarantees: `event` is the whole bill of one round, for a client whose vector is zeroed out or
    replaced, if nobody sees anything of the messages but the sum of all, and `shares.least` of
    those who are in it added their share and keep it to themselves.
    """

    shares: Shares
    clip: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        check.positive("clip", self.clip)
        check.noise_multiplier(
            "noise_multiplier", check.positive("noise_multiplier", self.noise_multiplier)
        )

    @property
    def bits(self) -> int:
        """Messages are whole numbers below 2^bits."""
        return self.shares.bits

    @property
    def least(self) -> int:
        """How many clients a sum must have."""
        return self.shares.least

    @property
    def share(self) -> float:
        """The standard deviation of one client's noise, in steps."""
        return self.shares.share(self.noise_multiplier)

    @property
    def step(self) -> float:
        """The length of 1 in units of the vectors."""
        return self.clip / self.shares.scaled

    @property
    def event(self) -> events.Event:
        """The bill of one round."""
        return self.shares.event(self.noise_multiplier)

    @property
    def overflow(self) -> float:
        """A bound on the probability that a round wraps around."""
        return self.shares.overflow(self.share)

    @property
    def stddev(self) -> float:
        """Of the noise on a coordinate of the released sum when all clients take part, rounding
        included, in units of the vectors.
        """
        return self.step * math.sqrt(self.shares.clients * (self.share**2 + 0.25))

    def encode(self, vector: Any, randomness: Randomness, client: int, round: int) -> Message:
        """What a client sends for its vector: on its own device, from its own secret.

        Guarantees: before the noise the whole vector is no longer than billed, whatever `vector`
        holds; one that is not finite counts as zero. Noise is always added. It is a function of
        (secret, seed of the rotations, client, round), so a message that is sent again is the same.
        A secret is for one run: in two runs of one plan it would make the same noise.
        """
        whole = self.whole(vector, randomness, client, round)
        return self.wrapped(whole + self.drawn(randomness, client, round))

    def whole(
        self, vector: Any, randomness: Randomness, client: int, round: int
    ) -> NDArray[np.int64]:
        """The vector, clipped, rotated and rounded."""
        flat, size = np.asarray(vector, np.float64).reshape(-1), self.shares.dimension
        if flat.size != size:
            raise InvalidInput(
                "vector", f"{flat.size} numbers", f"must have {size}, as the scheme says"
            )
        with np.errstate(all="ignore"):
            norm = float(np.linalg.norm(flat))
            flat = flat * min(1.0, self.clip / norm) if 0 < norm < math.inf else np.zeros(size)
        rotated = self._rotation(round).forward(flat) / self.step
        return rounding.rounded(
            rotated, self.shares.squared, self._bits("rounding", randomness, client, round)
        )

    def drawn(self, randomness: Randomness, client: int, round: int) -> NDArray[np.int64]:
        """The client's share of the noise."""
        bits, share = self._bits("share", randomness, client, round), Fraction(self.share)
        if self.shares.law == SKELLAM:
            return skellam(self.shares.coordinates, share**2, bits)
        return integers.gaussian(self.shares.coordinates, share, bits, again=True)

    def wrapped(self, whole: NDArray[np.int64]) -> Message:
        """Modulo 2^bits."""
        return np.bitwise_and(whole, (1 << self.bits) - 1).astype(np.uint64)

    def centred(self, total: Message) -> NDArray[np.int64]:
        """Whole numbers modulo 2^bits as those between -2^(bits - 1) and 2^(bits - 1)."""
        half = 1 << (self.bits - 1)
        return np.bitwise_and(total.astype(np.int64) + half, (1 << self.bits) - 1) - half

    def decode(self, total: Message, round: int) -> Array:
        """The noisy sum of the clipped vectors, from the sum of the messages."""
        if total.shape != (self.shares.coordinates,):
            raise InvalidInput(
                "total",
                str(total.shape),
                f"must have {self.shares.coordinates} whole numbers, as the scheme says",
            )
        return self._rotation(round).inverse(self.centred(total).astype(np.float64) * self.step)

    def _bits(self, what: str, randomness: Randomness, client: int, round: int) -> Bits:
        """Of one client in one round, under the plan's own seed of rotations: plans do not share
        noise.
        """
        return Bits(randomness, f"{what} of client {client} by {self.shares.rotation}", round)

    def _rotation(self, round: int) -> Rotation:
        return Rotation(self.shares.rotation, round, self.shares.dimension)


class Client:
    """The client's side of a round: encodes its vectors, on its device, with noise from its own
    entropy.

    Guarantees: asked again for a round it answers with the same bits, whatever the vector is by
    then, so that a server cannot have the noise of a round with two vectors, nor a vector with two
    noises; a round before the last one is refused. That lasts as long as the object: a client that
    forgot what it sent must not answer that round again.
    """

    def __init__(
        self, scheme: SharingScheme, number: int, randomness: Randomness | None = None
    ) -> None:
        self.scheme, self.number = scheme, check.integer("client", number, 0)
        self._randomness = Randomness.from_os() if randomness is None else randomness
        self._last: tuple[int, Message] | None = None

    def message(self, vector: Any, round: int) -> Message:
        """What is sent for a vector in a round."""
        check.integer("round", round, 0)
        if self._last is not None and round < self._last[0]:
            raise InvalidInput(
                "round", round, f"is over: this client has answered round {self._last[0]}"
            )
        if self._last is None or round > self._last[0]:
            self._last = (round, self.scheme.encode(vector, self._randomness, self.number, round))
        return self._last[1].copy()
