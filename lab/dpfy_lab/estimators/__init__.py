"""Estimators, solvers and starts of k-means that lose in the stored studies (docs/studies.md)."""
