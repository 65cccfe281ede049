"""Ranges that nobody given, bought with a share of the budget: two noisy histograms, and their
quantiles.

The first histogram has public cells of sign and power of two, from 2^-20 to 2^40; the second one
128 equal cells between the ends that the first one shows. A record adds a one for each open column
to each, so that its norm is the root of their number. The ends are where the noisy counts, added up
from outside, pass half a percent of the records and what noise alone would reach.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dpfy.core.values import Bound
from dpfy.estimators.budget import FitTerms, ReleaseNeed
from dpfy.estimators.columns import in_range
from dpfy.estimators.fitting import FitSession, Floats
from dpfy.tables.columns import Number

SHARE = 0.1
"""Of the budget, where a column or the target has no public range: half for each histogram."""
POWERS, RANGES = "powers of two", "ranges"
LEAST, MOST = -20, 40
CELLS = 2 * (MOST - LEAST) + 1
FINE = 128
OUTSIDE = 0.005
UNSEEN = (-LEAST + 2) * -1 + MOST - LEAST + 1, MOST - LEAST - LEAST
"""The cells from -1 to 1, for a column that noise hides."""


def needs(columns: int, terms: FitTerms, rest: float) -> list[ReleaseNeed]:
    """What buys the ranges of so many columns; `rest` is the sum of the shares of all else, without
    which all of the budget buys them.
    """
    if not columns:
        return []
    bound = one_of_each(columns, terms)
    share = rest * SHARE / (1 - SHARE) / 2 if rest else 0.5
    return [ReleaseNeed(POWERS, bound, share=share), ReleaseNeed(RANGES, bound, share=share)]


def one_of_each(columns: int, terms: FitTerms) -> Bound:
    """What a record adds that adds a one in each of so many histograms: replacing it moves two ones
    in each, half of which counts.
    """
    l2 = math.sqrt(columns / 2 if terms.replaced else columns) * (1 + 2.0**-50)
    return Bound(l2=l2, l1=float(columns), linf=1.0)


def bought(values: Floats, names: Sequence[str], fit: FitSession) -> list[Number]:
    """A range for each column of `values`.

    Guarantees: depends on the records through the two releases alone.
    """
    missing = np.isnan(values)
    coarse = fit.release(
        POWERS, histograms(np.where(missing, -1, _powers(np.where(missing, 0.0, values))), CELLS)
    )
    found = [_ends(counts, fit.round(POWERS).scale, UNSEEN) for counts in coarse]
    outer = np.array([(_edge(low), _edge(high + 1)) for low, high in found], np.float64).reshape(
        -1, 2
    )
    width = (outer[:, 1] - outer[:, 0]) / FINE
    places = np.clip(
        np.floor((np.where(missing, 0.0, values) - outer[:, 0]) / width), 0, FINE - 1
    ).astype(np.int64)
    fine = fit.release(RANGES, histograms(np.where(missing, -1, places), FINE))
    ends = [_ends(counts, fit.round(RANGES).scale, (0, FINE - 1)) for counts in fine]
    pairs = [
        (o[0] + low * w, o[0] + (high + 1) * w)
        for (low, high), o, w in zip(ends, outer, width, strict=True)
    ]
    fit.tell(
        bought_ranges={
            n: [float(low), float(high)] for n, (low, high) in zip(names, pairs, strict=True)
        }
    )
    return [
        in_range(n, float(low), float(high)) for n, (low, high) in zip(names, pairs, strict=True)
    ]


def histograms(places: NDArray[np.int64], cells: int) -> NDArray[np.int64]:
    """A histogram of each column of places below `cells`; a place of -1, that of a missing value,
    is counted nowhere.
    """
    shift = places + 1 + np.arange(places.shape[1]) * (cells + 1)
    return np.bincount(shift.ravel(), minlength=(cells + 1) * places.shape[1]).reshape(
        places.shape[1], cells + 1
    )[:, 1:]


def _powers(values: Floats) -> NDArray[np.int64]:
    """The cell of each number by sign and power of two; the middle one holds all that is near
    zero.
    """
    size = np.frexp(np.abs(values))[1].astype(np.int64) - 1  # 2^size <= |value| < 2^(size + 1)
    reach = np.where(values == 0, 0, np.clip(size - LEAST + 1, 0, MOST - LEAST))
    return (MOST - LEAST) + np.where(values < 0, -reach, reach)


def _edge(cell: int) -> float:
    """The lower end of a cell."""
    place = cell - (MOST - LEAST)
    if place > 0:
        return 2.0 ** (place - 1 + LEAST)
    return -(2.0 ** (LEAST - place))


def _ends(counts: Floats, scale: float, otherwise: tuple[int, int]) -> tuple[int, int]:
    """The first and the last cell within which nearly all of a noisy histogram lies, or `otherwise`
    where noise hides everything.
    """
    due = max(OUTSIDE * max(float(counts.sum()), 0.0), 4 * scale) + 2 * scale * np.sqrt(
        np.arange(len(counts))
    )
    low, high = (
        np.flatnonzero(np.cumsum(counts) > due),
        np.flatnonzero(np.cumsum(counts[::-1]) > due),
    )
    if not len(low) or not len(high) or low[0] > len(counts) - 1 - high[0]:
        return otherwise
    return int(low[0]), int(len(counts) - 1 - high[0])
