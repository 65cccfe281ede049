"""Mistakes of local protocols: each report, or all of a device's reports together, tells more than
was claimed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dpfy.audit.bench import Bug

REPORTS, KEPT = "local reports", "kept answers"


class Instead:
    """A protocol that draws its reports by `draw(real, given, bits)` and is the real one in all
    else, the claim too.
    """

    def __init__(self, real: Any, draw: Callable[[Any, Any, Any], Any]) -> None:
        self.real, self._draw = real, draw

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def draw(self, given: Any, bits: Any) -> Any:
        """By the mistake."""
        return self._draw(self.real, given, bits)


def instead(name: str, draw: Callable[[Any, Any, Any], Any]) -> Callable[[Any], Any]:
    """A seam that puts a mistake into the protocols of one class."""
    return lambda real: Instead(real, draw) if type(real).__name__ == name else real


def _uniform(count: int, bits: Any) -> Any:
    return (bits.words(count) >> np.uint64(11)).astype(np.float64) / 2.0**53


def swapped(real: Any, given: Any, bits: Any) -> Any:
    """The value is kept with the chance with which it should be exchanged."""
    kept = 1 - float(real.chances[1]) * real.buckets
    others = (_uniform(len(given), bits) * real.buckets).astype(np.int64)
    return np.where(_uniform(len(given), bits) < kept, others, given)


def whole_epsilon_a_bit(real: Any, given: Any, bits: Any) -> Any:
    """Every bit is flipped as if it were alone: two answers differ in two bits."""
    flip = 1 / (np.exp(real.epsilon) + 1)
    rows = np.arange(real.buckets) == given[:, None]
    return rows ^ (_uniform(rows.size, bits).reshape(rows.shape) < flip)


def ties_of_both_sides(real: Any, given: Any, bits: Any) -> Any:
    """As it was published: signs with as many agreeing as not come from both sides of the coin."""
    signs = np.where(given >= 0, 1, -1)
    near = _uniform(len(given), bits) < np.exp(real.epsilon) / (np.exp(real.epsilon) + 1)
    found = np.zeros_like(signs)
    left = np.arange(len(signs))
    while len(left):
        found[left] = np.where(
            _uniform(signs[left].size, bits).reshape(-1, signs.shape[1]) < 0.5, 1, -1
        )
        agree = (found[left] * signs[left]).sum(axis=1)
        left = left[np.where(near[left], agree < 0, agree > 0)]
    return found > 0


def chosen_hash(real: Any, given: Any, bits: Any) -> Any:
    """The hash function is drawn until it suits the value: the function itself then tells the
    value.
    """
    rows = real.draw(given, bits)
    rows[:, 1] = -rows[:, 0] * given % (2**31 - 1)
    return rows


class Redrawn(Instead):
    """A permanent answer that nobody kept: every report has a new one."""

    def __init__(self, real: Any) -> None:
        super().__init__(real, lambda *_: None)

    def permanent(self, given: Any, bits: Any) -> Any:
        """Remember the values."""
        self.given = given
        return self.real.permanent(given, bits)

    def instantaneous(self, rows: Any, bits: Any) -> Any:
        """A report from another answer."""
        return self.real.instantaneous(self.real.permanent(self.given, bits), bits)


BUGS = (
    Bug(
        "local-swapped",
        "the chances of keeping and of changing a value are swapped",
        REPORTS,
        protocol=instead("KaryResponse", swapped),
    ),
    Bug(
        "local-bit-budget",
        "every bit of a row is flipped for the whole epsilon",
        REPORTS,
        protocol=instead("UnaryEncoding", whole_epsilon_a_bit),
    ),
    Bug(
        "local-ties",
        "signs with as many agreeing as not come from both sides",
        REPORTS,
        protocol=instead("DuchiMean", ties_of_both_sides),
    ),
    Bug(
        "local-hash-chosen",
        "the hash function is chosen to suit the value",
        REPORTS,
        protocol=instead("LocalHashing", chosen_hash),
    ),
    Bug(
        "local-redrawn",
        "a permanent answer is drawn anew for every report",
        KEPT,
        protocol=lambda real: Redrawn(real) if type(real).__name__ == "Rappor" else real,
    ),
)
