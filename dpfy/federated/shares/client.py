"""The client's side of a round: one message, made of its own secret, and never two for one
round.
"""

from __future__ import annotations

from typing import Any

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.federated.shares.scheme import Message, SharingScheme


class Client:
    """Encodes the vectors of one client, on its device, with noise from its own entropy.

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
