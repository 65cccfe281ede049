"""Records as rows of numbers in the unit ball, on a grid: what the sums of linear models are made
of.

A row is (1, numbers on their scales, one-hot categories). Its features are shortened to a public
norm, or to one that was bought, and the whole row is divided by the largest norm that is left and
cut to 16 fractional bits, towards zero, which lengthens no row. A factor is cut to 14 bits. Sums of
products then have 30, and blocks of 2^22 records are added up without rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from dpfy.engines.aggregates import MOST
from dpfy.engines.expressions import Expression
from dpfy.estimators.columns import FeatureColumns
from dpfy.estimators.fitting import EXACT, in_steps
from dpfy.estimators.persons import PersonRows
from dpfy.estimators.records import EncodedRecords, parts

ROW, FACTOR = 16, 14
"""Fractional bits of a row and of a factor."""
BITS, GRAM = ROW + FACTOR, 2 * ROW
BLOCK, GRAM_BLOCK = 1 << 22, 1 << 20
"""Records whose products are added up without rounding: 2^22 products of 2^30 steps, 2^20 of
2^32.
"""
SAFE = 1 - 2.0**-30
"""Below one by far more than the rounding of a norm."""
PART = 1 << 13
"""Records of a part, about."""
DENSE = 3
"""A layout with more than so many coordinates for each that is not zero is kept sparse."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RowLayout:
    """Where the features of a row are: public. The first coordinate is a one where there is a
    `constant`.
    """

    columns: FeatureColumns
    constant: bool = True

    @property
    def numbers(self) -> int:
        """How many coordinates are numbers; all but categories, also those whose range is not known
        yet.
        """
        return len(self.columns.columns) - len(self.columns.categories)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many coordinates each category has: one for each word, and none for others."""
        return tuple(len(c.categories) for c in self.columns.categories)

    @property
    def width(self) -> int:
        """Coordinates of a row."""
        return self.constant + self.numbers + sum(self.sizes)

    @property
    def sparse(self) -> bool:
        """Whether most coordinates of a row are zero."""
        return self.width > DENSE * (self.constant + self.numbers + len(self.sizes))

    @property
    def largest(self) -> float:
        """The largest norm of the features of a row."""
        return math.sqrt(self.numbers + len(self.sizes))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the features, in the order of a row and without the constant."""
        numbers = [c.name for c in self.columns.columns if c not in self.columns.categories]
        return (
            *numbers,
            *(f"{c.name}={word}" for c in self.columns.categories for word in c.categories),
        )

    def radius(self, norm: float) -> float:
        """The largest norm of a row whose features have been shortened to `norm`."""
        return math.sqrt(self.constant + norm * norm)

    def norms(self, data: EncodedRecords) -> Floats:
        """The norm of the features of each record."""
        squares = np.empty(data.size)
        for part in parts(data.size):
            scaled: Floats = data.scaled(part)
            found = np.zeros(len(scaled))
            for k in range(scaled.shape[1]):  # one after the other, as every engine adds them
                found = found + scaled[:, k] * scaled[:, k]
            squares[part] = found
        for k, size in enumerate(self.sizes):
            squares += data.codes[:, k] < size
        return np.sqrt(squares)

    def rows(self, data: EncodedRecords, norm: float, norms: Floats | None = None) -> Any:
        """Rows with features of at most `norm`, the constant as it is: a dense matrix, or a sparse
        one where most of it is zero.
        """
        short = None
        if norm < self.largest:
            short = np.minimum(
                1.0, norm / np.maximum(self.norms(data) if norms is None else norms, 1e-300)
            )
        if self.sparse:
            return self._sparse(data, short)
        full = (np.zeros if self.sizes else np.empty)((data.size, self.width))
        self._numbers(data, short, full)
        at, ones = self.constant + self.numbers, np.arange(data.size)
        for k, size in enumerate(self.sizes):
            inside = data.codes[:, k] < size
            full[ones[inside], at + data.codes[inside, k]] = 1.0 if short is None else short[inside]
            at += size
        return full

    def _numbers(self, data: EncodedRecords, short: Floats | None, out: Floats) -> None:
        """The constant and the numbers, in the first columns of `out`."""
        out[:, : self.constant] = 1.0
        for part in parts(data.size):
            values, place = (
                data.scaled(part),
                out[part, self.constant : self.constant + self.numbers],
            )
            if short is None:
                place[:] = values
            else:
                np.multiply(values, short[part, None], out=place)

    def _sparse(self, data: EncodedRecords, short: Floats | None) -> Any:
        first, many = self.constant + self.numbers, len(self.sizes)
        starts = first + np.concatenate([[0], np.cumsum(self.sizes)[:-1]]).astype(np.int64)
        inside = data.codes < np.array(self.sizes)
        held, at = (
            np.empty((data.size, first + many)),
            np.empty((data.size, first + many), np.int32),
        )
        self._numbers(data, short, held)
        held[:, first:] = np.where(inside, 1.0 if short is None else short[:, None], 0.0)
        at[:, :first] = np.arange(first)
        at[:, first:] = np.where(inside, data.codes + starts, 0)
        ends = np.arange(data.size + 1, dtype=np.int64) * (first + many)
        return scipy.sparse.csr_matrix(
            (held.ravel(), at.ravel(), ends), shape=(data.size, self.width)
        )


class Design:
    """Private rows in the unit ball, on the grid of 2^-16: divided by `radius`, the largest norm
    that they could have.

    Dense rows are kept in single precision, which holds them exactly, or made again whenever they
    are read (`keep`: False).

    Guarantees: every row has at most norm 1. Sums (`total`, `gradient`, `gram`) are exact, whatever
    the order in which they are made.
    """

    persons: PersonRows | None = None
    """Whose the rows are, where persons are protected."""
    weights: Floats | None = None
    """From 0 to 1: what factors are multiplied by, where records have weights."""

    def __init__(
        self,
        layout: RowLayout,
        data: EncodedRecords,
        norm: float,
        norms: Floats | None = None,
        keep: bool = True,
    ) -> None:
        self.radius, self.size, self.width = layout.radius(norm), data.size, layout.width
        self.weights = data.weights
        if data.owners is not None:
            self.persons = PersonRows.of(data.owners)
        self._whole: Any = None

        def made(place: slice) -> Any:
            known = None if norms is None else norms[place]
            return on_grid(layout.rows(data.part(place), norm, known), self.radius)

        self._made: Callable[[slice], Any] = made
        if layout.sparse:
            self._keep(made(slice(0, data.size)))
        elif keep:
            rows = np.empty((data.size, layout.width), np.float32)
            for place in parts(data.size):
                rows[place] = made(place)
            self._keep(rows)

    @classmethod
    def of(cls, rows: Any, radius: float = 1.0) -> Design:
        """Of rows with at most this norm."""
        design = object.__new__(cls)
        design.radius, (design.size, design.width) = radius, rows.shape
        design._keep(on_grid(rows.astype(np.float64), radius))
        return design

    def _keep(self, rows: Any) -> None:
        sparse = scipy.sparse.issparse(rows)
        self._made = lambda place: rows[place] if sparse else rows[place].astype(np.float64)
        self._whole = rows if sparse else None

    def part(self, place: slice) -> Any:
        """Some of the rows, in double precision: an array, or a sparse matrix."""
        return self._made(place)

    def squares(self) -> Floats:
        """The squared norm of each row: a sum without rounding, of at most one in steps of
        2^-32.
        """
        found = np.empty(self.size)
        for place in parts(self.size):
            rows = self.part(place)
            found[place] = np.asarray(
                (rows.multiply(rows) if scipy.sparse.issparse(rows) else rows * rows).sum(axis=1)
            ).ravel()
        return found

    def scores(self, weights: Floats) -> Floats:
        """Each row times the weights [width, outputs]."""
        if self._whole is not None:
            return np.asarray(self._whole @ weights)
        return np.concatenate(
            [np.asarray(self.part(place) @ weights) for place in parts(self.size)]
        )

    def total(self, factors: Floats) -> Floats:
        """The sum over records of row times factors [records, outputs], cut to their grid: [width,
        outputs], exact with `BITS` bits.

        Guarantees: where the factors of a record have at most norm 1, what it adds has at most norm
        1.
        """

        def product(rows: Any, part: slice) -> Floats:
            return np.asarray(rows.T @ self._factors(factors[part], part))

        return self._sum(product, BITS, BLOCK)

    def moments(self, factor: float) -> NDArray[np.int64]:
        """`total` of this factor for every record, and `mass` of it, in whole steps of
        2^-BITS.
        """
        sums = self.total(np.full((self.size, 1), factor))[:, 0]
        return in_steps(np.append(sums, self.mass(factor)), BITS)

    def mass(self, factor: float) -> float:
        """What `total` of this factor for every record adds to a coordinate that is one."""
        if self.weights is None:
            return float(np.trunc(factor * 2.0**BITS) * 2.0**-BITS * self.size)
        return float(_cut(factor * self.weights).sum())

    def _factors(self, factors: Floats, part: slice) -> Floats:
        """Factors of a part of the records on their grid, times their weights."""
        return _cut(factors if self.weights is None else factors * self.weights[part, None])

    def gradient(
        self,
        weights: Floats,
        factors: Callable[[Floats, slice], Floats],
        at_most: int | None = None,
    ) -> Floats:
        """The same for factors that follow from the scores of a part of the records: every row is
        read once.

        Args:
            weights: The weights [width, outputs] whose scores the factors follow from.
            factors: From scores, and the place of their records, to factors.
            at_most: The most records of a person, to whose root the norm of what they add together
                is shortened; None adds up records as they are.

        Guarantees: with `at_most`, what a person adds has at most the norm sqrt(at_most), and
        follows from that person's records and the weights alone.
        """
        exact = without_rounding(weights)

        def product(rows: Any, part: slice) -> Floats:
            found = self._factors(factors(np.asarray(rows @ exact), part), part)
            if at_most is not None and self.persons is not None:
                found = shortened(rows, found, self.persons.within(part), at_most)
            return np.asarray(rows.T @ found)

        return self._sum(product, BITS, BLOCK, whole_persons=at_most is not None)

    def gram(self, factors: Floats | None = None) -> NDArray[np.int64]:
        """The sum over records of row times row, in whole steps of 2^-GRAM, and beside it, from the
        same reading, `total(factors)`. Factors are moved into [-1, 1].

        Guarantees: a record adds a matrix of at most Frobenius norm 1.
        """

        def product(rows: Any, part: slice) -> Floats:
            roots = None if self.weights is None else np.sqrt(self.weights[part, None])
            if roots is not None:  # x x' times a weight is that of x times its root
                rows = _shorter(rows, roots)
            found = rows.T @ rows
            squares = np.asarray(found.toarray() if scipy.sparse.issparse(found) else found)
            if factors is None:
                return squares
            beside = _cut(np.clip(factors[part], -1.0, 1.0) * (1.0 if roots is None else roots))
            return np.concatenate([squares, np.asarray(rows.T @ beside)], axis=1)

        return self._whole_sum(product, GRAM, GRAM_BLOCK)

    def _sum(
        self,
        product: Callable[[Any, slice], Floats],
        bits: int,
        most: int,
        whole_persons: bool = False,
    ) -> Floats:
        """A sum of products over parts of the records, of which none divides a person where that
        is asked for. What `most` records add up to is exact; beyond, whole numbers are added.
        """
        whole = self._whole_sum(product, bits, most, whole_persons)
        return np.ldexp(np.clip(whole, -(1 << EXACT), 1 << EXACT).astype(np.float64), -bits)

    def _whole_sum(
        self,
        product: Callable[[Any, slice], Floats],
        bits: int,
        most: int,
        whole_persons: bool = False,
    ) -> NDArray[np.int64]:
        """The same in whole steps of 2^-bits."""
        if self._whole is not None and self.size <= most:
            return in_steps(product(self._whole, slice(0, self.size)), bits)
        whole: Any = 0
        for block in self._parts(most, whole_persons):
            total: Any = 0.0
            for place in block:
                total = total + product(self.part(place), place)
            whole = whole + in_steps(np.asarray(total), bits)
        return np.clip(whole, -MOST, MOST)

    def _parts(self, most: int, whole_persons: bool) -> list[list[slice]]:
        """Parts of the records, in blocks of which each has at most `most` of them."""
        if self.persons is None or not whole_persons:
            return [
                [slice(b.start + p.start, b.start + p.stop) for p in parts(b.stop - b.start)]
                for b in parts(self.size, most)
            ]
        found: list[list[slice]] = [[]]
        for place in self.persons.parts(PART):
            if found[-1] and place.stop - found[-1][0].start > most:
                found.append([])
            found[-1].append(place)
        return found


def shortened(rows: Any, factors: Floats, starts: NDArray[np.int64], at_most: int) -> Floats:
    """Factors so much smaller that what the records of each person add together has at most the
    norm sqrt(at_most).

    Args:
        rows: Rows in the unit ball, on their grid.
        factors: Their factors [records, outputs], of norm 1 at most, on their grid.
        starts: Where the records of each person begin.
        at_most: The most records of a person: public.

    Guarantees: what a person adds has at most the norm sqrt(at_most). The factors of a person
    follow from that person's records and public numbers alone: totals are sums without rounding,
    and so are the squares of totals in whole steps; what rounding to steps may hide is added to the
    norm.
    """
    if not len(starts):
        return factors
    ends = np.append(starts, len(factors))
    counts, bits = np.diff(ends), EXACT // 2 - 1 - at_most.bit_length()
    squares = np.zeros(len(starts))
    sparse = scipy.sparse.issparse(rows)
    members = scipy.sparse.csr_matrix((np.ones(ends[-1]), np.arange(ends[-1]), ends))
    for k in range(factors.shape[1]):
        if sparse:
            each = np.repeat(factors[:, k], np.diff(rows.indptr))
            own = scipy.sparse.csr_matrix((rows.data * each, rows.indices, rows.indptr), rows.shape)
            totals = members @ own
            totals.data = np.rint(totals.data * 2.0**bits) ** 2
            squares += np.asarray(totals.sum(axis=1)).ravel()
        else:
            totals = np.add.reduceat(rows * factors[:, [k]], starts, axis=0)
            squares += (np.rint(totals * 2.0**bits) ** 2).sum(axis=1)
    hidden = math.sqrt(rows.shape[1] * factors.shape[1]) * 2.0 ** -(bits + 1)
    norms = (np.sqrt(squares) * 2.0**-bits + hidden) * (1 + 2.0**-40)
    cut = counts * (math.sqrt(factors.shape[1]) * 2.0**-FACTOR)  # by what is cut from factors
    short = np.minimum(1.0, np.maximum(math.sqrt(at_most) * SAFE - cut, 0.0) / norms)
    each = np.repeat(short, counts)[:, None]
    return np.where(each < 1, _cut(factors * each), factors)


def on_grid(rows: Any, radius: float) -> Any:
    """Rows of at most norm `radius`, in the unit ball and on its grid: cut towards zero, in
    place.
    """
    held = rows.data if scipy.sparse.issparse(rows) else rows
    held *= SAFE / radius * 2.0**ROW
    np.trunc(held, out=held)
    held *= 2.0**-ROW
    return rows


def _shorter(rows: Any, factors: Floats) -> Any:
    """Rows on their grid times factors from 0 to 1, cut to the grid again: a copy."""
    if scipy.sparse.issparse(rows):
        return on_grid(rows.multiply(factors).tocsr(), SAFE)
    return on_grid(rows * factors, SAFE)


def without_rounding(weights: Floats) -> Floats:
    """Weights on a grid on which scores of rows are sums without rounding: a row in the unit ball
    has them in steps of 2^-16, and no sum of some of their products is longer than the weights.

    Guarantees: the score of a record does not depend on where it stands among others.
    """
    longest = float(np.sqrt((weights * weights).sum(axis=0)).max(initial=0.0))
    bits = EXACT - 1 - ROW - max(0, math.frexp(longest)[1])
    return np.asarray(np.ldexp(np.rint(np.ldexp(weights, bits)), -bits))


def _cut(factors: Floats) -> Floats:
    """Factors on their grid, towards zero."""
    cut = factors * 2.0**FACTOR
    np.trunc(cut, out=cut)
    cut *= 2.0**-FACTOR
    return cut


def unit_rows(factors: Any) -> Any:
    """Factors of each record, shortened to norm 1; those of an engine are one expression."""
    if isinstance(factors, Expression):
        return factors.clip(-SAFE, SAFE)
    if factors.shape[1] == 1:
        return np.clip(factors, -SAFE, SAFE)
    norms = np.sqrt(np.einsum("ij,ij->i", factors, factors))
    return np.asarray(factors * np.minimum(1.0, SAFE / np.maximum(norms, 1e-300))[:, None])
