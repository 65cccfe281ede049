"""Losses as training scripts add them up to log them: they are private, and recognised where
somebody publishes their sum or mean.
"""

from __future__ import annotations

import math

from torch import Tensor

from dpfy.core.errors import InvalidInput
from dpfy.training.integrity.publication import CLOSE


class Totals:
    """Sums over the physical batches of an epoch, or of a run."""

    def __init__(self) -> None:
        self._means: Tensor | float = 0.0
        self._losses: Tensor | float = 0.0
        self._batches = self._rows = 0

    def add(self, total: Tensor, rows: int) -> None:
        """Take the sum of the losses of a batch of so many rows."""
        self._means, self._losses = self._means + total / rows, self._losses + total
        self._batches, self._rows = self._batches + 1, self._rows + rows

    def check(self, name: str, value: float, steps: int) -> None:
        """Refuse a sum of the losses, or of the means of batches, and their means over records,
        batches or the `steps` of an epoch.
        """
        if not self._batches or not math.isfinite(value) or value == 0:
            return
        seen = [
            float(total) / part
            for total in (self._means, self._losses)
            for part in (1, self._batches, self._rows, steps)
        ]
        if any(math.isclose(value, one, rel_tol=CLOSE) for one in seen):
            rule = "is private: evaluate on public data, or keep it out of the logs"
            raise InvalidInput(name, "the mean or sum of losses of the training batches", rule)
