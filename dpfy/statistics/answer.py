"""An answer, and how far off it may be: the law of the noise is known, so that the interval is
too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Coefficients = Sequence[float] | NDArray[np.float64]
MANY, STEPS = 32, 60
LEVEL = 0.95
"""The chance that an interval holds what would have been answered without noise."""


@dataclass(frozen=True)
class Answer:
    """One released number (or word), with what the noise can have done to it.

    `interval` holds the answer without noise in 95% of all releases, or in `level` of them. It does
    not cover what moving values into their public range changed, nor that the records are a sample
    of something larger. `place` says which group or cell the answer is of.
    """

    statistic: str
    value: float | int | str | None
    standard_error: float | None = None
    interval: tuple[float, float] | None = None
    place: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    level: float = LEVEL

    def __str__(self) -> str:
        place = ", ".join(f"{key} {value}" for key, value in self.place.items())
        ends = (
            ""
            if self.interval is None
            else f" ({shown(self.interval[0])} to {shown(self.interval[1])})"
        )
        return (
            (f"{place}: " if place else "")
            + shown(self.value)
            + ends
            + (f"; {self.note}" if self.note and not ends else "")
        )

    def to_json(self) -> dict[str, Any]:
        """Its fields; those that say nothing are left out."""
        held: dict[str, Any] = {
            "statistic": self.statistic,
            **({"place": dict(self.place)} if self.place else {}),
        }
        held["value"] = self.value
        if self.standard_error is not None:
            held["standard_error"] = self.standard_error
        if self.interval is not None:
            held["interval"] = list(self.interval)
        if self.level != LEVEL:
            held["level"] = self.level
        return held | ({"note": self.note} if self.note else {})


def within(group: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The place of an answer in its group. A column of the group may have the name that a statistic
    gives its own part.
    """
    named = {f"{key} of the answer" if key in group else key: value for key, value in own.items()}
    return {**group, **named}


def shown(value: object) -> str:
    """A number or a word for a person."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def percent(level: float) -> str:
    """A level of confidence in words."""
    return f"{100 * level:g}%"


@dataclass(frozen=True)
class NoiseLaw:
    """The law of the noise on each of several numbers, independent of each other.

    `family` is laplace or gaussian, `scale` its parameter in the units of the numbers; `whole`
    where the noise is a whole number. `level` is the chance that an interval holds.
    """

    family: str
    scale: float
    whole: bool = False
    level: float = LEVEL

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise on one number."""
        if self.family == "gaussian":
            return self.scale
        if not self.whole:
            return math.sqrt(2) * self.scale
        return 1 / (math.sqrt(2) * math.sinh(min(0.5 / self.scale, 700.0)))

    def error(self, coefficients: Coefficients) -> float:
        """The standard error of a combination of the numbers."""
        return self.deviation * float(np.linalg.norm(np.asarray(coefficients, np.float64)))

    def reach(self, coefficients: Coefficients) -> float:
        """What the error of a combination stays within, in `level` of all releases.

        Exact for Gaussian noise, for one number, and for two with Laplace noise; two numbers with
        whole noise from above (each is at most half a step farther than a Laplace number); more by
        numerical inversion of the characteristic function.
        """
        level, used = self.level, np.abs(np.asarray(coefficients, np.float64))
        used = used[used > 0]
        if not len(used):
            return 0.0
        if self.family == "gaussian":
            from scipy.special import ndtri

            return self.scale * float(np.linalg.norm(used)) * float(ndtri((1 + level) / 2))
        if len(used) == 1:
            return float(used[0]) * self._one(level)
        if len(used) == 2:
            return self._two(used, level) + (float(used.sum()) / 2 if self.whole else 0.0)
        top = float(used.max())
        return (
            top
            * self.scale
            * _sum_reach(tuple(np.round(np.sort(used / top)[::-1], 9).tolist()), level)
        )

    def _one(self, level: float) -> float:
        """The least bound on one draw."""
        if not self.whole:
            return -self.scale * math.log1p(-level)
        ratio = math.exp(-1 / self.scale)  # P(|X| > k) = 2 ratio^(k+1) / (1 + ratio)
        return float(max(0, math.ceil(self.scale * -math.log((1 - level) * (1 + ratio) / 2) - 1)))

    def _two(self, used: Any, level: float) -> float:
        """A sum of two Laplace numbers of scales a > b exceeds t with probability (a^2 e^(-t/a) -
        b^2 e^(-t/b)) / (a^2 - b^2).
        """
        b, a = sorted(float(u) * self.scale for u in used)
        b = min(b, a * (1 - 1e-6))
        low, high = 0.0, 2 * a * -math.log1p(-level) + 2 * a
        for _ in range(50):
            t = (low + high) / 2
            beyond = (a * a * math.exp(-t / a) - b * b * math.exp(-t / b)) / (a * a - b * b)
            low, high = (t, high) if beyond > 1 - level else (low, t)
        return high


@lru_cache(maxsize=4096)
def _sum_reach(scales: tuple[float, ...], level: float) -> float:
    """The same for a sum of Laplace numbers of these scales, of which the first is 1 and the
    largest: Gil-Pelaez inversion.

    P(|X| <= t) is 2/pi times the integral of sin(w t) / w times the product of 1 / (1 + (w s)^2).
    Beyond the 32 largest, scales enter by their variance, as one Gaussian.
    """
    used, rest = np.array(scales[:MANY]), np.array(scales[MANY:])
    deviation = math.sqrt(2 * float((np.array(scales) ** 2).sum()))
    w = (np.arange(math.ceil(500 * deviation)) + 0.5) * (2 * math.pi / (60 * deviation))
    density = (
        np.exp(-np.log1p((w[:, None] * used) ** 2).sum(axis=1) - w * w * float((rest**2).sum())) / w
    )
    low, high = 0.0, 20 * deviation
    for _ in range(50):
        t = (low + high) / 2
        inside = 2 / math.pi * float((np.sin(w * t) * density).sum()) * (w[1] - w[0])
        low, high = (low, t) if inside >= level else (t, high)
    return high


def ratio(
    above: Coefficients,
    below: Coefficients,
    values: Any,
    spread: NoiseLaw,
    within: tuple[float, float],
    known: float = 0.0,
) -> tuple[float, float, tuple[float, float]]:
    """(above . values) / (below . values + known), its standard error and its interval, all inside
    `within`.

    The interval holds every r for which above - r below is within reach of zero (Fieller 1954):
    right whatever the denominator is.
    """
    a, b, z = (
        np.asarray(above, np.float64),
        np.asarray(below, np.float64),
        np.asarray(values, np.float64),
    )
    top, bottom = float(a @ z), float(b @ z) + known
    low, high = within
    middle = (low + high) / 2
    value = min(max(top / bottom, low), high) if bottom > 0 else middle
    error = spread.error(a - value * b) / bottom if bottom > 0 else math.inf
    if bottom <= (spread.reach(b) if b.any() else 0.0):
        return value, min(error, (high - low) / 2), within
    ends = []
    for side in (-1, 1):
        r = value
        for _ in range(
            STEPS
            # r = (above +- reach(above - r below)) / below: a contraction where the denominator is
            # sure
        ):
            last, r = r, min(max((top + side * spread.reach(a - r * b)) / bottom, low), high)
            if abs(r - last) <= 1e-9 * (high - low):
                break
        ends.append(min(max(r + (r - last), low), high))
    return value, min(error, (high - low) / 2), (min(ends[0], value), max(ends[1], value))
