"""The most frequent word, and what is frequent or how far numbers reach in a column about which
nothing is public.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpfy.core.errors import InvalidInput
from dpfy.core.values import Bound, Bounded
from dpfy.mechanisms.choice import Exponential, PermuteAndFlip
from dpfy.mechanisms.discrete import DiscreteLaplaceMechanism
from dpfy.mechanisms.histogram import StabilityHistogram
from dpfy.statistics.answer import Answer, NoiseLaw, percent, within
from dpfy.statistics.claim import BudgetShare, StatisticClaim
from dpfy.statistics.groups import MOST_WORD
from dpfy.statistics.statistic import Spend, Statistic, counted, parted, spread_of
from dpfy.statistics.units import ContributionLimit, coded
from dpfy.tables.columns import Column, WordColumn
from dpfy.tables.table import PrivateTable

FARTHEST = 64
"""Powers of two that are told apart, on either side of one."""


@dataclass(frozen=True)
class ModeStatistic(Statistic):
    """The word that most records have. A unit adds to counts and takes nothing away, so that noise
    of half the size is enough.
    """

    column: WordColumn

    def claim(
        self, contribution: ContributionLimit, share: BudgetShare, **about: Any
    ) -> StatisticClaim:
        """See `Statistic`. Permute-and-flip where epsilons are added up; else the exponential
        mechanism, which is cheaper together.
        """
        name = "permute-and-flip" if share.pure else "exponential-monotone"
        return self._claim(
            name, share.of_choice(1), float(contribution.total), draws=self.groups.count, **about
        )

    def release(self, table: PrivateTable, spend: Spend) -> list[Answer]:
        """See `Statistic`."""
        codes, size, contribution = (
            table.codes(self.column.name),
            len(self.column.words),
            spend.contribution,
        )
        groups, kept = self.used(table, contribution, codes < size)
        tool, found = spend.claim.tool, []
        assert isinstance(tool, Exponential | PermuteAndFlip)
        off = math.ceil(
            contribution.total * tool.moves / tool.epsilon * math.log(size / (1 - spend.level))
        )
        note = f"at most {off} records fewer than the most frequent, in {percent(spend.level)} of releases"
        parts = parted(codes[kept], groups[kept], self.groups.count)
        for group, (mine, place) in enumerate(zip(parts, self.groups.places(), strict=True)):
            counts = np.bincount(mine, minlength=size)
            scores = Bounded(counts, Bound(linf=float(contribution.total)))
            chosen = tool.release(scores, spend.permit, spend.randomness, group).value
            found.append(Answer(self.text, self.column.words[chosen], place=place, note=note))
        return found


@dataclass(frozen=True)
class UnknownKeys(Statistic):
    """Counts of keys that are not public: those that many units have."""

    column: Column

    def claim(
        self, contribution: ContributionLimit, share: BudgetShare, **about: Any
    ) -> StatisticClaim:
        """See `Statistic`. The threshold is the least for which the exact tail of the noise is
        within the share's delta.
        """
        if not share.delta:
            raise InvalidInput(
                "delta", 0.0, f"must be above 0 for {self.text}: its keys are not public"
            )
        moves = 2 if about.get("adjacency") == "replace-one" else 1
        keys = min(contribution.groups or contribution.records, contribution.total)
        most = min(contribution.each or contribution.records, contribution.total)
        made = StabilityHistogram.of(share.size / moves, share.delta, keys, most)
        assert isinstance(made.noise, DiscreteLaplaceMechanism)
        held = {"keys": keys, "threshold": made.threshold, **about}
        return self._claim("stability", made.noise.parameter, float(most), **held)

    def keys(self, table: PrivateTable) -> list[Hashable]:
        """The key of each record; None where it has none."""
        raise NotImplementedError

    def found(
        self,
        counts: Mapping[Any, float],
        spread: NoiseLaw,
        place: Mapping[str, str],
        threshold: int,
    ) -> list[Answer]:
        """The answers of one group from its keys and noisy counts."""
        raise NotImplementedError

    def release(self, table: PrivateTable, spend: Spend) -> list[Answer]:
        """See `Statistic`."""
        keys, groups = self.keys(table), self.groups.codes(table)
        pairs = [(int(g), k) for g, k in zip(groups, keys, strict=True)]
        counted = np.array([k is not None and g >= 0 for g, k in pairs], bool)
        kept = spend.contribution.kept(
            table.owners, np.where(counted, coded([repr(p) for p in pairs]), -1)
        )
        counts: dict[Hashable, int] = {}
        for row in np.flatnonzero(kept).tolist():
            counts[pairs[row]] = counts.get(pairs[row], 0) + 1
        tool = spend.claim.tool
        assert isinstance(tool, StabilityHistogram)
        released: Mapping[Any, float] = tool.release(
            Bounded(counts, tool.bound), spend.permit, spend.randomness
        ).value
        found = []
        for group, place in enumerate(self.groups.places()):
            mine = {key: count for (at, key), count in released.items() if at == group}
            found += self.found(
                mine, spread_of(spend.claim, spend.level), place, spend.claim.threshold
            )
        return found


@dataclass(frozen=True)
class TopStatistic(UnknownKeys):
    """The words that many records have, with their counts, most frequent first."""

    def words(self, answers: Sequence[Answer]) -> dict[str, tuple[str, ...]]:
        """The words that were found, by column: groups can be made of them."""
        found = dict.fromkeys(answer.place[self.column.name] for answer in answers)
        return {} if self.groups.by else {self.column.name: tuple(found)}

    def keys(self, table: PrivateTable) -> list[Hashable]:
        """The word of each record."""
        return [
            None if text is None else text[:MOST_WORD] for text in table.texts(self.column.name)
        ]

    def found(
        self,
        counts: Mapping[Any, float],
        spread: NoiseLaw,
        place: Mapping[str, str],
        threshold: int,
    ) -> list[Answer]:
        """See `UnknownKeys`."""
        note = f"words of fewer than {threshold} records after noise are not shown"
        found = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return [
            replace(
                counted(self.text, [count], spread, within(place, {self.column.name: str(word)})),
                note=note,
            )
            for word, count in found
        ]


@dataclass(frozen=True)
class RangeStatistic(UnknownKeys):
    """Powers of two between which the numbers of a column lie, for a range that is not public. Few
    numbers may lie outside.
    """

    def keys(self, table: PrivateTable) -> list[Hashable]:
        """The sign and the power of two of each number: 2^(key - 1) <= |number| < 2^key."""
        numbers = table.raw(self.column.name)
        signs, powers = np.sign(np.nan_to_num(numbers)), np.frexp(np.nan_to_num(numbers))[1]
        powers = np.clip(powers, -FARTHEST, FARTHEST)
        return [
            None if math.isnan(x) else (int(s), int(p) if s else 0)
            for x, s, p in zip(numbers, signs, powers, strict=True)
        ]

    def found(
        self,
        counts: Mapping[Any, float],
        spread: NoiseLaw,
        place: Mapping[str, str],
        threshold: int,
    ) -> list[Answer]:
        """See `UnknownKeys`."""
        note = f"powers of two with fewer than {threshold} records after noise are left out"
        low = min((math.ldexp(s, p if s < 0 else p - 1) for s, p in counts), default=None)
        high = max((math.ldexp(s, p if s > 0 else p - 1) for s, p in counts), default=None)
        return [
            Answer(self.text, value, place=within(place, {"end": end}), note=note)
            for end, value in (("low", low), ("high", high))
        ]
