"""Mistakes of local protocols: each report, or all of a device's reports together, tells more than
was claimed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpfy_lab.checks.local import KEPT, REPORTS
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch

FREQUENCIES, NUMBERS = "dpfy.local.frequencies", "dpfy.local.means"


def _uniform(count: int, bits: Any) -> Any:
    return (bits.words(count) >> np.uint64(11)).astype(np.float64) / 2.0**53


@mistake(
    "local-swapped",
    "the chances of keeping and of changing a value are swapped",
    REPORTS,
    f"{FREQUENCIES}.KaryResponse.draw",
)
def _(real: Any, self: Any, given: Any, bits: Any) -> Any:
    kept = 1 - float(self.chances[1]) * self.buckets
    others = (_uniform(len(given), bits) * self.buckets).astype(np.int64)
    return np.where(_uniform(len(given), bits) < kept, others, given)


@mistake(
    "local-bit-budget",
    "every bit of a row is flipped for the whole epsilon",
    REPORTS,
    f"{FREQUENCIES}.UnaryEncoding.draw",
)
def _(real: Any, self: Any, given: Any, bits: Any) -> Any:
    # Two answers differ in two bits.
    flip = 1 / (np.exp(self.epsilon) + 1)
    rows = np.arange(self.buckets) == given[:, None]
    return rows ^ (_uniform(rows.size, bits).reshape(rows.shape) < flip)


@mistake(
    "local-ties",
    "signs with as many agreeing as not come from both sides",
    REPORTS,
    f"{NUMBERS}.DuchiMean.draw",
)
def _(real: Any, self: Any, given: Any, bits: Any) -> Any:
    # As it was published.
    signs = np.where(given >= 0, 1, -1)
    near = _uniform(len(given), bits) < np.exp(self.epsilon) / (np.exp(self.epsilon) + 1)
    found = np.zeros_like(signs)
    left = np.arange(len(signs))
    while len(left):
        drawn = _uniform(signs[left].size, bits).reshape(-1, signs.shape[1])
        found[left] = np.where(drawn < 0.5, 1, -1)
        agree = (found[left] * signs[left]).sum(axis=1)
        left = left[np.where(near[left], agree < 0, agree > 0)]
    return found > 0


@mistake(
    "local-hash-chosen",
    "the hash function is chosen to suit the value",
    REPORTS,
    f"{FREQUENCIES}.LocalHashing.draw",
)
def _(real: Any, self: Any, given: Any, bits: Any) -> Any:
    # The hash function itself then tells the value.
    rows = real(self, given, bits)
    rows[:, 1] = -rows[:, 0] * given % (2**31 - 1)
    return rows


@mistake("local-redrawn", "a permanent answer is drawn again for every report", KEPT)
def _(patch: Patch) -> None:
    held: dict[str, Any] = {}

    def permanent(real: Any, self: Any, given: Any, bits: Any) -> Any:
        held["given"], held["real"] = given, real
        return real(self, given, bits)

    def instantaneous(real: Any, self: Any, rows: Any, bits: Any) -> Any:
        return real(self, held["real"](self, held["given"], bits), bits)

    patch.around(f"{FREQUENCIES}.Rappor.permanent", permanent)
    patch.around(f"{FREQUENCIES}.Rappor.instantaneous", instantaneous)
