"""Soft trees with scikit-learn's interface, trained by DP-SGD. They stand above training, and so apart from the other estimators."""

from dpfy.soft_trees.estimators import SoftTreeClassifier, SoftTreeRegressor

__all__ = ["SoftTreeClassifier", "SoftTreeRegressor"]
