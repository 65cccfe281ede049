"""Naive Bayes on histograms: counts of (class, cell) for each column, all in one release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.estimators.bounding import one_of_each
from dpfy.estimators.budget import ReleaseNeed
from dpfy.estimators.engine_records import Records
from dpfy.estimators.estimator import PrivateClassifier, PublicFacts
from dpfy.estimators.explanation import Explanation
from dpfy.estimators.fitting import FitSession
from dpfy.estimators.records import WEIGHT_BITS, EncodedRecords
from dpfy.tables.columns import Number, OpenColumn

COUNTS = "counts"


@dataclass(kw_only=True, eq=False, repr=False)
class NaiveBayes(PrivateClassifier):
    """Naive Bayes with a histogram of every column in every class; the baseline that everyone knows.

    A record adds a one to each column's histogram of its class, so that its L2 norm is the root of the
    number of columns.

    Parameters
    ----------
    bins : int, default=16
        Equal bins of the public range of a number.

    Attributes
    ----------
    log_prior_ : ndarray of shape (n_classes,)
        Logarithms of the shares of the classes.
    log_likelihood_ : ndarray of shape (n_classes, n_cells)
        Logarithms of the shares of the cells in each class; the cells of the columns side by side.

    Examples
    --------
    >>> import numpy as np
    >>> from dpfy.estimators import NaiveBayes
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(0, 1, (1000, 2))
    >>> y = np.where(X[:, 0] > 0.5, "high", "low")
    >>> model = NaiveBayes(bounds=(0, 1), classes=("high", "low"), random_state=0).fit(X, y)
    >>> bool(model.score(X, y) > 0.9)
    True
    """

    bins: int = 16

    in_engine: ClassVar[bool] = True

    def _needs(self, public: PublicFacts) -> Sequence[ReleaseNeed]:
        check.integer("bins", self.bins, least=2, most=4096)
        return [ReleaseNeed(COUNTS, one_of_each(len(public.columns.columns), public.terms))]

    def _bits(self, public: PublicFacts) -> Mapping[str, int]:
        return {COUNTS: WEIGHT_BITS} if public.terms.weighted else {}

    def _learn(
        self, data: Records, public: PublicFacts, fit: FitSession
    ) -> Mapping[str, NDArray[Any]]:
        sizes = [
            self.bins if isinstance(column, Number) else len(column.words) + 1
            for column in data.columns.columns
            if not isinstance(column, OpenColumn)
        ]
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        counts = data.class_cells(self.bins)
        return {
            "counts": fit.release(COUNTS, counts, self._bits(public).get(COUNTS, 0)),
            "starts": starts,
            "scale": np.array([fit.round(COUNTS).scale]),
        }

    def _restore(self, model: Mapping[str, NDArray[Any]]) -> None:
        self._starts, self._scale = model["starts"], float(model["scale"][0])
        counts = np.maximum(model["counts"], 0.0)
        columns = np.split(counts, self._starts[1:-1], axis=1)
        sizes = np.mean(
            [column.sum(axis=1) for column in columns], axis=0
        )  # each column counts every record
        self.log_prior_ = np.log((sizes + 1) / (sizes + 1).sum())
        more = max(
            1.0, self._scale
        )  # as if each cell had held so many records more: noise makes no cell impossible
        shares = [
            (column + more) / (column + more).sum(axis=1, keepdims=True) for column in columns
        ]
        self.log_likelihood_ = np.log(np.concatenate(shares, axis=1))

    def _log_joint(self, given: EncodedRecords) -> NDArray[np.float64]:
        places, _ = given.cells(self._bins)
        return np.asarray(
            self.log_prior_ + self.log_likelihood_.T[places + self._starts[:-1]].sum(axis=1)
        )

    @property
    def _bins(self) -> int:
        """Of the fit, whatever the parameter says now."""
        sizes = np.diff(self._starts)
        return next(
            (
                int(n)
                for n, c in zip(sizes, self._columns.columns, strict=True)
                if c in self._columns.numbers
            ),
            2,
        )

    def explain(self) -> Explanation:
        """How much each column tells the classes apart: the largest ratio of likelihoods between
        two classes, in its most telling cell.
        """
        spread = self.log_likelihood_.max(axis=0) - self.log_likelihood_.min(axis=0)
        parts = np.split(spread, self._starts[1:-1])
        found = [
            (float(np.exp(part.max())), name)
            for name, part in zip(self._columns.feature_names, parts, strict=True)
        ]
        rows = tuple((name, ratio) for ratio, name in sorted(found, reverse=True))
        note = f"each count has noise of standard deviation {self._scale:.3g}"
        return Explanation(("column", "largest likelihood ratio"), rows, note)
