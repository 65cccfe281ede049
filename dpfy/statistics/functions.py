"""The statistics by name: what each takes, and the public columns that it is built on. Nothing here
reads the data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.statistics.covariance import Covariance
from dpfy.statistics.groups import (
    AnyWhere,
    Bins,
    CaseGroups,
    DatePart,
    FoundWords,
    GroupBy,
    GroupKey,
    Where,
    listed,
)
from dpfy.statistics.language import AnyOf, CaseKey, Condition, Query, StatisticCall
from dpfy.statistics.moments import (
    CountStatistic,
    DistinctStatistic,
    MomentStatistic,
    TotalStatistic,
    UnfitStatistic,
)
from dpfy.statistics.quantiles import Quantiles, grid_of, share_of
from dpfy.statistics.selection import ModeStatistic, RangeStatistic, TopStatistic
from dpfy.statistics.statistic import Statistic, SumStatistic, number, of_size, words
from dpfy.statistics.t_test import MeanTest
from dpfy.statistics.tables import Accuracy, BinCounts, Calibration, Contingency, Margins
from dpfy.tables.columns import OTHER, PARTS, Column, Date, OpenColumn, RangedColumn, WordColumn

MOST_SHARES = 99
WEIGHT, WEIGHTS = "weight", (0.01, 100)
"""The option of every statistic: how many parts of the budget it gets, beside the others."""


@dataclass(frozen=True)
class StatisticRequest:
    """One statistic as it was asked, with the columns it may be asked of."""

    ask: StatisticCall
    text: str
    columns: Mapping[str, Column]
    groups: GroupBy
    records: int | None
    person: str | None = None

    def column(self, place: int = 0) -> Column:
        """The column that an argument names."""
        if len(self.ask.arguments) <= place:
            raise InvalidInput("query", str(self.ask), f"{self.ask.function} needs a column")
        return named(self.ask.function, self.ask.arguments[place], self.columns)

    def numbers(self, start: int) -> list[float]:
        """The arguments from `start` on, which must be numbers."""
        for argument in self.ask.arguments[start:]:
            if isinstance(argument, str):
                raise InvalidInput("query", str(self.ask), f"{argument!r} must be a number")
        return [float(argument) for argument in self.ask.arguments[start:]]

    def exactly(self, most: int, least: int | None = None) -> None:
        """Refuse another number of arguments."""
        least = most if least is None else least
        if not least <= len(self.ask.arguments) <= most:
            due = f"{least}" if least == most else f"{least} to {most}"
            raise InvalidInput(
                "query",
                str(self.ask),
                f"{self.ask.function} takes {due} argument{'s' * (most != 1)}",
            )

    def option(self, name: str) -> float | None:
        """A number given by name."""
        for key, value in self.ask.options:
            if key == name:
                return check.real(f"query {self.ask.function} {name}", value)
        return None

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        """A whole number given by name."""
        found = self.option(name)
        if found is None:
            return default
        if not found.is_integer():
            raise InvalidInput(f"query {self.ask.function} {name}", found, "must be a whole number")
        return check.integer(
            f"query {self.ask.function} {name}", int(found), least=least, most=most
        )


def _count(a: StatisticRequest) -> Statistic:
    a.exactly(0)
    return CountStatistic(a.text, a.groups, None)


def _distinct_persons(a: StatisticRequest) -> Statistic:
    a.exactly(1)
    column = a.column()
    if a.person is None:
        raise InvalidInput(
            "query distinct",
            column.name,
            "needs user, the column that says whose a record is: different persons are counted",
        )
    if "," in a.person:
        raise Unsupported("persons of records with several owners, counted", "ask count()")
    if column.name != a.person:
        raise InvalidInput(
            "query distinct",
            column.name,
            f"must be {a.person}, the column that says whose a record is",
        )
    return DistinctStatistic(a.text, a.groups, None, column)


def _unfit(a: StatisticRequest) -> Statistic:
    a.exactly(1)
    return UnfitStatistic(a.text, a.groups, None, a.column())


def _sum(a: StatisticRequest) -> Statistic:
    a.exactly(1)
    return TotalStatistic(a.text, a.groups, a.records, number("sum", a.column()))


def _moments(degree: int, root: bool = False) -> Callable[[StatisticRequest], Statistic]:
    def build(a: StatisticRequest) -> Statistic:
        a.exactly(1)
        return MomentStatistic(
            a.text, a.groups, a.records, number(a.ask.function, a.column()), degree, root
        )

    return build


def _mean_test(a: StatisticRequest) -> Statistic:
    a.exactly(2)
    column = number("ttest", a.column())
    (mean,) = a.numbers(1)
    if not column.low <= mean <= column.high:
        raise InvalidInput("query ttest", mean, f"must lie in the range of {column.name}")
    return MeanTest(a.text, a.groups, None, column, 2, mean=mean)


def _covariance(a: StatisticRequest) -> Statistic:
    a.exactly(32, 2)
    held = tuple(number("covariance", a.column(k)) for k in range(len(a.ask.arguments)))
    if len(set(held)) < len(held):
        raise InvalidInput("query", str(a.ask), "must not name one column twice")
    return Covariance(a.text, a.groups, None, held)


def _histogram(a: StatisticRequest) -> Statistic:
    column = a.column()
    if not isinstance(column, RangedColumn):
        a.exactly(1)
        return Contingency(a.text, a.groups, None, _distinct(a), margins=False)
    bins = _bins(a, column)
    of_size("histogram", a.groups.most * len(bins.labels))
    return BinCounts(a.text, a.groups, None, bins)


def _bins(a: StatisticRequest, column: RangedColumn) -> Bins:
    """Bins with the edges that are asked for, or so many of equal width."""
    edges = _days(a, column) if isinstance(column, Date) else a.numbers(1)
    if edges and a.option("bins") is not None:
        raise InvalidInput("query", str(a.ask), "takes edges or a number of bins, not both")
    if not edges:
        bins = a.whole("bins", 10, 1, 10**5)
        edges = [column.low + (column.high - column.low) * k / bins for k in range(bins)] + [
            column.high
        ]
    if len(edges) < 2 or any(not low < high for low, high in itertools.pairwise(edges)):
        raise InvalidInput(
            f"query {a.ask.function}", edges, "must have at least two edges that grow"
        )
    return Bins(column, tuple(edges))


def _days(a: StatisticRequest, column: Date) -> list[float]:
    """Edges that are dates, in days."""
    found = [column.value(str(argument)) for argument in a.ask.arguments[1:]]
    if None in found:
        rule = f"edges of {column.name} must be dates: '2020-01-31', say"
        raise InvalidInput("query", str(a.ask), rule)
    return [day for day in found if day is not None]


def _table(a: StatisticRequest) -> Statistic:
    a.exactly(8, 1)
    return Contingency(a.text, a.groups, None, _distinct(a), margins=len(a.ask.arguments) > 1)


def _margins(a: StatisticRequest) -> Statistic:
    a.exactly(12, 2)
    held = _distinct(a)
    return Margins(
        a.text, a.groups, None, held, a.whole("order", min(2, len(held) - 1), 1, len(held) - 1)
    )


def _distinct(a: StatisticRequest) -> tuple[WordColumn, ...]:
    held = tuple(words(a.ask.function, a.column(k)) for k in range(len(a.ask.arguments)))
    names = [column.name for column in (*held, *a.groups.by)]
    if len(set(names)) < len(names):
        raise InvalidInput(
            "query", str(a.ask), "must not name one column twice, nor one of the group-by"
        )
    of_size(a.ask.function, a.groups.most * math.prod(len(column.cells) for column in held))
    return held


def _quantiles(a: StatisticRequest) -> Statistic:
    shares = tuple(share_of(value) for value in a.numbers(1))
    if a.ask.function == "median":
        a.exactly(1)
        shares = (share_of(0.5),)
    if (
        not shares
        or len(shares) > MOST_SHARES
        or any(not low < high for low, high in itertools.pairwise(shares))
    ):
        raise InvalidInput(
            "query",
            str(a.ask),
            f"must name 1 to {MOST_SHARES} shares that grow: quantile(age, 0.25, 0.5)",
        )
    column = number(a.ask.function, a.column())
    return Quantiles(a.text, a.groups, None, column, shares, grid_of(column, a.option("step")))


def _end(end: str) -> Callable[[StatisticRequest], Statistic]:
    def build(a: StatisticRequest) -> Statistic:
        a.exactly(1)
        column = number(a.ask.function, a.column())
        return Quantiles(
            a.text, a.groups, None, column, (share_of(0.5),), grid_of(column, a.option("step")), end
        )

    return build


def _mode(a: StatisticRequest) -> Statistic:
    a.exactly(1)
    return ModeStatistic(a.text, a.groups, None, _distinct(a)[0])


def _top(a: StatisticRequest) -> Statistic:
    a.exactly(1)
    return TopStatistic(a.text, a.groups, None, a.column())


def _range(a: StatisticRequest) -> Statistic:
    a.exactly(1)
    if isinstance(column := a.column(), WordColumn):
        raise InvalidInput(
            "query range",
            column.name,
            "must be a column of numbers, or one that the schema ignores",
        )
    return RangeStatistic(a.text, a.groups, None, column)


def _accuracy(a: StatisticRequest) -> Statistic:
    a.exactly(2)
    return Accuracy(
        a.text, a.groups, a.records, words("accuracy", a.column(0)), words("accuracy", a.column(1))
    )


def _confusion(a: StatisticRequest) -> Statistic:
    a.exactly(2)
    return Contingency(a.text, a.groups, None, _distinct(a), margins=False)


def _calibration(a: StatisticRequest) -> Statistic:
    a.exactly(2)
    label = words("calibration", a.column(1))
    if len(label.words) != 2:
        raise InvalidInput(
            "query calibration",
            label.name,
            "must have two classes; the second is what is predicted",
        )
    column = number("calibration", a.column(0))
    return Calibration(a.text, a.groups, None, column, label, a.whole("bins", 10, 1, 1000))


FUNCTIONS: dict[str, tuple[Callable[[StatisticRequest], Statistic], tuple[str, ...], str]] = {
    "count": (_count, (), "count()"),
    "distinct": (_distinct_persons, (), "distinct(patient), also count(distinct patient)"),
    "unfit": (_unfit, (), "unfit(age): cells that do not fit the schema"),
    "sum": (_sum, (), "sum(age)"),
    "mean": (_moments(1), (), "mean(age)"),
    "variance": (_moments(2), (), "variance(age)"),
    "stddev": (_moments(2, root=True), (), "stddev(age)"),
    "ttest": (_mean_test, (), "ttest(age, 40): mean and p-value, for sampling and noise"),
    "covariance": (_covariance, (), "covariance(age, hours)"),
    "histogram": (
        _histogram,
        ("bins",),
        "histogram(age, 20, 40, 60), histogram(age, bins=5), histogram(sex)",
    ),
    "median": (_quantiles, ("step",), "median(age)"),
    "quantile": (
        _quantiles,
        ("step",),
        "quantile(age, 0.25, 0.5, 0.75), quantile(age, 0.9, step=0.5)",
    ),
    "min": (_end("low"), ("step",), "min(age)"),
    "max": (_end("high"), ("step",), "max(age)"),
    "mode": (_mode, (), "mode(job)"),
    "top": (_top, (), "top(word)"),
    "range": (_range, (), "range(income)"),
    "table": (_table, (), "table(sex, race)"),
    "margins": (_margins, ("order",), "margins(sex, race, income, order=2)"),
    "accuracy": (_accuracy, (), "accuracy(income, predicted)"),
    "confusion": (_confusion, (), "confusion(income, predicted)"),
    "calibration": (_calibration, ("bins",), "calibration(probability, income)"),
}
"""name -> (builder, options, examples)."""


def build(
    query: Query,
    columns: Mapping[str, Column],
    records: int | None = None,
    person: str | None = None,
) -> list[Statistic]:
    """The statistics of a query. `records` is the public number of records, if there is one;
    `person` the column that says whose a record is.

    Groups of words that are not public (``by top(word)``) need the release that finds them, which
    comes first.
    """
    where = _where(query.where, columns)
    keys = tuple(_key(key, columns) for key in query.by)
    if len({key.name for key in keys}) < len(keys):
        raise InvalidInput(
            "query by", ", ".join(map(str, query.by)), "must not name one column twice"
        )
    groups = GroupBy(keys, where)
    of_size("by", groups.most)
    found: list[Statistic] = []
    for key, said in zip(keys, query.by, strict=True):
        if isinstance(key, FoundWords):
            text = Query((StatisticCall(*_top_call(said)),), (), query.where, query.level).texts[0]
            found.append(TopStatistic(text, GroupBy((), where), None, key.column))
    for ask, text in zip(query.asks, query.texts, strict=True):
        check.one_of("query statistic", ask.function, FUNCTIONS)
        make, options, _ = FUNCTIONS[ask.function]
        _require_options(ask, (*options, WEIGHT))
        known = None if groups.by or groups.where else records
        mine = replace(groups, where=where + _where(ask.where, columns)) if ask.where else groups
        asked = StatisticRequest(ask, text, columns, mine, None if ask.where else known, person)
        weight = asked.option(WEIGHT)
        made = _sized(make(asked))
        found.append(made if weight is None else replace(made, weight=_weight(weight)))
    return found


def _top_call(key: str | StatisticCall | CaseKey) -> tuple[str, tuple[str | float, ...]]:
    assert isinstance(key, StatisticCall)
    return key.function, key.arguments


def _weight(value: float) -> float:
    if not WEIGHTS[0] <= value <= WEIGHTS[1]:
        raise InvalidInput(
            "query weight", value, f"must be a number from {WEIGHTS[0]:g} to {WEIGHTS[1]:g}"
        )
    return value


def _require_options(ask: StatisticCall, options: tuple[str, ...]) -> None:
    for key, _ in ask.options:
        if key not in options:
            due = f"takes {', '.join(options)}" if options else "takes no options"
            raise InvalidInput(f"query {ask.function}", key, f"{ask.function} {due}")


def _key(key: str | StatisticCall | CaseKey, columns: Mapping[str, Column]) -> GroupKey:
    """What groups are made of: a column of words, conditions, or a function of a column."""
    if isinstance(key, CaseKey):
        branches = tuple((_where(terms, columns), label) for terms, label in key.branches)
        return CaseGroups(key.name, branches, OTHER if key.other is None else key.other)
    if isinstance(key, str):
        column = named("by", key, columns)
        if isinstance(column, RangedColumn):
            way = f"month({key})" if isinstance(column, Date) else f"bins({key}, 20, 40, 60)"
            raise InvalidInput("query by", key, f"must be grouped: by {way}, say")
        if isinstance(column, OpenColumn):
            raise InvalidInput(
                "query by",
                key,
                f"must be a column whose categories are in the schema; top({key}) finds words that "
                f"many records have",
            )
        return words("by", column)
    check.one_of("query by", key.function, KEYS)
    make, options = KEYS[key.function]
    _require_options(key, options)
    return make(StatisticRequest(key, str(key), columns, GroupBy(), None))


def _by_bins(a: StatisticRequest) -> GroupKey:
    return _bins(a, number("bins", a.column()))


def _by_part(a: StatisticRequest) -> GroupKey:
    a.exactly(1)
    if not isinstance(column := a.column(), Date):
        raise InvalidInput(
            f"query by {a.ask.function}", column.name, "must be a column of dates (kind = date)"
        )
    return DatePart(column, a.ask.function)


def _by_top(a: StatisticRequest) -> GroupKey:
    a.exactly(1)
    return FoundWords(a.column())


KEYS: dict[str, tuple[Callable[[StatisticRequest], GroupKey], tuple[str, ...]]] = {
    "bins": (_by_bins, ("bins",)),
    "top": (_by_top, ()),
    **dict.fromkeys(PARTS, (_by_part, ())),
}
"""Functions of a column that groups are made of: name -> (builder, options)."""


def _sized(made: Statistic) -> Statistic:
    """A statistic that releases no more numbers than can be, over groups that it can have."""
    if isinstance(made, SumStatistic):
        of_size("cells", made.groups.most * made.cells * max(made.width("l1"), made.width("l2")))
    elif made.groups.open:
        raise Unsupported(
            f"{made.text}: it makes a choice for each group, and how many groups there are is not "
            f"public",
            "ask top(...) first, write the words that it finds into the schema as categories, and "
            "group by the column",
        )
    elif isinstance(made, Quantiles):
        of_size("values", made.groups.count * len(made.shares) * 64)
    return made


def _where(terms: tuple[Condition | AnyOf, ...], columns: Mapping[str, Column]) -> Where:
    """Conditions with their columns."""
    return tuple(
        AnyWhere(tuple(_where(choice, columns) for choice in term.choices))
        if isinstance(term, AnyOf)
        else (_compared(term, columns), term)
        for term in terms
    )


def _compared(condition: Condition, columns: Mapping[str, Column]) -> Column:
    """The column of a condition, if the comparison makes sense for it."""
    column = named("where", condition.column, columns)
    values = listed(condition.value)
    if condition.comparison == "is":
        return column
    if isinstance(column, WordColumn):
        if condition.comparison not in ("=", "!=", "in"):
            raise InvalidInput(
                "query where", str(condition), "words are compared with =, != and in only"
            )
        for value in values:
            check.one_of(f"query where {column.name}", value, column.words)
    elif isinstance(column, OpenColumn):
        raise InvalidInput("query where", column.name, "must be a column that the schema describes")
    elif isinstance(column, Date):
        if any(column.value(str(value)) is None for value in values):
            raise InvalidInput(
                "query where", str(condition), f"{column.name} is compared with '2020-01-31', say"
            )
    elif any(isinstance(value, str) for value in values):
        raise InvalidInput(
            "query where", str(condition), f"{column.name} is compared with a number"
        )
    return column


def named(where: str, name: str | float, columns: Mapping[str, Column]) -> Column:
    """The public column of that name."""
    if not isinstance(name, str):
        raise InvalidInput(f"query {where}", name, "must be the name of a column")
    return columns[check.one_of(f"query {where}", name, columns)]
