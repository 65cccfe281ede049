"""Rows of linear models that stay in their engine: the sums of `design.Design` as expressions over
the cells of a row, equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.engines.aggregates import KeptRows
from dpfy.engines.expressions import Expression, choose, code, kept, of
from dpfy.estimators.engine_records import EngineRecords, unsupported
from dpfy.estimators.fitting import WholeSteps
from dpfy.estimators.linear.design import BITS, FACTOR, ROW, SAFE, RowLayout, without_rounding

Floats = NDArray[np.float64]
ONE = kept("one")


class EngineDesign:
    """Rows in the unit ball, on their grid; see `Design`.

    Args:
        layout: Where the features of a row are.
        data: The records.
        target: The target of a row as the loss wants it.
        norm: What features are shortened to.
        again: Whether the rows are read more than once.
    """

    persons = None
    weights = None

    def __init__(
        self, layout: RowLayout, data: EngineRecords, target: Expression, norm: float, again: bool
    ) -> None:
        self.layout, self.radius, self.width = layout, layout.radius(norm), layout.width
        self.sizes = layout.sizes
        scaled = [data.scaled(column) for column in data.columns.numbers]
        short = of(1.0)
        if norm < layout.largest:
            norms = norms_of(layout, data).clip(1e-300, float("inf"))
            short = (of(norm) / norms).clip(0.0, 1.0)
        scale = SAFE / self.radius * 2.0**ROW
        one = (short * scale).toward_zero()
        most = 1 << ROW
        rows = [of(1.0)] * layout.constant + [
            value * short if norm < layout.largest else value for value in scaled
        ]
        self._first = len(rows)
        columns = {
            f"r{k}": ((row * scale).toward_zero(), -most, most) for k, row in enumerate(rows)
        }
        columns |= {
            f"c{k}": (code(column.name), 0, size)
            for k, (column, size) in enumerate(
                zip(data.columns.categories, self.sizes, strict=True)
            )
        }
        columns["one"] = (one, 0, most)
        if again:
            wide = (target * 2.0**30).whole()  # of whole steps already
            columns["target"] = (wide, -(1 << 30), 1 << 30)
        factor = (target.clip(-1.0, 1.0) * 2.0**FACTOR).toward_zero()
        columns["factor"] = (factor, -(1 << FACTOR), 1 << FACTOR)
        self._rows: KeptRows = data.keep(columns, once=not again and not self.sizes)

    def gram(self, target: Any = None) -> NDArray[np.int64]:
        """The sum over records of row times row, and beside it of row times target, in whole steps
        of 2^-GRAM; `Design.gram`.
        """
        first, factor = self._first, kept("factor") * (1 << (ROW - FACTOR))
        rows = [kept(f"r{k}") for k in range(first)]
        found = np.zeros((self.width, self.width + 1), np.int64)
        pairs = [(i, j) for i in range(first) for j in range(i, first)]
        values = [rows[i] * rows[j] for i, j in pairs] + [row * factor for row in rows]
        sums = self._rows.sums([(kept("factor") * 0, 1)], values)[0][0]
        for (i, j), value in zip(pairs, sums, strict=False):
            found[i, j] = found[j, i] = value
        found[:first, -1] = sums[len(pairs) :]
        if not self.sizes:
            return found
        starts = first + np.concatenate([[0], np.cumsum(self.sizes)]).astype(int)
        codes = [kept(f"c{k}") for k in range(len(self.sizes))]
        cells = [(place, size + 1) for place, size in zip(codes, self.sizes, strict=True)]
        values = [*(ONE * row for row in rows), ONE * ONE, ONE * factor]
        for k, (table, size) in enumerate(
            zip(self._rows.sums(cells, values), self.sizes, strict=True)
        ):
            block = slice(starts[k], starts[k + 1])
            found[block, :first] = table[:size, :first]
            found[:first, block] = table[:size, :first].T
            found[block, block] = np.diag(table[:size, first])
            found[block, -1] = table[:size, first + 1]
        both = [(a, b) for a in range(len(codes)) for b in range(a)]
        joint = [
            (codes[a] * (self.sizes[b] + 1) + codes[b], (self.sizes[a] + 1) * (self.sizes[b] + 1))
            for a, b in both
        ]
        for (a, b), table in zip(
            both, self._rows.sums(joint, [ONE * ONE]) if both else (), strict=True
        ):
            held = table.reshape(self.sizes[a] + 1, self.sizes[b] + 1)[:-1, :-1]
            found[starts[a] : starts[a + 1], starts[b] : starts[b + 1]] = held
            found[starts[b] : starts[b + 1], starts[a] : starts[a + 1]] = held.T
        return found

    def moments(self, factor: float) -> NDArray[np.int64]:
        """See `Design.moments`."""
        cut = int(np.trunc(factor * 2.0**FACTOR))
        found = self._sums(of(cut))
        count = int(self._rows.sums([(kept("one") * 0, 1)])[0][0, 0])
        mass = int(np.trunc(factor * 2.0 ** (ROW + FACTOR))) * count
        return np.append(found, mass)

    def gradient(
        self,
        weights: Floats,
        factors: Callable[[Any, Any], Any],
        at_most: int | None = None,
    ) -> WholeSteps:
        """See `Design.gradient`."""
        if at_most is not None:
            raise unsupported('solver="gradient" with several records of a person')
        exact = without_rounding(weights)[:, 0]
        score, at = of(0.0), self._first
        for k in range(self._first):
            score = score + kept(f"r{k}") * float(exact[k] * 2.0**-ROW)
        for k, size in enumerate(self.sizes):
            block = [*(exact[at : at + size] * 2.0**-ROW).tolist(), 0.0]
            score = score + ONE * kept(f"c{k}").lookup(tuple(block))
            at += size
        found = factors(score, None)
        return WholeSteps(self._sums((found * 2.0**FACTOR).toward_zero())[:, None], BITS)

    def _sums(self, factor: Expression) -> NDArray[np.int64]:
        """The sum of rows times a whole factor."""
        rows = [kept(f"r{k}") * factor for k in range(self._first)]
        parts = [self._rows.sums([(kept("one") * 0, 1)], rows)[0][0]] if rows else []
        cells = [(kept(f"c{k}"), size + 1) for k, size in enumerate(self.sizes)]
        if cells:
            found = self._rows.sums(cells, [ONE * factor])
            parts += [t[:size, 0] for t, size in zip(found, self.sizes, strict=True)]
        return np.concatenate(parts)


def norms_of(layout: RowLayout, data: EngineRecords) -> Expression:
    """The norm of the features of a row; `RowLayout.norms`."""
    scaled = [data.scaled(column) for column in data.columns.numbers]
    squares = reduce(lambda one, other: one + other * other, scaled, of(0.0))
    for column, size in zip(data.columns.categories, layout.sizes, strict=True):
        squares = squares + choose(code(column.name) < size, 1.0, 0.0)
    return squares.root()


def norm_counts(layout: RowLayout, data: EngineRecords, edges: Floats) -> NDArray[np.int64]:
    """How many records have a norm in each cell between edges that fall: `solver.norm_counts`."""
    above = norms_of(layout, data).place(tuple(edges[::-1].tolist()))
    place = _between(of(len(edges) - 1) - above, len(edges) - 1)
    rows = data.keep({"norm": (place, 0, len(edges) - 1)}, once=True)
    return rows.sums([(kept("norm"), len(edges))])[0][:, 0]


def _between(number: Expression, most: int) -> Expression:
    return choose(number < 0, 0, choose(number > most, most, number))
