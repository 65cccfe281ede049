"""The seeded mistakes, by family of dpfy. None of them can be reached from dpfy."""

from __future__ import annotations

import importlib

from dpfy_lab.selftest.mistake import MISTAKES

FAMILIES = (
    "noise",
    "clipping",
    "sampling",
    "integrity",
    "users",
    "shares",
    "rounds",
    "local",
    "labels",
    "prediction",
    "answers",
    "queries",
    "tables",
    "text",
    "vocabulary",
    "images",
    "evolution",
    "linear",
    "trees",
    "clusters",
    "persons",
    "tuning",
    "runs",
)
"""In the order of the self-test."""

for family in FAMILIES:
    importlib.import_module(f"{__name__}.{family}")

__all__ = ["FAMILIES", "MISTAKES"]
