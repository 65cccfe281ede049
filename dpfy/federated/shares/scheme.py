"""From a client's vector to whole numbers modulo 2^bits that may be summed by anybody, and from
their sum back to a vector.

    client:  clip -> rotate -> scale -> round at random, no longer than charged -> add a share of
    noise -> modulo 2^bits server:  sum modulo 2^bits -> centre -> unscale -> rotate back

The server, and anyone who sees its messages, learns the sum alone: secure aggregation hides the rest.
The sum is protected by the shares of all honest clients together; what follows it is
post-processing. That goes for the wrap-around at 2^bits too: it costs accuracy and never privacy.
`SharingScheme.overflow` bounds its probability.

A random rotation that everybody knows: vectors whose length sits in few coordinates come out
spread over all of them.

Coordinates of a rotated vector are about equally large, so that few bits are enough for each, and a
sum seldom leaves its range. Nothing about privacy depends on it: the length that is charged is
measured after it, on integers.

Real vectors to whole ones: rounded up or down by chance, again and again until the result is no
longer than is charged.

What makes the charge right is the last comparison alone, on integers: a vector that is longer than
`squared` allows never leaves.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.mechanisms import integers
from dpfy.mechanisms.discrete import skellam
from dpfy.mechanisms.exact import Bits
from dpfy.noise.shares import SKELLAM, Shares, padded

Array = NDArray[np.float64]

RADIX = 32
"""Coordinates that one small matrix mixes."""


@lru_cache(maxsize=16)
def _matrix(size: int) -> Array:
    rows = np.arange(size)
    signs = np.array([[bin(i & j).count("1") & 1 for j in rows] for i in rows])
    return (1.0 - 2.0 * signs) / np.sqrt(size)


def hadamard(rows: Array) -> Array:
    """The Walsh-Hadamard transform of the last axis, a power of two long, divided by the root of
    its length: its own inverse.
    """
    size, width = rows.shape[-1], 1
    out = rows.reshape(-1, size)
    while width < size:
        block = min(RADIX, size // width)
        out = (
            np.matmul(_matrix(block), out.reshape(-1, block, width))
            if width > 1
            else out.reshape(-1, block) @ _matrix(block)
        )
        width *= block
    return out.reshape(rows.shape)


@dataclass(frozen=True)
class Rotation:
    """Random signs and then a Hadamard transform, for one round: a function of a public seed.
    Vectors are padded with zeros.
    """

    seed: int
    round: int
    dimension: int

    def signs(self) -> Array:
        """+1 or -1 for each coordinate of a padded vector."""
        key = hashlib.blake2b(
            f"rotation {self.seed} of round {self.round}".encode(), digest_size=16
        ).digest()
        drawn = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))).integers(
            0, 2, padded(self.dimension), dtype=np.int8
        )
        return 1.0 - 2.0 * drawn.astype(np.float64)

    def forward(self, rows: Array) -> Array:
        """Vectors, one a row, rotated."""
        wide = np.zeros((*rows.shape[:-1], padded(self.dimension)))
        wide[..., : self.dimension] = rows
        return hadamard(wide * self.signs())

    def inverse(self, rows: Array) -> Array:
        """Rotated vectors as they were."""
        return np.asarray((hadamard(rows) * self.signs())[..., : self.dimension])


TRIES = 64
"""After so many results that are too long the vector is rounded towards zero, which makes it no
longer.
"""


def rounded(values: NDArray[np.float64], squared: int, bits: Bits) -> NDArray[np.int64]:
    """A whole vector near `values`, whose squared length is at most `squared`.

    Guarantees: the length, whatever the values; what is not finite, or cannot be made short enough,
    becomes zero.
    """
    with np.errstate(all="ignore"):
        if not np.dot(values, values) <= squared * (
            1 + 1e-9
        ):  # not if not a number; from here on nothing leaves 64 bits
            return np.zeros(len(values), np.int64)
    below = np.floor(values)
    share = values - below
    for _ in range(TRIES):
        coins = (bits.words(len(values)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        whole = (below + (coins < share)).astype(np.int64)
        if length(whole) <= squared:
            return whole
    whole = np.trunc(values).astype(np.int64)
    return whole if length(whole) <= squared else np.zeros(len(values), np.int64)


def length(whole: NDArray[np.int64]) -> int:
    """The squared length of a whole vector, exactly."""
    return int(np.dot(whole, whole))


Message = NDArray[np.uint64]
"""Whole numbers from 0 to below 2^bits: what a client sends."""


@dataclass(frozen=True)
class SharingScheme:
    """How the clients of a round encode vectors of an L2 norm of at most `clip`. Public, and known
    before any data is read.

    Guarantees: `event` is the whole charge of one round, for a client whose vector is zeroed out or
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
        """The charge of one round."""
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

        Guarantees: before the noise the whole vector is no longer than charged, whatever `vector`
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
        return rounded(
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
