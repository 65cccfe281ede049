"""The random bits of one address: the project's keystream as words, taken in order, none of them
twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import Unsupported
from dpfy.core.randomness import Randomness, require_same_process

WORD = 64
READY = 128
"""Words that are made at a time for callers who take a few."""

Words = NDArray[np.uint64]


class Bits:
    """Fair coins of the address (name, step) under a secret: AES-256 in counter mode, from
    operating-system entropy by default.

    Guarantees: the words come in the order of the keystream and each is handed out once, whatever
    the calls: `words(3)` and then `words(5)` are `words(8)`. Two objects with one address give the
    same words, so an address belongs to one draw: who makes two releases names two addresses. It
    cannot be copied, and a fork cannot use it. Not for two threads at once. An address ends after
    2^33 words, with an error.

    Args:
        randomness: The secret, and the generator made from it.
        name: The first part of the address.
        step: The second part.

    Raises:
        Unsupported: It is copied, or used in a forked process.

    Example:
        >>> from dpfy.core.randomness import Randomness
        >>> from dpfy.mechanisms import Bits
        >>> secret = Randomness.from_os()
        >>> one, same = Bits(secret, "answer", 0), Bits(secret, "answer", 0)
        >>> one.words(8).tolist() == [*same.words(3).tolist(), *same.words(5).tolist()]
        True
    """

    grain = WORD
    """How many bits a lazy comparison takes at a time."""

    def __init__(self, randomness: Randomness, name: str, step: int) -> None:
        self._fill: Callable[[memoryview], None] = randomness.keystream(
            check.one_line("name", name), check.integer("step", step, 0)
        )
        self._process = os.getpid()
        self._ready: Words = np.empty(READY, np.uint64)
        self._used = READY

    def __reduce_ex__(self, protocol: object) -> str:
        raise Unsupported(
            "a copy of random bits, which would hand out the same words again",
            "make another address",
        )

    def words(self, count: int) -> Words:
        """The next `count` words: uniform integers of 64 bits."""
        out = np.empty(check.integer("count", count, 0), np.uint64)
        self.into(out)
        return out

    def into(self, out: Words) -> None:
        """Overwrite an array (contiguous) with the next words."""
        require_same_process(self._process, "random bits")
        held = min(len(out), READY - self._used)
        out[:held] = self._ready[self._used : self._used + held]
        self._used += held
        if len(rest := out[held:]) >= READY:
            self._fill(rest.data.cast("B"))
        elif len(rest):
            self._fill(self._ready.data.cast("B"))
            rest[:] = self._ready[: len(rest)]
            self._used = len(rest)

    def take(self, count: int) -> int:
        """A uniform integer of `count` bits; what is left of its last word is thrown away."""
        value, words = 0, -(-count // WORD)
        for word in self.words(words).tolist():
            value = value << WORD | word
        return value >> (words * WORD - count)
