"""Checks of local protocols: reports of devices with two different values, in numbers that an attacker
would look at.

They have a false-alarm rate below 1e-6 each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.audit.bounds import log_ratio
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
from dpfy.mechanisms.exact import Bits
from dpfy_lab.selftest.mistake import Found, check

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


@check("local reports")
def REPORTS() -> Found:
    """No report is more than exp(epsilon) times as likely for one value as for the other."""
    for name, (protocol, values, look) in PROTOCOLS.items():
        seen = []
        for number, value in enumerate(values):
            given = protocol.given([value] * PEOPLE)
            seen.append(look(protocol.draw(given, Bits(Randomness.for_tests(61), name, number))))
        if (found := log_ratio(seen[0], seen[1])) > protocol.epsilon:
            return (
                f"{name}: a report tells two values apart with epsilon at least {found:.3f}, "
                f"claimed {protocol.epsilon:g}"
            )
    return None


@check("kept answers")
def KEPT() -> Found:
    """Many reports from one kept answer show no more than the answer itself would."""
    protocol, seen = Rappor(1.0, 2, once=0.9), []
    for value in (0, 1):
        bits = Bits(Randomness.for_tests(62), "kept", value)
        kept = protocol.permanent(protocol.given([value] * DEVICES), bits)
        reports = [protocol.instantaneous(kept, bits).astype(np.int64) for _ in range(ASKED)]
        counts = np.sum(reports, axis=0)
        seen.append(np.sign(counts[:, 0] - counts[:, 1]).astype(np.int64))
    if (found := log_ratio(seen[0], seen[1])) <= protocol.epsilon:
        return None
    return (
        f"many reports of a device cost epsilon at least {found:.3f}, claimed "
        f"{protocol.epsilon:g} for all of them"
    )


CHECKS = (REPORTS, KEPT)
