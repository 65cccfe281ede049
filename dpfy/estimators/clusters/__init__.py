"""Clusters: k-means and mixtures of Gaussians."""

from dpfy.estimators.clusters.kmeans import KMeans
from dpfy.estimators.clusters.mixture import GaussianMixture

__all__ = ["GaussianMixture", "KMeans"]
