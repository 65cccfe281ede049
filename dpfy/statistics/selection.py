"""The most frequent word, and what is frequent or how far numbers reach in a column about which
nothing is public.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpfy.core.errors import InvalidInput
from dpfy.core.values import Bound, Bounded
from dpfy.engines.aggregates import CountRequest, Request, engine_of
from dpfy.engines.contributions import ContributionLimit
from dpfy.engines.expressions import Expression, choose, code, raw, text
from dpfy.mechanisms.choice import Exponential, PermuteAndFlip
from dpfy.mechanisms.discrete import DiscreteLaplaceMechanism
from dpfy.mechanisms.histogram import StabilityHistogram
from dpfy.statistics.answer import Answer, NoiseLaw, percent, within
from dpfy.statistics.claim import BudgetShare, StatisticClaim
from dpfy.statistics.groups import MOST_WORD
from dpfy.statistics.statistic import Spend, Statistic, counted, spread_of
from dpfy.tables.columns import Column, WordColumn
from dpfy.tables.schema import Schema

FARTHEST = 64
"""Powers of two that are distinguished, on either side of one."""


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

    def asked(
        self, schema: Schema, claim: StatisticClaim, contribution: ContributionLimit, key: str
    ) -> Request:
        """See `Statistic`."""
        place, size = code(self.column.name), len(self.column.words)
        return self.by_place(schema, (claim, contribution, key), place, size, place < size)

    def release(self, table: Any, spend: Spend) -> list[Answer]:
        """See `Statistic`."""
        size, contribution = len(self.column.words), spend.contribution
        tool, found = spend.claim.tool, []
        assert isinstance(tool, Exponential | PermuteAndFlip)
        off = math.ceil(
            contribution.total * tool.moves / tool.epsilon * math.log(size / (1 - spend.level))
        )
        note = f"at most {off} records fewer than the most frequent, in {percent(spend.level)} of releases"
        parts = self.histograms(table, spend, size)
        for group, (counts, where) in enumerate(zip(parts, self.groups.places(), strict=True)):
            scores = Bounded(counts, Bound(linf=float(contribution.total)))
            chosen = tool.release(scores, spend.permit, spend.randomness, group).value
            found.append(Answer(self.text, self.column.words[chosen], place=where, note=note))
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

    def keys(self) -> tuple[Expression, ...]:
        """The parts of the key of a record; without one of them it has none."""
        raise NotImplementedError

    def asked(
        self, schema: Schema, claim: StatisticClaim, contribution: ContributionLimit, key: str
    ) -> CountRequest:
        """See `Statistic`."""
        return CountRequest(self.group(schema), self.keys(), contribution, key)

    def found(
        self,
        counts: Mapping[Any, float],
        spread: NoiseLaw,
        place: Mapping[str, str],
        threshold: int,
    ) -> list[Answer]:
        """The answers of one group from its keys and noisy counts."""
        raise NotImplementedError

    def release(self, table: Any, spend: Spend) -> list[Answer]:
        """See `Statistic`."""
        engine = engine_of(table)
        counts: Mapping[Any, int] = engine.counts(self.asked(engine.schema, *spend.question))
        tool = spend.claim.tool
        assert isinstance(tool, StabilityHistogram)
        released: Mapping[Any, float] = tool.release(
            Bounded(counts, tool.bound), spend.permit, spend.randomness
        ).value
        found = []
        for number, place in enumerate(self.groups.places()):
            mine = {key[1:]: count for key, count in released.items() if key[0] == number}
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

    def keys(self) -> tuple[Expression, ...]:
        """The word of a record."""
        return (text(self.column.name, MOST_WORD),)

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
            for (word,), count in found
        ]


@dataclass(frozen=True)
class RangeStatistic(UnknownKeys):
    """Powers of two between which the numbers of a column lie, for a range that is not public. Few
    numbers may lie outside.
    """

    def keys(self) -> tuple[Expression, ...]:
        """The sign and the power of two of a number: 2^(key - 1) <= |number| < 2^key; the sign of a
        missing one is none.
        """
        given = raw(self.column.name)
        sign = choose(given > 0, 1.0, choose(given < 0, -1.0, choose(given.missing(), given, 0.0)))
        edges = [2.0**k for k in range(-FARTHEST, FARTHEST)]
        power = (given * sign).place(edges) - FARTHEST
        return (sign, choose(sign.equals(0.0), 0, power))

    def found(
        self,
        counts: Mapping[Any, float],
        spread: NoiseLaw,
        place: Mapping[str, str],
        threshold: int,
    ) -> list[Answer]:
        """See `UnknownKeys`."""
        note = f"powers of two with fewer than {threshold} records after noise are left out"
        ends = [(s, int(p)) for s, p in counts]
        low = min((math.ldexp(s, p if s < 0 else p - 1) for s, p in ends), default=None)
        high = max((math.ldexp(s, p if s > 0 else p - 1) for s, p in ends), default=None)
        return [
            Answer(self.text, value, place=within(place, {"end": end}), note=note)
            for end, value in (("low", low), ("high", high))
        ]
