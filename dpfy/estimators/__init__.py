"""Classical learners with scikit-learn's interface: `fit`, `predict`, a report.

Estimators of plug-ins (the entry points `dpfy.estimators`) are found here by their names, too.
"""

from __future__ import annotations

from typing import Any

from dpfy.core import plugins
from dpfy.estimators.clusters import GaussianMixture, KMeans
from dpfy.estimators.components import PCA
from dpfy.estimators.estimator import (
    ESTIMATORS,
    PrivateClassifier,
    PrivateEstimator,
    PrivateRegressor,
    load,
)
from dpfy.estimators.linear import (
    LinearRegression,
    LinearSVC,
    LogisticRegression,
    PoissonRegressor,
    Ridge,
)
from dpfy.estimators.naive_bayes import NaiveBayes
from dpfy.estimators.scaler import PrivateScaler
from dpfy.estimators.trees import (
    AdditiveBoostingClassifier,
    AdditiveBoostingRegressor,
    DecisionTreeClassifier,
    DecisionTreeRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)

__all__ = [
    "ESTIMATORS",
    "PCA",
    "AdditiveBoostingClassifier",
    "AdditiveBoostingRegressor",
    "DecisionTreeClassifier",
    "DecisionTreeRegressor",
    "GaussianMixture",
    "GradientBoostingClassifier",
    "GradientBoostingRegressor",
    "KMeans",
    "LinearRegression",
    "LinearSVC",
    "LogisticRegression",
    "NaiveBayes",
    "PoissonRegressor",
    "PrivateClassifier",
    "PrivateEstimator",
    "PrivateRegressor",
    "PrivateScaler",
    "RandomForestClassifier",
    "RandomForestRegressor",
    "Ridge",
    "load",
]


def __getattr__(name: str) -> Any:
    """An estimator of a plug-in."""
    if (found := plugins.find(plugins.ESTIMATORS, name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
