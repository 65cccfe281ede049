"""Linear models: rows in the unit ball, losses, solvers."""

from dpfy.estimators.linear.models import (
    LinearRegression,
    LinearSVC,
    LogisticRegression,
    PoissonRegressor,
    Ridge,
)

__all__ = ["LinearRegression", "LinearSVC", "LogisticRegression", "PoissonRegressor", "Ridge"]
