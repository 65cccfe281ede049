"""Classical learners with scikit-learn's interface: `fit`, `predict`, a card."""

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
from dpfy.estimators.trees import (
    AdditiveBoostingClassifier,
    AdditiveBoostingRegressor,
    DecisionTreeClassifier,
    DecisionTreeRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
    SoftTreeClassifier,
    SoftTreeRegressor,
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
    "RandomForestClassifier",
    "RandomForestRegressor",
    "Ridge",
    "SoftTreeClassifier",
    "SoftTreeRegressor",
    "load",
]
