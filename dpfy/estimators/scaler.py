"""Scaling by private statistics: means and deviations, or the ends of ranges that nobody given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import OneToOneFeatureMixin, TransformerMixin

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.values import Bound
from dpfy.estimators.budget import ReleaseNeed
from dpfy.estimators.columns import refuse_categories
from dpfy.estimators.estimator import PrivateEstimator, PublicFacts
from dpfy.estimators.explanation import Explanation
from dpfy.estimators.fitting import FitSession, fixed
from dpfy.estimators.records import EncodedRecords, parts

SUMS, BITS = "sums and squares", 12
MOMENTS, RANGES = "moments", "ranges"
NARROWEST = 2.0**-10
"""The smallest deviation that a column is divided by, on its scale."""
Floats = NDArray[np.float64]


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateScaler(OneToOneFeatureMixin, TransformerMixin, PrivateEstimator):
    """Scale numbers by means and deviations, or by ranges, that are private releases.

    Estimators of dpfy scale by public ranges themselves; use this where records fill a small part
    of their public range, or before a step that expects scaled numbers. What comes out lies in a
    public range: give it to the next estimator as its `bounds`.

    Parameters
    ----------
    method : {"moments", "ranges"}, default="moments"
        "moments" subtracts the mean and divides by the deviation. "ranges" buys the range of each
        column that has no public one and puts it onto [-1, 1].
    limit : float, default=3.0
        Of "moments": what comes out is cut to [-limit, limit].

    Attributes
    ----------
    mean_, scale_ : ndarray of shape (n_features,)
        What is subtracted, and what is divided by.
    noise_level_ : float
        Of "moments": about the deviation that noise gives a mean, on the scale [-1, 1].

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.pipeline import make_pipeline
    >>> from dpfy.estimators import LogisticRegression, PrivateScaler
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(50, 2, (3000, 2))
    >>> y = np.where(X[:, 0] > 50, "high", "low")
    >>> scaler = PrivateScaler(epsilon=0.5, bounds=(0, 100), random_state=0)
    >>> model = LogisticRegression(
    ...     epsilon=0.5, bounds=(-3, 3), classes=("high", "low"), random_state=0
    ... )
    >>> pipe = make_pipeline(scaler, model).fit(X, y)
    >>> bool(pipe.score(X, y) > 0.9)
    True
    """

    method: str = MOMENTS
    limit: float = 3.0

    def _needs(self, public: PublicFacts) -> Sequence[ReleaseNeed]:
        check.one_of("method", self.method, (MOMENTS, RANGES))
        check.positive("limit", self.limit)
        refuse_categories(public.columns, "a scaler")
        if self.method == RANGES:
            if not public.open:
                rule = 'must be left out for at least one column: method="ranges" buys ranges'
                raise InvalidInput("bounds", "all of them", rule)
            return []
        width = len(public.columns.columns)
        # (1, x, x^2) for each x in [-1, 1]
        norm = math.sqrt(1 + 2 * width) * (1 + 2.0**-50)
        return [ReleaseNeed(SUMS, Bound(l2=norm, l1=1.0 + 2 * width, linf=1.0))]

    def _bits(self, public: PublicFacts) -> Mapping[str, int]:
        return {SUMS: BITS}

    def _learn(
        self, data: EncodedRecords, public: PublicFacts, fit: FitSession
    ) -> Mapping[str, NDArray[Any]]:
        width = len(data.columns.columns)
        if self.method == RANGES:
            return {"mean": np.zeros(width), "deviation": np.ones(width), "noise": np.zeros(1)}
        sums = np.zeros(1 + 2 * width)
        for part in parts(data.size):
            rows = fixed(data.scaled(part), BITS)
            sums[0] += len(rows)
            sums[1 : 1 + width] += rows.sum(axis=0)
            sums[1 + width :] += fixed(rows**2, BITS).sum(axis=0)
        released = fit.release(SUMS, sums, BITS)
        size, noise = max(float(released[0]), 1.0), fit.round(SUMS).deviation
        mean = np.clip(released[1 : 1 + width] / size, -1.0, 1.0)
        square = np.clip(released[1 + width :] / size - mean**2, NARROWEST**2, 1.0)
        told = np.array([noise / size])
        return {"mean": mean, "deviation": np.sqrt(square), "noise": told}

    def _restore(self, model: Mapping[str, NDArray[Any]]) -> None:
        self._middle, self._deviation = model["mean"], model["deviation"]
        self.noise_level_ = float(model["noise"][0])
        symmetric = np.array([c.scale == "symmetric" for c in self._columns.numbers])
        low, high = self._columns.spans[:, 0], self._columns.spans[:, 1]
        start, width = np.where(symmetric, -1.0, 0.0), np.where(symmetric, 2.0, 1.0)
        self.mean_ = low + (self._middle - start) / width * (high - low)
        self.scale_ = self._deviation / width * (high - low)

    def transform(self, X: Any) -> Floats:
        """Scaled numbers, in the public range [-limit, limit], or [-1, 1] for "ranges"."""
        rows = self._given(X).scaled()
        limit = 1.0 if self.method == RANGES else self.limit
        return np.clip((rows - self._middle) / self._deviation, -limit, limit)

    def explain(self) -> Explanation:
        """What is subtracted from each column, and what it is divided by."""
        held = zip(self._columns.feature_names, self.scale_, self.mean_, strict=True)
        rows = tuple((name, float(scale), float(mean)) for name, scale, mean in held)
        return Explanation(("column", "divided by", "mean"), rows, "both are noisy")
