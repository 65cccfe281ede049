"""Secure aggregation as a seam: whole numbers in, their sum modulo 2^bits out, and nothing else
seen; one that simulates it, for tests.

An engine with a protocol of its own (Flower's SecAgg+, say) keeps to `SecureSum`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.federated.shares.scheme import Message
from dpfy.plan.claim import SIMULATED


class TooFew(Unsupported):
    """Fewer clients than the charge counts on were left in a round: nothing of it was released."""

    def __init__(self, survivors: int, least: int) -> None:
        way_out = (
            "nothing of it was released; wait for more clients, or plan with a smaller `least`, "
            "which needs larger shares"
        )
        super().__init__(f"a round with {survivors} of at least {least} clients", way_out)


@dataclass(frozen=True)
class SurvivorSum:
    """The sum of the messages of the `survivors`, modulo 2^bits."""

    total: Message
    survivors: frozenset[int]


class SecureSum(Protocol):
    """Anyone who adds up the messages of a round.

    Guarantees asked for: nobody sees anything of the messages of honest clients but the sum over
    all survivors, and that at most once a round; with fewer than `least` survivors nobody sees that
    either, and `TooFew` is raised.

    `words` say for the report what protocol it was, and what it does not withstand: one line. What
    begins with "simulated" was none.
    """

    @property
    def words(self) -> str:
        """What protocol it is."""

    def sum(
        self, messages: Mapping[int, Message], *, bits: int, least: int, round: int
    ) -> SurvivorSum:
        """The sum over the clients that are still there."""


def checked(messages: Mapping[int, Message], bits: int, least: int) -> None:
    """Refuse too few messages, and those that are not whole numbers of one length below 2^bits."""
    if len(messages) < check.integer("least", least):
        raise TooFew(len(messages), least)
    shapes = {m.shape for m in messages.values()}
    if len(shapes) > 1:
        raise InvalidInput("messages", f"{len(shapes)} shapes", "must all have the same length")
    for client, message in messages.items():
        if message.dtype != np.uint64 or bool((message >> np.uint64(bits)).any()):
            raise InvalidInput(
                f"message of client {client}",
                str(message.dtype),
                f"must be whole numbers below 2^{bits} (uint64)",
            )


@dataclass(frozen=True)
class TrustedSum:
    """Adds the messages up as they are. Anyone who runs it is trusted with them: for simulations on
    one machine, where that is anyway so.
    """

    words: ClassVar[str] = (
        f"{SIMULATED}: messages were added up as they came, and anyone who ran the server could see "
        f"each of them"
    )

    def sum(
        self, messages: Mapping[int, Message], *, bits: int, least: int, round: int
    ) -> SurvivorSum:
        """See `SecureSum`."""
        checked(messages, bits, least)
        total = np.zeros_like(next(iter(messages.values())))
        for message in messages.values():
            total += message  # modulo 2^64, of which 2^bits is a divisor
        return SurvivorSum(total & np.uint64((1 << bits) - 1), frozenset(messages))


@dataclass(frozen=True)
class MaskedSum:
    """The protocol of Bonawitz et al. 2017 in one process: masks that two clients share cancel in
    the sum.

    `clients` are those who agreed on masks before the round. Each two of them have a key; one adds
    the mask that follows from it, the other takes it away. Of clients that vanished the masks are
    left over: the survivors hand the keys they shared with them to the server, each only when at
    least `least` survivors are named to it. What this leaves out: key agreement, the second mask
    against a server that lies about who vanished, signatures. It is for tests of what is around the
    protocol.
    """

    clients: Collection[int]
    randomness: Randomness

    words: ClassVar[str] = (
        f"{SIMULATED}: masks and updates were in one process, and anyone who ran it could see every "
        f"one"
    )

    def mask(self, one: int, other: int, round: int, size: int) -> Message:
        """What `one` adds, and `other` takes away if it has the larger number."""
        low, high = sorted((one, other))
        drawn = self.randomness.generator(f"mask of {low} and {high}", round).integers(
            0, 1 << 64, size, dtype=np.uint64
        )
        return drawn if one == low else (np.uint64(0) - drawn)

    def masked(self, client: int, message: Message, bits: int, round: int) -> Message:
        """What the server sees of one client: uniform to anyone who lacks the keys."""
        total = message.copy()
        for other in self.clients:
            if other != client:
                total += self.mask(client, other, round, message.size)
        return total & np.uint64((1 << bits) - 1)

    def unmasked(
        self, seen: Mapping[int, Message], *, bits: int, least: int, round: int
    ) -> SurvivorSum:
        """The sum of what came in, without the masks of those who vanished."""
        strangers = sorted(set(seen) - set(self.clients))
        if strangers:
            raise InvalidInput(
                "client", strangers[0], "agreed on no masks: it is not one of this round"
            )
        checked(seen, bits, least)
        total = TrustedSum().sum(seen, bits=bits, least=least, round=round).total
        for gone in set(self.clients) - set(seen):
            for client in seen:
                total -= self.mask(client, gone, round, total.size)
        return SurvivorSum(total & np.uint64((1 << bits) - 1), frozenset(seen))

    def sum(
        self, messages: Mapping[int, Message], *, bits: int, least: int, round: int
    ) -> SurvivorSum:
        """See `SecureSum`: those who are not among the messages vanished after the masks were
        agreed on.
        """
        seen = {
            client: self.masked(client, message, bits, round)
            for client, message in messages.items()
        }
        return self.unmasked(seen, bits=bits, least=least, round=round)
