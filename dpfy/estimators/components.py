"""Principal components of a noised matrix of second moments: mean, covariance and number of records
in one release.

A record adds x x' for its row x = (1, features) in the unit ball: Frobenius norm 1. Two such
matrices have an angle of at most 90 degrees, so that replacing a record moves the sum by at most
sqrt 2. The first entry counts the records, the first row sums them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.values import Bound
from dpfy.estimators.budget import ReleaseNeed
from dpfy.estimators.columns import refuse_categories
from dpfy.estimators.estimator import PrivateEstimator, PublicFacts
from dpfy.estimators.explanation import Explanation
from dpfy.estimators.fitting import FitSession, WholeSteps
from dpfy.estimators.linear.design import GRAM, Design, RowLayout
from dpfy.estimators.linear.solver import bought_norm, norm_needs
from dpfy.estimators.records import EncodedRecords

MATRIX = "second moments"
NEARLY_ALL = 0.95
"""The quantile of norms to which rows are shortened where no norm is public."""
Floats = NDArray[np.float64]


@dataclass(kw_only=True, eq=False, repr=False)
class PCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, PrivateEstimator):
    """Principal components of numbers on their scales ([-1, 1], or [0, 1] where a range begins at zero).

    Parameters
    ----------
    n_components : int, default=None
        How many components are kept; None for all.
    whiten : bool, default=False
        Whether transformed components have variance 1.
    norm : float, default=None
        A public bound on the norm of a row of scaled features, to which longer ones are shortened. None
        buys a quantile.

    Attributes
    ----------
    components_ : ndarray of shape (n_components, n_features)
        The directions, by falling variance.
    explained_variance_, explained_variance_ratio_ : ndarray of shape (n_components,)
        The variance along each, and its share of all.
    mean_ : ndarray of shape (n_features,)
        The mean of the scaled features.
    noise_level_ : float
        The largest eigenvalue that noise alone would give.

    Examples
    --------
    >>> import numpy as np
    >>> from dpfy.estimators import PCA
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (2000, 1)) * [0.8, 0.4] + rng.normal(0, 0.05, (2000, 2))
    >>> model = PCA(n_components=1, bounds=(-1, 1), random_state=0).fit(X)
    >>> bool(abs(model.components_[0] @ [0.894, 0.447]) > 0.99)
    True
    """

    n_components: int | None = None
    whiten: bool = False
    norm: float | None = None

    def _needs(self, public: PublicFacts) -> Sequence[ReleaseNeed]:
        refuse_categories(public.columns, "principal components")
        width = len(public.columns.columns)
        if (
            self.n_components is not None
            and check.integer("n_components", self.n_components) > width
        ):
            raise InvalidInput(
                "n_components", self.n_components, f"must be at most the number of columns, {width}"
            )
        if self.norm is not None:
            check.positive("norm", self.norm)
        bound = Bound(
            l2=(math.sqrt(0.5) if public.terms.replaced else 1.0) * (1 + 2.0**-50),
            l1=float(width + 1),
            linf=1.0,
        )
        return [*norm_needs(self.norm, public.terms), ReleaseNeed(MATRIX, bound)]

    def _bits(self, public: PublicFacts) -> Mapping[str, int]:
        return {MATRIX: GRAM}

    def _learn(
        self, data: EncodedRecords, public: PublicFacts, fit: FitSession
    ) -> Mapping[str, NDArray[Any]]:
        layout = RowLayout(data.columns)
        norms = layout.norms(data)
        norm = (
            bought_norm(layout, norms, fit, NEARLY_ALL)
            if self.norm is None
            else min(self.norm, layout.largest)
        )
        design = Design(layout, data, norm, norms, keep=False)
        released = fit.release(MATRIX, WholeSteps(design.gram(), GRAM), GRAM) * design.radius**2
        return {
            "moments": (released + released.T) / 2,
            "noise": np.array([fit.round(MATRIX).scale * design.radius**2]),
        }

    def _restore(self, model: Mapping[str, NDArray[Any]]) -> None:
        moments = model["moments"]
        size = max(float(moments[0, 0]), 1.0)
        self.mean_ = moments[0, 1:] / size
        values, vectors = np.linalg.eigh(moments[1:, 1:] / size - np.outer(self.mean_, self.mean_))
        count = len(values) if self.n_components is None else self.n_components
        kept = np.argsort(values)[::-1][:count]
        self.components_ = _signed(vectors[:, kept].T)
        self.explained_variance_ = np.maximum(values[kept], 0.0)
        self.explained_variance_ratio_ = self.explained_variance_ / max(
            float(np.maximum(values, 0.0).sum()), 1e-300
        )
        self.noise_level_ = float(model["noise"][0]) * math.sqrt(2 * len(values)) / size
        self._n_features_out = count

    def transform(self, X: Any) -> Floats:
        """The components of each row."""
        found = (self._given(X).scaled() - self.mean_) @ self.components_.T
        return np.asarray(
            found / np.sqrt(np.maximum(self.explained_variance_, 1e-12)) if self.whiten else found
        )

    def explain(self) -> Explanation:
        """The variance of each component, and the column with the largest weight in it."""
        names = [self._columns.feature_names[int(np.abs(row).argmax())] for row in self.components_]
        rows = tuple(
            (f"component {k}", float(v), name)
            for k, (v, name) in enumerate(zip(self.explained_variance_, names, strict=True))
        )
        return Explanation(
            ("component", "variance", "mostly"),
            rows,
            f"noise alone would give a variance of {self.noise_level_:.3g}",
        )


def _signed(rows: Floats) -> Floats:
    """Each row with the sign that makes its largest weight positive."""
    largest = np.take_along_axis(rows, np.abs(rows).argmax(axis=1)[:, None], axis=1)
    return np.asarray(rows * np.where(largest < 0, -1.0, 1.0))
