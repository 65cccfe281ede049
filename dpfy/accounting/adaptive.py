"""Releases that are chosen one after the other, each from a family, with sight of all before: the
most that they tell together.

With H_0(g) = (1 - g)+ the most that j releases can reach, delta at epsilon log g, is

    H_j(g) = max over the family of  sum over outcomes of  P(o) H_{j-1}(g Q(o) / P(o)).

It is computed on a grid of log g, from above: the loss of every outcome is split between the two
grid points around it so that its masses under P and Q stay, which dominates. On the grid a release
is a row of masses, and a step a product of matrices. The family must be the same in both
directions, so that H(1/g) = 1 - 1/g + H(g) / g, and one half is enough.

A family of very many releases is first made smaller: the profile of a release, its delta at every
epsilon, says all about it, and the largest of several profiles is the profile of a release that
dominates them all. Neighbours on a lattice are put together as long as their common profile has
less area than the largest single one: area is what many small releases add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpfy.accounting.moments import Array
from dpfy.accounting.profiles import Points

FINE = 4
"""Grid points in the loss of the release that tells most."""
FAR = 16
"""The largest loss on the grid, in losses of that release; a larger one counts as infinite."""
END = 14.0
"""Where a curve ends, in standard deviations of the loss: what is left there is below 1e-40."""
ROUNDED = 1e-13
"""By this part every value is raised at every step."""
RAISED = 1e-10
"""By this part common profiles are raised: more than the rounding of their masses."""
TILTS = np.array([0.0, 0.15, 0.3, 0.6, 1.2])
"""How areas are weighted: the tail of what many releases tell falls by so much in the loss of
one.
"""
SLACK = 2e-3
"""How much larger the area of a common profile may be than the largest single one."""


@dataclass(frozen=True, eq=False)
class Family:
    """Releases on a grid of losses: row by row the P-masses at losses -reach .. reach, in units of
    `spacing`, and at infinity.
    """

    spacing: float
    masses: Array

    @property
    def reach(self) -> int:
        """The largest loss, in grid points."""
        return int(self.masses.shape[1] - 2) // 2

    def joined(self, *others: Family) -> Family:
        """This family and others on the same grid."""
        return Family(
            self.spacing, np.concatenate([self.masses, *(other.masses for other in others)])
        )


def on_grid(absent: Array, gain: Array, spacing: float, slack: float = 0.0) -> Family:
    """Releases on a grid, a row of outcomes each: their chances under Q, and what they have more
    under P.

    Every loss is raised by `slack` and split between the points around it.
    """
    present = np.maximum(absent + gain, 0.0)
    reach, rows = FAR * FINE, len(present)
    width = 2 * reach + 2
    with np.errstate(divide="ignore", invalid="ignore"):
        places = (np.log1p(gain / absent) + slack) / spacing
    places = np.where(present <= 0, -np.inf, np.where(absent <= 0, np.inf, places))
    low = np.clip(np.floor(np.clip(places, -reach, reach)), -reach, reach - 1)
    above = np.clip(
        np.expm1(-spacing * np.clip(places - low, 0.0, 1.0)) / math.expm1(-spacing), 0.0, 1.0
    )
    slot = (
        np.where(places <= reach, low.astype(np.int64) + reach, width - 1)
        + width * np.arange(rows)[:, None]
    )
    upper = np.where(places <= reach, slot + 1, slot)
    flat = np.concatenate([slot.ravel(), upper.ravel()])
    weights = np.concatenate([(present * (1 - above)).ravel(), (present * above).ravel()])
    masses = np.bincount(flat, weights=weights, minlength=rows * width).reshape(rows, width)
    return Family(spacing, masses)


def profiles(family: Family) -> tuple[Array, Array]:
    """delta of every release at the epsilons 0 .. reach of its grid, and the same in the other
    direction.
    """
    epsilons = family.spacing * np.arange(family.reach + 1)
    losses = family.spacing * np.arange(-family.reach, family.reach + 1)
    ahead = -np.expm1(np.minimum(epsilons[None, :] - losses[:, None], 0.0))
    back = (
        -np.expm1(np.minimum(epsilons[None, :] + losses[:, None], 0.0)) * np.exp(-losses)[:, None]
    )
    masses = family.masses[:, :-1]
    return np.asarray(masses @ ahead + family.masses[:, -1:]), np.asarray(masses @ back)


def covered(family: Family, shape: tuple[int, int], area: Array) -> Family:
    """A smaller family that dominates one whose rows lie on a lattice of this shape; no common
    profile has larger areas than `area`.
    """
    ahead, back = (curve.reshape(*shape, -1) for curve in profiles(family))
    found: list[tuple[Array, Array]] = []

    def divide(rows: slice, columns: slice) -> None:
        common = ahead[rows, columns].max(axis=(0, 1)), back[rows, columns].max(axis=(0, 1))
        height, width = rows.stop - rows.start, columns.stop - columns.start
        if height * width == 1 or (_areas(*common) <= area).all():
            found.append(common)
        elif height >= width:
            middle = rows.start + height // 2
            divide(slice(rows.start, middle), columns)
            divide(slice(middle, rows.stop), columns)
        else:
            middle = columns.start + width // 2
            divide(rows, slice(columns.start, middle))
            divide(rows, slice(middle, columns.stop))

    divide(slice(0, shape[0]), slice(0, shape[1]))
    joined = _joined(np.array([np.concatenate(pair) for pair in found]), area) * (1 + RAISED)
    half = joined.shape[1] // 2
    return Family(family.spacing, _masses(joined[:, :half], joined[:, half:], family.spacing))


def _joined(curves: Array, area: Array) -> Array:
    """Profiles (both directions side by side), each put together with the first before it that it
    fits.
    """
    half = curves.shape[1] // 2
    kept = np.empty((0, 2 * half))
    for curve in curves[np.argsort(-_areas(curves[:, :half], curves[:, half:])[:, 0])]:
        common = np.maximum(kept, curve)
        fits = np.flatnonzero((_areas(common[:, :half], common[:, half:]) <= area).all(axis=1))
        if len(fits):
            kept[fits[0]] = common[fits[0]]
        else:
            kept = np.concatenate([kept, curve[None]])
    return kept


def areas(family: Family) -> Array:
    """The areas under the profile of every release, a column for each of TILTS."""
    return np.asarray(_areas(*profiles(family)))


def _areas(ahead: Array, back: Array) -> Array:
    away = np.arange(ahead.shape[-1])[:, None] / FINE
    return np.asarray(ahead @ np.exp(away * TILTS) + back @ np.exp(-away * TILTS))


def _masses(ahead: Array, back: Array, spacing: float) -> Array:
    """The P-masses of releases with these profiles: e^epsilon times the change of slope in
    e^epsilon.

    Left of 0 in terms of the other direction, where nothing cancels (as in
    `dpfy.accounting.profiles`).
    """
    up, down = math.expm1(spacing), -math.expm1(-spacing)
    before = down + math.exp(-spacing) * back[:, 1:2]  # the profile one point left of 0
    value = np.concatenate([before, ahead], axis=1)
    right = (value[:, 2:] - value[:, 1:-1]) / up - (value[:, 1:-1] - value[:, :-2]) / down
    last = (value[:, -2:-1] - value[:, -1:]) / down
    mirrored = back[:, ::-1]  # at epsilons -reach .. 0
    places = np.exp(-spacing * np.arange(back.shape[1] - 1, 0, -1))
    rise = (mirrored[:, 1:] - mirrored[:, :-1]) / down
    fall = np.concatenate(
        [np.zeros((len(back), 1)), (mirrored[:, 1:-1] - mirrored[:, :-2]) / up], axis=1
    )
    return np.concatenate(
        [np.maximum(places * (rise - fall), 0.0), np.maximum(right, 0.0), last, ahead[:, -1:]],
        axis=1,
    )


def reached(family: Family, steps: int, charge: float = 0.0) -> list[Points]:
    """H of 1, 2, ... releases from the family, rounded up; `charge` is a chance, at every step, to
    tell all.
    """
    reach, h = family.reach, family.spacing
    kernel = np.ascontiguousarray(family.masses[:, -2::-1].T)
    epsilons = h * np.arange(math.ceil(END * FINE * math.sqrt(steps)) + reach + 1)
    known, down, found = np.zeros(len(epsilons)), np.arange(reach, 0, -1), []
    for _ in range(steps):
        right = np.concatenate([known, np.full(reach, known[-1])])
        left = -np.expm1(-h * down) + np.exp(-h * down) * right[down]  # both directions are alike
        windows = np.lib.stride_tricks.sliding_window_view(
            np.concatenate([left, right]), 2 * reach + 1
        )
        best = (windows @ kernel + family.masses[:, -1]).max(axis=1)
        known = np.minimum(1.0, np.maximum(best, known) * (1 + ROUNDED) + charge)
        found.append(Points(epsilons, known))
    return found
