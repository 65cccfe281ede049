"""The functions of an additive model, to look at: a table for each column, or one picture of all of
them with their bands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dpfy.core.errors import InvalidInput
from dpfy.estimators.explanation import Explanation
from dpfy.estimators.target import ClassTarget, Target
from dpfy.tables.columns import Category, Column, Number

Floats = NDArray[np.float64]

WIDE, HIGH, GAP, ACROSS = 300, 150, 34, 3
"""A picture of one function, the space between two, and how many stand side by side."""
BAND = 2.0
"""Standard deviations on either side of a function."""


@dataclass(frozen=True)
class ShapeFunction:
    """What a column adds to the scores: `values` and `deviation` [groups, scores], `counts`
    [groups]; `of_cell` is the group of each cell.
    """

    column: Column
    of_cell: NDArray[np.int32]
    values: Floats
    deviation: Floats
    counts: Floats

    @property
    def importance(self) -> float:
        """The mean size of what the column adds."""
        return float(np.average(np.abs(self.values).mean(axis=1), weights=self.counts))

    def parts(self) -> list[str]:
        """The name of each group: a range of numbers, a word, or what stands for all else."""
        if isinstance(self.column, Category):
            return [*self.column.categories, "other or missing"]
        edges = self.edges()
        return [f"{low:.5g} to {high:.5g}" for low, high in pairwise(edges)] + ["missing"]

    def edges(self) -> Floats:
        """Where the groups of a number begin and end, in its own units."""
        assert isinstance(self.column, Number)
        cells = len(self.of_cell) - 1
        first = np.append(np.flatnonzero(np.diff(self.of_cell[:-1], prepend=-1)), cells) / cells
        low, high = (self.column.transformed(end) for end in self.column.range)
        shares = low + first * (high - low)
        return np.asarray(np.expm1(shares) if self.column.transform == "log1p" else shares)


@dataclass(frozen=True)
class ShapeFunctions:
    """The functions of all columns. `shapes["age"]` is the table of one; as text the columns stand
    by their importance.
    """

    shapes: tuple[ShapeFunction, ...]
    scores: tuple[str, ...]

    def __getitem__(self, name: str) -> Explanation:
        """The function of a column: what each group adds to the score, and the half width of its
        band.
        """
        for shape in self.shapes:
            if shape.column.name == name:
                return _table(shape, self.scores)
        raise InvalidInput(
            "column", name, f"must be one of {', '.join(s.column.name for s in self.shapes)[:200]}"
        )

    def __str__(self) -> str:
        rows = tuple(
            (s.column.name, s.importance) for s in sorted(self.shapes, key=lambda s: -s.importance)
        )
        note = (
            f"mean size of what a column adds to the score of {', '.join(self.scores)[:100]}; "
            f"explain()[column] shows its function"
        )
        return str(Explanation(("column", "mean effect"), rows, note))

    def svg(self) -> str:
        """A picture of all functions, the most important first, with bands of two standard
        deviations.
        """
        held = sorted(self.shapes, key=lambda s: -s.importance)
        top = max(max(float(np.abs(s.values).max()) for s in held), 1e-9)
        high = math.ceil(len(held) / ACROSS) * (HIGH + GAP)
        drawn = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{ACROSS * (WIDE + GAP)}" '
            f'height="{high + 20}" font-size="11">'
        ]
        for k, shape in enumerate(held):
            x, y = (k % ACROSS) * (WIDE + GAP) + GAP // 2, (k // ACROSS) * (HIGH + GAP) + GAP // 2
            drawn.append(f'<g transform="translate({x},{y})">{_drawn(shape, top)}</g>')
        said = f"what each column adds to the score of {', '.join(self.scores)[:100]}"
        note = f"{said}, from {-top:.3g} to {top:.3g}, with bands of {BAND:g} deviations"
        return "".join(drawn) + f'<text x="4" y="{high + 14}">{escape(note)}</text></svg>'

    def _repr_html_(self) -> str:
        return self.svg()


def score_names(aim: Target | None) -> tuple[str, ...]:
    """The names of the scores of a target."""
    if isinstance(aim, ClassTarget):
        return tuple(
            str(label) for label in (aim.labels[1:] if len(aim.labels) == 2 else aim.labels)
        )
    return ("the target",)


def _table(shape: ShapeFunction, scores: Sequence[str]) -> Explanation:
    rows = []
    for part, value, spread in zip(shape.parts(), shape.values, shape.deviation, strict=True):
        rows += [
            (part if len(scores) == 1 else f"{part}, {name}", float(v), BAND * float(s))
            for name, v, s in zip(scores, value, spread, strict=True)
        ]
    note = f"'+-' is {BAND:g} standard deviations of what noise and chance leave open"
    return Explanation((shape.column.name, "adds", "+-"), tuple(rows), note)


def _drawn(shape: ShapeFunction, top: float) -> str:
    """One function: a line and its band over the groups, each as wide as its share of the cells."""
    sizes = np.bincount(shape.of_cell, minlength=len(shape.values))
    ends = np.concatenate([[0], np.cumsum(sizes)]) / sizes.sum() * WIDE
    parts = [f'<line x1="0" y1="{HIGH / 2}" x2="{WIDE}" y2="{HIGH / 2}" stroke="#bbbbbb"/>']
    for k, colour in zip(
        range(shape.values.shape[1]),
        ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377") * 99,
        strict=False,
    ):
        value, spread = shape.values[:, k], BAND * shape.deviation[:, k]
        band = [*_steps(ends, value + spread, top), *reversed(_steps(ends, value - spread, top))]
        parts.append(f'<polygon points="{" ".join(band)}" fill="{colour}" opacity="0.2"/>')
        parts.append(
            f'<polyline points="{" ".join(_steps(ends, value, top))}" fill="none" '
            f'stroke="{colour}"/>'
        )
    parts.append(f'<text x="2" y="-3">{escape(shape.column.name[:40])}</text>')
    return "".join(parts)


def _steps(ends: Floats, values: Floats, top: float) -> list[str]:
    """The corners of a step function; what leaves the picture is drawn at its edge."""
    heights = HIGH / 2 * (1 - np.clip(values / top, -1, 1))
    return [
        f"{x:.1f},{y:.1f}"
        for low, high, y in zip(ends, ends[1:], heights, strict=False)
        for x in (low, high)
    ]
