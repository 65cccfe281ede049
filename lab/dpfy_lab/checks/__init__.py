"""The checks of the self-test, by family of dpfy."""

from __future__ import annotations

from dpfy_lab.checks import (
    estimators,
    evolution,
    gradients,
    images,
    integrity,
    labels,
    local,
    prediction,
    queries,
    rounds,
    runs,
    shares,
    tables,
    text,
    training,
    tuning,
    users,
    vocabulary,
)

FAMILIES = (
    training,
    gradients,
    integrity,
    users,
    shares,
    rounds,
    runs,
    local,
    labels,
    prediction,
    queries,
    tables,
    text,
    vocabulary,
    images,
    evolution,
    estimators,
    tuning,
)
CHECKS = tuple(check for family in FAMILIES for check in family.CHECKS)
"""All of them."""
