"""An answer, and how far off it may be: the law of the noise is known, so that the interval is too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LEVEL = 0.95
"""The chance that an interval holds what would have been answered without noise."""


@dataclass(frozen=True)
class Answer:
    """One released number (or word), with what the noise can have done to it.

    `interval` holds the answer without noise in 95% of all releases. It does not cover what moving values into their public range changed,
    nor that the records are a sample of something larger. `place` says which group or cell the answer is of.
    """

    statistic: str
    value: float | int | str | None
    standard_error: float | None = None
    interval: tuple[float, float] | None = None
    place: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Its fields; those that say nothing are left out."""
        held: dict[str, Any] = {"statistic": self.statistic, **({"place": dict(self.place)} if self.place else {})}
        held["value"] = self.value
        if self.standard_error is not None:
            held["standard_error"] = self.standard_error
        if self.interval is not None:
            held["interval"] = list(self.interval)
        return held | ({"note": self.note} if self.note else {})


@dataclass(frozen=True)
class Spread:
    """The law of the noise on each of several numbers, independent of each other.

    `family` is laplace or gaussian, `scale` its parameter in the units of the numbers; `whole` where the noise is a whole number.
    """

    family: str
    scale: float
    whole: bool = False

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise on one number."""
        if self.family == "gaussian":
            return self.scale
        if not self.whole:
            return math.sqrt(2) * self.scale
        return 1 / (math.sqrt(2) * math.sinh(0.5 / self.scale))

    def error(self, coefficients: Sequence[float]) -> float:
        """The standard error of a combination of the numbers."""
        return self.deviation * float(np.linalg.norm(np.asarray(coefficients, np.float64)))

    def reach(self, coefficients: Sequence[float], level: float = LEVEL) -> float:
        """What the error of a combination stays within, in `level` of all releases.

        Exact for Gaussian noise, for one number, and for two with Laplace noise; for more, and for two with whole noise, from above.
        """
        used = np.abs(np.asarray(coefficients, np.float64))
        used = used[used > 0]
        if not len(used):
            return 0.0
        if self.family == "gaussian":
            from scipy.special import ndtri

            return self.scale * float(np.linalg.norm(used)) * float(ndtri((1 + level) / 2))
        if len(used) == 1:
            return float(used[0]) * self._one(level)
        return self._two(used, level) if len(used) == 2 and not self.whole else self._many(used, level)

    def _one(self, level: float) -> float:
        """The least bound on one draw."""
        if not self.whole:
            return -self.scale * math.log1p(-level)
        ratio = math.exp(-1 / self.scale)  # P(|X| > k) = 2 ratio^(k+1) / (1 + ratio)
        return float(max(0, math.ceil(self.scale * -math.log((1 - level) * (1 + ratio) / 2) - 1)))

    def _two(self, used: Any, level: float) -> float:
        """A sum of two Laplace numbers of scales a > b exceeds t with probability (a^2 e^(-t/a) - b^2 e^(-t/b)) / (a^2 - b^2)."""
        b, a = sorted(float(u) * self.scale for u in used)
        b = min(b, a * (1 - 1e-6))
        low, high = 0.0, 2 * a * -math.log1p(-level) + 2 * a
        for _ in range(80):
            t = (low + high) / 2
            beyond = (a * a * math.exp(-t / a) - b * b * math.exp(-t / b)) / (a * a - b * b)
            low, high = (t, high) if beyond > 1 - level else (low, t)
        return high

    def _many(self, used: Any, level: float) -> float:
        """The Chernoff bound: P(|X| > t) <= 2 exp(-l t) / prod(1 - (l b)^2), for whole noise too, whose moments are smaller."""
        from scipy.optimize import minimize_scalar

        scales = np.asarray(used) * self.scale
        top = float(scales.max())

        def bound(share: float) -> float:
            rate = share / top
            return float((math.log(2 / (1 - level)) - np.log1p(-((rate * scales) ** 2)).sum()) / rate)

        found = minimize_scalar(bound, bounds=(1e-6, 1 - 1e-9), method="bounded")
        return float(found.fun)


def ratio(
    above: Sequence[float], below: Sequence[float], values: Any, spread: Spread, within: tuple[float, float], known: float = 0.0
) -> tuple[float, float, tuple[float, float]]:
    """(above . values) / (below . values + known), its standard error and its interval, all inside `within`.

    The interval holds every r for which above - r below is within reach of zero (Fieller 1954): right whatever the denominator is.
    """
    a, b, z = np.asarray(above, np.float64), np.asarray(below, np.float64), np.asarray(values, np.float64)
    top, bottom = float(a @ z), float(b @ z) + known
    low, high = within
    middle = (low + high) / 2
    value = min(max(top / bottom, low), high) if bottom > 0 else middle
    error = spread.error(a - value * b) / bottom if bottom > 0 else math.inf
    if bottom <= (spread.reach(b) if b.any() else 0.0):
        return value, min(error, (high - low) / 2), within
    ends = []
    for end in within:
        inside, outside = value, end
        for _ in range(60):
            r = (inside + outside) / 2
            held = abs(top - r * bottom) <= spread.reach(a - r * b)
            inside, outside = (r, outside) if held else (inside, r)
        ends.append(outside)
    return value, min(error, (high - low) / 2), (ends[0], ends[1])
