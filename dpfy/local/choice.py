"""Which protocol: the error that each leaves at one guarantee, least first. Looks at no data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpfy.accounting import curve
from dpfy.accounting.rules.local import MOST_COUNTED
from dpfy.accounting.shuffling import answered_deltas, shuffled_deltas
from dpfy.core import check, events
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Adjacency
from dpfy.local.frequencies import (
    Frequencies,
    HadamardResponse,
    KaryResponse,
    LocalHashing,
    UnaryEncoding,
)
from dpfy.local.protocol import MOST_EPSILON

NEAR = 5e-4
"""How closely a local epsilon is found, relative to it."""


@dataclass(frozen=True)
class ProtocolCandidate:
    """A protocol, and the standard error that it leaves in one share: of a value that has its even
    part, and of one that nobody has.
    """

    name: str
    protocol: Frequencies
    even: float
    rare: float

    def to_json(self) -> dict[str, Any]:
        """A row of the table."""
        held = {
            "protocol": self.name,
            "epsilon": self.protocol.epsilon,
            "standard_error": self.even,
        }
        return held | {"standard_error_rare": self.rare, "bits": self.protocol.bits}


def compare(epsilon: float, buckets: int, reports: int) -> list[ProtocolCandidate]:
    """All protocols for one report a person, each `epsilon`-private by itself, by their error at
    even shares; ties by shorter reports.
    """
    return _ranked(dict.fromkeys(MAKERS, epsilon), buckets, reports)


def compare_shuffled(
    epsilon: float, delta: float, buckets: int, reports: int
) -> list[ProtocolCandidate]:
    """The same where a shuffler is trusted, each with the largest local epsilon that leaves
    (epsilon, delta) behind it.

    k-ary response is charged as what it is, which hides more than other protocols of its epsilon.
    """
    others = local_epsilon(epsilon, delta, reports)
    found = dict.fromkeys(MAKERS, others)
    found["k-ary response"] = max(others, local_epsilon(epsilon, delta, reports, buckets))
    return _ranked(found, buckets, reports)


def best(epsilon: float, buckets: int, reports: int = 1) -> Frequencies:
    """The protocol with the least error."""
    return compare(epsilon, buckets, reports)[0].protocol


MAKERS: dict[str, Callable[[float, int], Frequencies]] = {
    "k-ary response": KaryResponse,
    "optimised unary encoding": UnaryEncoding,
    "symmetric unary encoding": lambda epsilon, buckets: UnaryEncoding(epsilon, buckets, False),
    "local hashing": LocalHashing,
    "Hadamard response": HadamardResponse,
}


def _ranked(epsilons: dict[str, float], buckets: int, reports: int) -> list[ProtocolCandidate]:
    check.integer("reports", reports, most=check.RECORDS)
    found = []
    for name, make in MAKERS.items():
        protocol = make(epsilons[name], buckets)
        even = float(protocol.variances(np.full(buckets, 1 / buckets)).mean())
        rare = float(protocol.variances(np.append(np.zeros(buckets - 1), 1.0))[0])
        found.append(
            ProtocolCandidate(name, protocol, math.sqrt(even / reports), math.sqrt(rare / reports))
        )
    return sorted(found, key=lambda row: (round(row.even, 12), row.protocol.bits))


def local_epsilon(epsilon: float, delta: float, reports: int, answers: int = 0) -> float:
    """The largest epsilon of single reports for which shuffling `reports` of them leaves (epsilon,
    delta), rounded down.

    Guarantees: the accountant's bound on what is left is at most epsilon at what is returned.
    """
    check.epsilon("epsilon", epsilon)
    check.delta("delta", delta)
    check.integer("reports", reports, most=check.RECORDS)
    if epsilon > MOST_EPSILON:
        raise InvalidInput("epsilon", epsilon, f"must be at most {MOST_EPSILON:g}")
    low, high = epsilon, MOST_EPSILON
    while high - low > NEAR * low:
        middle = (low + high) / 2
        low, high = (
            (middle, high) if _left(middle, reports, answers, epsilon) <= delta else (low, middle)
        )
    while (
        curve(events.Shuffled(low, reports, answers), adjacency=Adjacency.REPLACE_ONE).epsilon(
            delta
        )
        > epsilon
        and low > epsilon
    ):
        low = max(
            epsilon, low * (1 - NEAR)
        )  # the curve that is billed is somewhat above its single points
    return low


def _left(epsilon0: float, reports: int, answers: int, epsilon: float) -> float:
    """Delta at one epsilon behind the shuffler."""
    at = np.array([epsilon])
    counted = min(reports, MOST_COUNTED)
    deltas = (
        answered_deltas(epsilon0, counted, answers, at)
        if answers > 2
        else shuffled_deltas(epsilon0, counted, at)
    )
    return float(deltas[0])
