"""What every statistic is: public facts before, a release in the middle, answers after."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.core.values import Bound, Bounded, Permit
from dpfy.engines.aggregates import CellSums, Request, SumRequest, engine_of
from dpfy.engines.contributions import ContributionLimit
from dpfy.engines.expressions import TRUE, Expression, counted_where, of
from dpfy.mechanisms.additive import GaussianMechanism, LaplaceMechanism
from dpfy.mechanisms.discrete import DiscreteLaplaceMechanism
from dpfy.mechanisms.exact import Bits
from dpfy.mechanisms.grid import Grid, Laid
from dpfy.statistics.answer import LEVEL, Answer, NoiseLaw, within
from dpfy.statistics.claim import MOST_DOMAIN, BudgetShare, StatisticClaim
from dpfy.statistics.groups import Bins, GroupBy
from dpfy.tables.columns import Column, RangedColumn, WordColumn
from dpfy.tables.schema import Schema

FINE, WIDEST = 24, 44
"""Bits between a contribution and a step of the grid, and between the noise and a step, at most."""
LEAST_RATE = 2.0**-10
"""Below this rate noise is so wide that nobody misses whole numbers, and tables of it are long."""
NORMS = {"laplace": "l1", "gaussian": "l2"}
MOST_CELLS = 1 << 20
"""Numbers that one statistic may release."""


@dataclass(frozen=True)
class Spend:
    """What a release is made with: its claim, how much one unit may add, the permit, and the secret
    of the run (or fresh entropy). Intervals and notes hold in `level` of all releases.
    """

    claim: StatisticClaim
    contribution: ContributionLimit
    permit: Permit
    randomness: Randomness | None = None
    level: float = LEVEL

    @property
    def question(self) -> tuple[StatisticClaim, ContributionLimit, str]:
        """What the table is asked with; see `Statistic.asked`."""
        return self.claim, self.contribution, self.key

    @property
    def key(self) -> str:
        """Chooses which rows of a person are used: one for all statistics of a run."""
        return key_of(self.randomness or Randomness.from_os())


def key_of(randomness: Randomness) -> str:
    """The key that chooses which rows of a person are used in a run."""
    words = Bits(randomness, "rows that are used", 0).words(2)
    return "".join(f"{word:016x}" for word in words.tolist())


@dataclass(frozen=True)
class Statistic(ABC):
    """What is asked: `text` as it was written, over the groups `groups`. All of it is public.

    `records` is the public number of records, where there is one and all of them are counted;
    `weight` how many parts of the budget it gets, beside the other statistics of its query.
    """

    text: str
    groups: GroupBy
    records: int | None
    weight: float = field(default=1.0, kw_only=True, repr=False)

    @property
    def domain(self) -> str:
        """All that is public about it, in words; cut where it is long, and ending in a hash of the
        whole.
        """
        whole = repr(self)
        words = "; ".join(str(column) for column in self._columns())
        safe = "".join(c if c.isprintable() else "?" for c in words) or "no columns"
        return (
            f"{safe[:MOST_DOMAIN]} "
            f"({hashlib.sha256(whole.encode('utf-8', 'surrogatepass')).hexdigest()[:16]})"
        )

    def _columns(self) -> list[Column]:
        """The columns it reads, each once."""
        held = [getattr(self, f.name) for f in fields(self)]
        flat = [c for value in held for c in (value if isinstance(value, tuple) else (value,))]
        flat = [c.column if isinstance(c, Bins) else c for c in flat]
        flat += self.groups.columns
        return list(dict.fromkeys(c for c in flat if isinstance(c, Column)))

    def _claim(
        self, mechanism: str, parameter: float, bound: float, **about: Any
    ) -> StatisticClaim:
        """A claim about this statistic."""
        return StatisticClaim(self.text, self.domain, mechanism, parameter, bound, **about)

    @abstractmethod
    def claim(
        self, contribution: ContributionLimit, share: BudgetShare, **about: Any
    ) -> StatisticClaim:
        """The claim of this statistic, where it may spend `share`."""

    @abstractmethod
    def asked(
        self, schema: Schema, claim: StatisticClaim, contribution: ContributionLimit, key: str
    ) -> Request:
        """What `release` asks the table: statistics that are asked together are read together."""

    @abstractmethod
    def release(self, table: Any, spend: Spend) -> list[Answer]:
        """The answers.

        Guarantees: the charge of the permit is the claim's, which is all that is done. What the
        records hold raises nothing, and does not change how often random bits are drawn.
        """

    def error(self, claim: StatisticClaim) -> float:
        """How large the noise is on what is asked, as far as it is known before; to compare
        families of noise.
        """
        return 1.0

    def knowing(self, words: Mapping[str, tuple[str, ...]]) -> Statistic:
        """The statistic over the words, by column, that were found and released before it."""
        return replace(self, groups=self.groups.knowing(words)) if self.groups.open else self

    def group(self, schema: Schema) -> Expression:
        """The group of a record; -1 where it is not counted."""
        return self.groups.code(schema)

    def by_place(
        self,
        schema: Schema,
        question: tuple[StatisticClaim, ContributionLimit, str],
        place: Expression,
        size: int,
        counted: Expression,
    ) -> SumRequest:
        """How many records that are used lie in each place below `size` of each group."""
        group = counted_where(self.group(schema), counted)
        return SumRequest(group, (group * size + place,), (), *question[1:])

    def histograms(self, table: Any, spend: Spend, size: int) -> Iterator[NDArray[np.int64]]:
        """For each group how many records that are used lie in each place below `size`."""
        engine = engine_of(table)
        asked = self.asked(engine.schema, *spend.question)
        assert isinstance(asked, SumRequest)
        sums = engine.sums(asked)
        starts = np.searchsorted(sums.at, np.arange(self.groups.count + 1) * size)
        for k, (start, end) in enumerate(pairwise(starts)):
            yield CellSums(sums.at[start:end] - k * size, sums.totals[start:end]).dense(size)[:, 0]


@dataclass(frozen=True)
class SumStatistic(Statistic):
    """A statistic that follows from sums over the records, released together with one charge.

    Each record adds `width` numbers in one of `cells` cells of its group. `whole` where they are
    ones.
    """

    @property
    def whole(self) -> bool:
        """Whether what a record adds is a one."""
        return False

    @property
    def cells(self) -> int:
        """Cells within a group."""
        return 1

    def width(self, norm: str) -> int:
        """Numbers that a record adds in its cell."""
        return 1

    @abstractmethod
    def one(self, norm: str) -> Bound:
        """What one record adds at most; `norm` (l1 or l2) is the one that will be charged."""

    def rows(self, norm: str) -> tuple[Expression, list[Expression]]:
        """The cell of a record (-1: it adds nothing) and the numbers that it adds there."""
        return self.placed(), []

    def placed(self) -> Expression:
        """The cell of a record."""
        return of(0)

    def leading(self, norm: str) -> Sequence[float]:
        """How the main answer is made of the released numbers of a cell, up to a factor that does
        not depend on the norm.
        """
        return [1.0]

    @abstractmethod
    def group_answers(
        self, sums: NDArray[np.float64], spread: NoiseLaw, norm: str
    ) -> Iterator[Answer]:
        """The answers of one group from its noisy sums [cells, width]."""

    def request(
        self,
        schema: Schema,
        contribution: ContributionLimit,
        norm: str,
        grid: Grid | None,
        key: str = "",
    ) -> SumRequest:
        """The sums that `total` asks for."""
        place, values = self.rows(norm)[0], []
        if grid is not None and not self.whole:
            values = self.steps(norm, grid)
        group = counted_where(self.group(schema), TRUE if place == of(0) else place >= 0)
        at = group if self.cells == 1 else group * self.cells + place
        return SumRequest(group, (at,), tuple(values), contribution, key)

    def steps(self, norm: str, grid: Grid) -> list[Expression]:
        """The numbers that a record adds as whole steps of a grid."""
        return [grid_steps(number, grid, self.one(norm)) for number in self.rows(norm)[1]]

    def asked(
        self, schema: Schema, claim: StatisticClaim, contribution: ContributionLimit, key: str
    ) -> Request:
        """See `Statistic`."""
        grid = self._grid(claim, contribution)
        return self.request(schema, contribution, norm_of(claim), grid, key)

    def total(
        self,
        table: Any,
        contribution: ContributionLimit,
        norm: str,
        grid: Grid | None,
        key: str = "",
    ) -> Bounded[Any]:
        """The sums [groups, cells, width] without noise: whole numbers, or on a grid. `table` is a
        private table, or an engine.

        Guarantees: adding or removing all records of a unit changes them by at most the bound,
        whatever the cells of the table hold.
        """
        engine = engine_of(table)
        one, asked = self.one(norm), self.request(engine.schema, contribution, norm, grid, key)
        totals = engine.sums(asked).dense(self.groups.count * self.cells)
        totals = totals.reshape(self.groups.count, self.cells, -1)
        if self.whole:
            whole = Bounded(totals, contribution.bound(one))
            return whole if grid is None else grid.lay(whole)
        assert grid is not None
        bound = grid.sum(np.zeros((0, len(asked.values))), one).bound
        return Bounded(Laid(grid, totals), contribution.bound(bound))

    def claim(
        self, contribution: ContributionLimit, share: BudgetShare, **about: Any
    ) -> StatisticClaim:
        """See `Statistic`. Replacing a unit moves a sum twice as far."""
        moves = 2 if about.get("adjacency") == Adjacency.REPLACE_ONE else 1
        bound = contribution.bound(self.one(NORMS[share.family]))
        if share.family == "gaussian":
            return self._claim("gaussian", moves / share.size, bound.l2, **about)
        if self.whole and (rate := share.size / (moves * bound.l1)) >= LEAST_RATE:
            return self._claim("discrete-laplace", rate, bound.l1, **about)
        return self._claim("laplace", moves / share.size, bound.l1, **about)

    def error(self, claim: StatisticClaim) -> float:
        """See `Statistic`."""
        return spread_of(claim).error(self.leading(norm_of(claim)))

    def release(self, table: Any, spend: Spend) -> list[Answer]:
        """See `Statistic`."""
        norm, tool = norm_of(spend.claim), spend.claim.tool
        grid = self._grid(spend.claim, spend.contribution)
        assert isinstance(tool, LaplaceMechanism | GaussianMechanism | DiscreteLaplaceMechanism)
        total = self.total(table, spend.contribution, norm, grid, spend.key)
        if isinstance(tool, DiscreteLaplaceMechanism):
            spread = spread_of(spend.claim, spend.level)
        else:
            scale = tool.scale(total.bound)
            spread = NoiseLaw(spend.claim.mechanism, scale, level=spend.level)
        return self.answers(tool.release(total, spend.permit, spend.randomness).value, spread, norm)

    def _grid(self, claim: StatisticClaim, contribution: ContributionLimit) -> Grid | None:
        """The grid of a release; None where whole numbers are released."""
        norm, tool = norm_of(claim), claim.tool
        if isinstance(tool, DiscreteLaplaceMechanism):
            return None
        assert isinstance(tool, LaplaceMechanism | GaussianMechanism)
        bound = contribution.bound(self.one(norm))
        return self.grid(tool, bound, self.groups.count * self.cells * self.width(norm))

    def grid(self, tool: LaplaceMechanism | GaussianMechanism, bound: Bound, numbers: int) -> Grid:
        """The grid on which sums are made: as fine as the noise asks for and as contributions, and
        no finer than noise can be drawn on.
        """
        fine = math.frexp(bound.linf / math.sqrt(numbers))[1] - FINE
        coarse = math.frexp(tool.scale(bound))[1] - WIDEST
        return Grid(max(coarse, min(tool.grid(bound, numbers).exponent, 0 if self.whole else fine)))

    def answers(self, sums: NDArray[Any], spread: NoiseLaw, norm: str) -> list[Answer]:
        """All answers from the noisy sums [groups, cells, width]."""
        found = []
        for place, group in zip(self.groups.places(), sums, strict=True):
            for answer in self.group_answers(group, spread, norm):
                found.append(replace(answer, place=within(place, answer.place)))
        return found


def grid_steps(number: Expression, grid: Grid, one: Bound) -> Expression:
    """What a record adds as whole steps of a grid, at most the bound of one record."""
    most = grid.most_steps(one)
    return (number * 2.0**-grid.exponent).clip(-most, most).whole()


def norm_of(claim: StatisticClaim) -> str:
    """The norm that the noise of a claim is charged by."""
    return NORMS["gaussian" if claim.mechanism == "gaussian" else "laplace"]


def spread_of(claim: StatisticClaim, level: float = LEVEL) -> NoiseLaw:
    """The law of the noise on each released number."""
    if claim.mechanism in ("discrete-laplace", "stability"):
        return NoiseLaw("laplace", 1 / claim.parameter, True, level)
    return NoiseLaw(claim.mechanism, claim.parameter * claim.bound, level=level)


def number(function: str, column: Column) -> RangedColumn:
    """A column that must hold numbers."""
    if not isinstance(column, RangedColumn):
        raise InvalidInput(
            f"query {function}",
            column.name,
            "must be a column of numbers with a range in the schema",
        )
    return column


def words(function: str, column: Column) -> WordColumn:
    """A column that must hold words out of a public list."""
    if not isinstance(column, WordColumn):
        raise InvalidInput(
            f"query {function}", column.name, "must be a column whose categories are in the schema"
        )
    return column


def of_size(function: str, cells: int) -> int:
    """A number of cells that can be released."""
    if cells > MOST_CELLS:
        raise InvalidInput(f"query {function}", cells, f"must have at most {MOST_CELLS} cells")
    return cells


def counted(
    text: str, values: Sequence[float], spread: NoiseLaw, place: Mapping[str, str]
) -> Answer:
    """A count that is the sum of released numbers. No count is below zero, so none is answered,
    which is never farther off.
    """
    ones = [1.0] * len(values)
    value = sum(float(v) for v in values)
    reach, shown = spread.reach(ones), max(value, 0.0)
    ends = (max(value - reach, 0.0), max(value + reach, 0.0))
    return Answer(text, int(shown) if spread.whole else shown, spread.error(ones), ends, place)
