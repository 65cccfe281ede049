"""From a query and a budget to claims: calibrated together, so that all statistics of a query cost
what was asked and no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpfy.accounting import calibrate, table
from dpfy.core import check, events
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import EXAMPLE, Adjacency, owner_columns, user_unit
from dpfy.core.values import mock_permit
from dpfy.engines.aggregates import MemoryEngine, per_person
from dpfy.engines.contributions import ContributionLimit
from dpfy.queries import sql
from dpfy.queries.sql import SqlQuery
from dpfy.statistics import functions, language
from dpfy.statistics.claim import MECHANISMS, BudgetShare, StatisticClaim
from dpfy.statistics.selection import UnknownKeys
from dpfy.statistics.statistic import Spend, Statistic, spread_of
from dpfy.tables.schema import Schema
from dpfy.tables.table import PrivateTable

DOWN = 1 - 2.0**-40
THRESHOLDS = 10
"""What delta is divided by for thresholds. Less would make them higher by 1 / epsilon for each
factor of e; more would leave less of the budget of a data set for later queries.
"""


@dataclass(frozen=True)
class QueryTerms:
    """What a query may cost, and whose data it protects. All of it is public.

    `user` names the column that says whose a record is: all records of a user are then protected
    together, of which at most `most_records` are used, in at most `most_groups` groups and at most
    `most_each` in one. Where it names several columns, a record belongs to several users, and what
    their records hold is protected (zero-out). `records` is the public number of records; the guarantee is then for
    replacing one, since adding one would change a number that everybody knows.

    With `contributions` the query is about users instead: each is one row, with one column
    `contributions`, the number of their records, moved to at most that public bound.
    ``quantile(contributions, 0.9)`` is how many records nine of ten users own at most.
    """

    epsilon: float
    delta: float = 0.0
    user: str | None = None
    most_records: int | None = None
    most_groups: int | None = None
    most_each: int | None = None
    records: int | None = None
    contributions: int | None = None

    def __post_init__(self) -> None:
        check.epsilon("epsilon", self.epsilon)
        if check.below_one("delta", self.delta):
            check.delta("delta", self.delta)
        limits = {
            "most_records": self.most_records,
            "most_groups": self.most_groups,
            "most_each": self.most_each,
        }
        if self.shared:
            self._check_shared()
        for name, value in limits.items():
            if value is not None and self.user is None:
                raise InvalidInput(
                    name, value, "needs user, the column that says whose a record is"
                )
        if self.contributions is not None:
            self._check_contributions()
        elif self.user is not None and self.most_records is None:
            raise InvalidInput(
                "most_records",
                None,
                "must be given with user: the most records of one user that are used",
            )
        if self.records is not None:
            check.integer("records", self.records, most=check.RECORDS)
            if self.user is not None:
                raise InvalidInput(
                    "records",
                    self.records,
                    "is for records that are their own unit: leave out user",
                )
        _ = self.contribution

    @property
    def shared(self) -> bool:
        """Whether a record may have several owners."""
        return self.user is not None and len(owner_columns("user", self.user)) > 1

    def _check_shared(self) -> None:
        """Where a record has several owners, what is used of one may not depend on what another's
        records hold: groups cannot choose.
        """
        given = (self.most_groups, self.most_each, self.contributions)
        for name, value in zip(("most_groups", "most_each", "contributions"), given, strict=True):
            if value is not None:
                rule = "must be left out where a record has several owners: give at_most alone"
                raise InvalidInput(name, value, rule)

    def _check_contributions(self) -> None:
        check.integer("contributions", self.contributions, least=2, most=1 << 20)
        if self.user is None:
            raise InvalidInput(
                "contributions",
                self.contributions,
                "needs user, the column that says whose a record is",
            )
        for name in ("most_records", "most_groups", "most_each"):
            if getattr(self, name) is not None:
                raise InvalidInput(
                    name,
                    getattr(self, name),
                    "is not for a query about users (contributions): each is one row",
                )

    @property
    def contribution(self) -> ContributionLimit:
        """How much one unit may add."""
        return ContributionLimit(self.most_records or 1, self.most_groups, self.most_each)

    @property
    def about(self) -> dict[str, Any]:
        """What the claims of all statistics have in common."""
        adjacency = Adjacency.ZERO_OUT if self.shared else Adjacency.ADD_OR_REMOVE_ONE
        most = self.contributions or self.most_records or 1
        return {
            "unit": EXAMPLE if self.user is None else user_unit(most, shared=self.shared),
            "adjacency": adjacency if self.records is None else Adjacency.REPLACE_ONE,
            "delta": self.delta,
            "accountant": table.DEFAULT if self.delta else "basic",
            "records": self.records,
        }


@dataclass(frozen=True)
class QueryPlan:
    """Statistics with their claims, before any data is read."""

    query: language.Query
    columns: Schema
    terms: QueryTerms
    statistics: tuple[Statistic, ...]
    claims: tuple[StatisticClaim, ...]
    select: SqlQuery | None = None
    """What a SELECT says about released values."""

    def explain(self) -> list[str]:
        """What will be released: noise, error and cost of each statistic. Nothing is read."""
        told = []
        for statistic, claim in zip(self.statistics, self.claims, strict=True):
            held = f"{statistic.text}: {MECHANISMS[claim.mechanism]}"
            if claim.mechanism in ("laplace", "gaussian", "discrete-laplace"):
                error = spread_of(claim, self.query.level).deviation
                held += f", standard error {error:.4g} of each released number"
            if claim.mechanism == "stability":
                held += f", counts from {claim.threshold} on are released"
            cost = table.accountant(claim.accountant).curve(claim.event, claim.adjacency)
            held += f"; alone it costs epsilon {cost.epsilon(claim.delta):.4g}"
            told.append(held)
        total = f"all together: epsilon {self.terms.epsilon:g}, delta {self.terms.delta:g}"
        return [*told, total]

    @property
    def releases(self) -> int:
        """How often random bits are drawn."""
        return sum(claim.releases for claim in self.claims)


def plan(
    text: str,
    columns: Schema,
    terms: QueryTerms,
    public: Mapping[str, Any] | None = None,
    level: float | None = None,
) -> QueryPlan:
    """The claims of a query.

    Guarantees: the composition of their events, by the accountant that the report will name, is at
    most (epsilon, delta). The choice between Laplace and Gaussian noise is the one with the smaller
    errors, and depends on only the query, the schema and the terms.
    """
    select = None
    if terms.user is not None:
        for name in owner_columns("user", terms.user):
            check.one_of("user", name, columns.named)
    asked = columns if terms.contributions is None else per_person(terms.contributions)
    if sql.is_sql(text):
        select = sql.parse(text, asked.named, terms.user, public or {})
        query = select.query
    else:
        query = language.parse(text)
    if level is not None:
        query = replace(query, level=language.level_of(level))
        select = None if select is None else replace(select, query=query)
    statistics = tuple(functions.build(query, asked.named, terms.records, terms.user))
    if terms.delta == 0:
        claims = _pure(statistics, terms)
    else:
        both = [_calibrated(statistics, terms, family) for family in ("laplace", "gaussian")]
        claims = min(both, key=lambda made: _error(statistics, made))
    _rehearse(statistics, claims, asked, terms)
    return QueryPlan(query, columns, terms, statistics, claims, select)


def _rehearse(
    statistics: Sequence[Statistic],
    claims: Sequence[StatisticClaim],
    columns: Schema,
    terms: QueryTerms,
) -> None:
    """Answer the query on an empty table: what cannot be done for a public reason is refused before
    anything is reserved.
    """
    empty = MemoryEngine(PrivateTable({column.name: [] for column in columns.columns}, columns))
    for statistic, claim in zip(statistics, claims, strict=True):
        permit = mock_permit(claim.event, claim.releases, claim.name, claim.adjacency)
        known: dict[str, tuple[str, ...]] = dict.fromkeys(columns.named, ())
        statistic.knowing(known).release(empty, Spend(claim, terms.contribution, permit))


def _claims(
    statistics: Sequence[Statistic], terms: QueryTerms, family: str, share: float
) -> tuple[StatisticClaim, ...]:
    """Each statistic with its share: equal parts of epsilon or of zCDP, times its weight. A
    tenth of delta is for thresholds, where there are any.

    Guarantees: the caller composes these claims and compares them with what may be spent, so
    weights move noise from one statistic to another, and never the price of the query.
    """
    unknown = sum(isinstance(s, UnknownKeys) for s in statistics)
    delta, pure = terms.delta / (THRESHOLDS * unknown) if unknown else 0.0, terms.delta == 0
    mean = sum(s.weight for s in statistics) / len(statistics)
    made = []
    for s in statistics:
        part = s.weight / mean
        size = share * (part if pure else math.sqrt(part))
        made.append(
            s.claim(terms.contribution, BudgetShare(size, family, pure, delta), **terms.about)
        )
    return tuple(made)


def _pure(statistics: Sequence[Statistic], terms: QueryTerms) -> tuple[StatisticClaim, ...]:
    """Equal parts of epsilon, which add up."""
    share, accountant = terms.epsilon / len(statistics), table.accountant("basic")
    while True:
        claims = _claims(statistics, terms, "laplace", share)
        if accountant.curve(whole(claims), claims[0].adjacency).epsilon(0.0) <= terms.epsilon:
            return claims
        share *= DOWN


def _calibrated(
    statistics: Sequence[Statistic], terms: QueryTerms, family: str
) -> tuple[StatisticClaim, ...]:
    """Equal parts in zCDP, scaled together until the accountant says epsilon."""
    adjacency = Adjacency.parse(terms.about["adjacency"])
    noise = calibrate.noise(
        lambda t: whole(_claims(statistics, terms, family, 1 / t)),
        terms.epsilon,
        terms.delta,
        adjacency=adjacency,
    )
    return _claims(statistics, terms, family, 1 / noise)


def whole(claims: Sequence[StatisticClaim]) -> events.Event:
    """All that the claims release."""
    return (
        claims[0].event
        if len(claims) == 1
        else events.Composed(tuple(claim.event for claim in claims))
    )


def _error(statistics: Sequence[Statistic], claims: Sequence[StatisticClaim]) -> float:
    """The mean of the logarithms of the errors."""
    return sum(math.log(s.error(c)) for s, c in zip(statistics, claims, strict=True))
