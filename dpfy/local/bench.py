"""Local protocols as the self-test of the audit sees them: reports on two values, in numbers that
an attacker would look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core.randomness import Randomness
from dpfy.local.frequencies import (
    PRIME,
    HadamardResponse,
    KaryResponse,
    LocalHashing,
    Rappor,
    UnaryEncoding,
)
from dpfy.local.means import DuchiMean, LaplaceMean, PrivUnit
from dpfy.local.protocol import Protocol, Rows
from dpfy.mechanisms.bits import Bits

Outcomes = NDArray[np.int64]
PEOPLE, DEVICES, ASKED = 30_000, 4_000, 80
"""Reports on each value; devices with a kept answer, and how often each is asked."""


def _row_number(rows: Rows) -> Outcomes:
    """The number of a row of bits."""
    return np.asarray(rows.astype(np.int64) @ (1 << np.arange(rows.shape[1])))


def _hashed(rows: Rows) -> Outcomes:
    """Which of the two values hash to the answer; and whether the second number of the function
    answers for the first value.
    """
    a, b, answer = rows[:, 0], rows[:, 1], rows[:, 2]
    cells = 4
    first, second = (
        ((a * value + b) % PRIME % cells == answer).astype(np.int64) for value in (0, 1)
    )
    return np.asarray(first + 2 * second + 4 * (b % PRIME == 0) + 8 * ((a + b) % PRIME == 0))


PROTOCOLS: dict[str, tuple[Protocol, tuple[Any, Any], Callable[[Rows], Outcomes]]] = {
    "k-ary response": (KaryResponse(1.0, 3), (0, 1), lambda rows: rows),
    "optimised unary encoding": (UnaryEncoding(1.0, 3), (0, 1), _row_number),
    "symmetric unary encoding": (UnaryEncoding(1.0, 3, False), (0, 1), _row_number),
    "local hashing": (LocalHashing(1.0, 3, 4), (0, 1), _hashed),
    "Hadamard response": (HadamardResponse(1.0, 3), (0, 1), lambda rows: rows),
    "Laplace": (
        LaplaceMean(1.0, 0.0, 1.0),
        (0.0, 1.0),
        lambda rows: np.sign(rows - (1 << 23)).astype(np.int64),
    ),
    "Duchi": (DuchiMean(1.0, 2), ((1.0, 1.0), (1.0, -1.0)), _row_number),
    "PrivUnit": (
        PrivUnit(1.0, 3),
        ((1.0, 0.0, 0.0), (-1.0, 0.0, 0.0)),
        lambda rows: np.sign(rows[:, 0]).astype(np.int64),
    ),
}
"""Each with two values, and what is looked at in a report."""


def local_reports(change: Callable[[Any], Any]) -> Iterator[tuple[str, float, Outcomes, Outcomes]]:
    """Name, epsilon, and what reports on two values show, by the protocol that `change` makes of
    the real one.
    """
    for name, (protocol, values, look) in PROTOCOLS.items():
        changed = change(protocol)
        seen = []
        for number, value in enumerate(values):
            given = protocol.given([value] * PEOPLE)
            seen.append(look(changed.draw(given, Bits(Randomness.for_tests(61), name, number))))
        yield name, protocol.epsilon, seen[0], seen[1]


def kept_answers(change: Callable[[Any], Any]) -> tuple[float, Outcomes, Outcomes]:
    """The longitudinal epsilon, and for devices with one value, and with another, which of the two
    many reports speak for.
    """
    protocol = Rappor(1.0, 2, once=0.9)
    changed, seen = change(protocol), []
    for value in (0, 1):
        bits = Bits(Randomness.for_tests(62), "kept", value)
        kept = changed.permanent(protocol.given([value] * DEVICES), bits)
        counts = sum(changed.instantaneous(kept, bits).astype(np.int64) for _ in range(ASKED))
        seen.append(np.sign(counts[:, 0] - counts[:, 1]).astype(np.int64))
    return protocol.epsilon, seen[0], seen[1]
