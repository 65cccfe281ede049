"""Who takes part: what is held out for scores, and the sample that a search on a subset sees. Every
unit tosses coins of its own.

The coins are drawn once for the whole search, from its secret. Given the coins of all others,
adding or removing a unit changes nothing for them, so each part is what the accounting of disjoint
parts, and of Poisson samples, is about. A permutation of the rows, or a fixed share of them, would
not do: with one unit more, others would move from one part to the other. A user with several
records tosses one coin: with one for each record, the user would be in both parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.randomness import Randomness
from dpfy.data.records import Records, as_records
from dpfy.data.split import SplitRecords, kept
from dpfy.tuning.routes import TRAINING, VALIDATION

SAMPLED = "sampled training records"


@dataclass(frozen=True)
class TrialSplit:
    """What share of `records` (their public number) is held out for scores, and which share of the
    rest a search on a subset sees.
    """

    records: int
    held_out: float = 0.0
    sample: float = 1.0

    def __post_init__(self) -> None:
        check.integer("records", self.records)
        check.below_one("held_out", self.held_out)
        check.rate("sample", self.sample)

    @property
    def training(self) -> int:
        """How many records there are to train on, on average."""
        return round(self.records * (1 - self.held_out))

    @property
    def sampled(self) -> int:
        """How many of them a search on a subset sees, on average."""
        return round(self.records * (1 - self.held_out) * self.sample)

    @property
    def validation(self) -> int:
        """How many records are held out, on average."""
        return round(self.records * self.held_out)

    def part(self, *, final: bool = False) -> str | None:
        """The part that a trial must train on, or the run on all records; None where that is all of
        the data.
        """
        if self.sample < 1 and not final:
            return SAMPLED
        return TRAINING if self.held_out > 0 else None

    def train(self, data: object, search: Randomness, *, final: bool) -> Records:
        """The records that a trial trains on: with `final`, those of the run on all of them."""
        records = as_records(data)
        coins = ~self._out(len(records), search)
        if self.sample < 1 and not final:
            coins &= _tossed("subset", len(records), self.sample, search)
        elif self.held_out == 0:
            return records
        expected = self.training if final or self.sample == 1 else self.sampled
        return kept(records, coins, expected, self.part(final=final) or "")

    def valid(self, data: object, search: Randomness) -> SplitRecords:
        """The records held out."""
        records = as_records(data)
        return kept(records, self._out(len(records), search), self.validation, VALIDATION)

    def _out(self, count: int, search: Randomness) -> NDArray[np.bool_]:
        return _tossed("held out", count, self.held_out, search)


def _tossed(what: str, count: int, share: float, search: Randomness) -> NDArray[np.bool_]:
    return np.asarray(search.generator(what, 0).random(count) < share)
