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
    rounds,
    shares,
    tables,
    training,
    tuning,
    users,
)

FAMILIES = (
    training,
    gradients,
    integrity,
    users,
    shares,
    rounds,
    local,
    labels,
    prediction,
    tables,
    images,
    evolution,
    estimators,
    tuning,
)
CHECKS = tuple(check for family in FAMILIES for check in family.CHECKS)
"""All of them."""
