"""Metrics of public data as a run records them: finite numbers, each under a word."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any


def word(name: str) -> str:
    """The name of a metric as a word: val/loss is val_loss."""
    return re.sub(r"\W", "_", name)


def words(found: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of `found`, by word."""
    return {
        word(name): float(value) for name, value in found.items() if math.isfinite(float(value))
    }
