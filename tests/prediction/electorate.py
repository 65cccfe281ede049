"""Made-up voters and questions, and a purse without a folder."""

from __future__ import annotations

import numpy as np

from dpfy.core.errors import BudgetExceeded
from dpfy.core.randomness import Randomness
from dpfy.core.values import mock_permit
from dpfy.mechanisms.exact import Bits
from dpfy.prediction.voters import LinearVoters, class_means, shards

SECRET = Randomness.for_tests(11)


def records(
    count: int, classes: int = 4, features: int = 6, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, count)
    x = rng.normal(size=(count, features)).astype(np.float32)
    x[np.arange(count), y] += 3
    return x, y


def voters(count: int = 30, classes: int = 4) -> LinearVoters:
    x, y = records(count * 12, classes)
    return class_means(x, y, shards(len(x), count, SECRET), count, classes)


class OpenPurse:
    """As many releases as `most` says, in memory."""

    def __init__(self, most: dict[str, int] | None = None, name: str = "test") -> None:
        self.most, self.spent, self.name = most, {}, name
        self.asked: list[str] = []

    def need(self, *kinds: str) -> None:
        for kind in kinds:
            if self.most is not None and self.spent.get(kind, 0) >= self.most[kind]:
                raise BudgetExceeded(f"{kind} is used up")

    def spend(self, kind: str) -> Bits:
        self.need(kind)
        self.spent[kind] = self.spent.get(kind, 0) + 1
        self.asked.append(kind)
        return Bits(SECRET, f"{self.name} {kind}", self.spent[kind])

    def same(self, name: str) -> Bits:
        return Bits(SECRET, f"{self.name} {name}", 0)


__all__ = ["SECRET", "OpenPurse", "mock_permit", "records", "voters"]
