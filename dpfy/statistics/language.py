"""The language of queries: what is asked, in one line.

    mean(age), count() by sex where income = ">50K"

    query      statistic {, statistic} [by group {, group}] [where terms] [level number]
    statistic  name(argument, ..., key=value)
    group      column, or a function of one: bins(age, 20, 40, 60)
    terms      term {and term} {or term {and term}}
    term       column = value     also != < <= > >=, column in (value, ...), (terms),
               column is missing, column is present

`by`, `where` and `level` hold for all statistics of the query. `and` binds closer than `or`. A name
or a word with other characters than letters, digits, _ . - is written in quotes. avg(x) is mean(x),
count(*) is count(), and count(distinct x) is distinct(x). Nothing here knows the columns, and
nothing reads the data.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.statistics.answer import LEVEL

MOST_TEXT, MOST_ASKS, MOST_PARTS, MOST_LISTED, MOST_NESTED = 2000, 50, 8, 100, 8
LEVELS = (0.5, 0.999)
"""The least and the highest level of confidence of an interval."""
TOKEN = re.compile(
    r"\s*(?:(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))|(?P<name>[A-Za-z_][\w.-]*)"
    r"|\"(?P<double>[^\"]*)\"|'(?P<single>[^']*)'|(?P<mark>!=|<=|>=|[(),=<>*]))"
)
COMPARISONS = ("=", "!=", "<", "<=", ">", ">=")
WORDS = ("by", "where", "and", "or")
ALIASES = {"avg": "mean"}


@dataclass(frozen=True)
class StatisticCall:
    """One statistic as it was written: its name, its arguments in order, those by name, and the
    conditions on the records of this one alone.
    """

    function: str
    arguments: tuple[str | float, ...]
    options: tuple[tuple[str, str | float], ...] = ()
    where: tuple[Condition | AnyOf, ...] = ()

    def __str__(self) -> str:
        only = f" where {' and '.join(map(str, self.where))}" if self.where else ""
        return f"{self.call}{only}"

    @property
    def call(self) -> str:
        """The statistic without its conditions."""
        shown = [written(a) for a in self.arguments] + [
            f"{key}={written(value)}" for key, value in self.options
        ]
        return f"{self.function}({', '.join(shown)})"


@dataclass(frozen=True)
class Condition:
    """Which records are counted: `column` compared with `value`, or with several values where the
    comparison is `in`; or, where it is `is`, a cell that is missing or present.
    """

    column: str
    comparison: str
    value: str | float | tuple[str | float, ...]

    def __str__(self) -> str:
        if self.comparison == "is":
            value = str(self.value)
        elif isinstance(self.value, tuple):
            value = f"({', '.join(written(v, word=True) for v in self.value)})"
        else:
            value = written(self.value, word=True)
        return f"{written(self.column)} {self.comparison} {value}"

    @property
    def columns(self) -> set[str]:
        """The columns it reads."""
        return {self.column}


@dataclass(frozen=True)
class AnyOf:
    """Which records are counted: those for which all terms of at least one of `choices` hold."""

    choices: tuple[tuple[Condition | AnyOf, ...], ...]

    def __str__(self) -> str:
        return f"({' or '.join(' and '.join(map(str, terms)) for terms in self.choices)})"

    @property
    def columns(self) -> set[str]:
        """The columns it reads."""
        return {name for terms in self.choices for term in terms for name in term.columns}


@dataclass(frozen=True)
class CaseKey:
    """Groups by conditions: the first of `branches` whose conditions hold gives the group its
    label; all other records are `other`, or nothing's.
    """

    name: str
    branches: tuple[tuple[tuple[Condition | AnyOf, ...], str], ...]
    other: str | None = None

    def __str__(self) -> str:
        told = [
            f"when {' and '.join(map(str, terms))} then {written(label, word=True)}"
            for terms, label in self.branches
        ]
        last = [] if self.other is None else [f"else {written(self.other, word=True)}"]
        return f"{written(self.name)}: case {' '.join([*told, *last])} end"

    @property
    def columns(self) -> set[str]:
        """The columns it reads."""
        return {name for terms, _ in self.branches for term in terms for name in term.columns}


@dataclass(frozen=True)
class Query:
    """Everything that is asked at once."""

    asks: tuple[StatisticCall, ...]
    by: tuple[str | StatisticCall | CaseKey, ...] = ()
    where: tuple[Condition | AnyOf, ...] = ()
    level: float = LEVEL

    @property
    def texts(self) -> tuple[str, ...]:
        """Each statistic as a query of its own."""
        keys = [written(key) if isinstance(key, str) else str(key) for key in self.by]
        tail = f" by {', '.join(keys)}" if keys else ""
        end = f" level {written(self.level)}" if self.level != LEVEL else ""
        wheres = [" and ".join(map(str, (*self.where, *ask.where))) for ask in self.asks]
        return tuple(
            f"{ask.call}{tail}{f' where {where}' if where else ''}{end}"
            for ask, where in zip(self.asks, wheres, strict=True)
        )

    @property
    def columns(self) -> set[str]:
        """The columns that the query names."""
        calls = [*self.asks, *(key for key in self.by if isinstance(key, StatisticCall))]
        named = {a for call in calls for a in call.arguments if isinstance(a, str)}
        named |= {key for key in self.by if isinstance(key, str)}
        named |= {name for key in self.by if isinstance(key, CaseKey) for name in key.columns}
        terms = [*self.where, *(term for ask in self.asks for term in ask.where)]
        return named.union(*(term.columns for term in terms))


def written(value: str | float, *, word: bool = False) -> str:
    """A name, a word or a number as the language writes it."""
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if not word and re.fullmatch(r"[A-Za-z_][\w.-]*", value) and value not in WORDS:
        return value
    return f"'{value}'" if '"' in value else f'"{value}"'


def level_of(value: float) -> float:
    """A level of confidence."""
    if not LEVELS[0] <= check.real("level", value) <= LEVELS[1]:
        rule = f"must be a number from {LEVELS[0]:g} to {LEVELS[1]:g}"
        raise InvalidInput("level", value, rule)
    return float(value)


def parse(text: str) -> Query:
    """The query that a line of text asks; anything else is :class:`InvalidInput` that shows where
    it went wrong.
    """
    if not isinstance(text, str) or not text.strip() or len(text) > MOST_TEXT:
        raise InvalidInput(
            "query",
            text,
            f'must be 1 to {MOST_TEXT} characters such as "mean(age), count() by sex"',
        )
    if not text.isprintable():
        raise InvalidInput("query", text, "must be one line of printable characters")
    return _Reader(text).query()


@dataclass
class _Reader:
    text: str
    place: int = 0
    tokens: list[tuple[str, str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        end = len(self.text.rstrip())
        at = 0
        while at < end:
            found = TOKEN.match(self.text, at)
            if found is None:
                raise InvalidInput(
                    "query", self.text[at : at + 20].strip(), self._where(at, "cannot be read")
                )
            kind = str(found.lastgroup)
            self.tokens.append(
                (
                    "word" if kind in ("double", "single") else kind,
                    str(found.group(kind)),
                    found.start(kind),
                )
            )
            at = found.end()

    def query(self) -> Query:
        asks = self._list(self._ask, MOST_ASKS)
        by = self._list(self._key, MOST_PARTS) if self._take_word("by") else ()
        where = self._terms(0) if self._take_word("where") else ()
        level = self._level() if self._take_word("level") else LEVEL
        if self.place < len(self.tokens):
            raise self._wrong("is not expected here; the order is: statistics, by, where, level")
        if len(set(asks)) < len(asks):
            raise InvalidInput("query", self.text, "must not ask one statistic twice")
        if len(set(by)) < len(by):
            raise InvalidInput(
                "query by", ", ".join(map(str, by)), "must not name one column twice"
            )
        return Query(asks, by, where, level)

    def _list(self, read, most: int, between: str = ",") -> tuple:  # type: ignore[no-untyped-def, type-arg]
        found = [read()]
        while self._take_word(between) if between != "," else self._take(","):
            found.append(read())
        if len(found) > most:
            raise InvalidInput(
                "query", self.text[:40], f"must have at most {most} of them in a row"
            )
        return tuple(found)

    def _ask(self) -> StatisticCall:
        kind, name, _ = self._next("a statistic such as mean(age)")
        if kind != "name" or name in WORDS:
            raise self._wrong("must be a statistic such as mean(age)", back=True)
        if not self._take("("):
            raise self._wrong(f"must be followed by ( in {name}(...)", back=True)
        name = name.lower()
        arguments: list[str | float] = []
        options: list[tuple[str, str | float]] = []
        while not self._take(")"):
            if (arguments or options) and not self._take(","):
                raise self._wrong("needs a comma before it, or a ) is missing")
            kind, value, _ = self._next("an argument")
            first = name == "count" and not arguments and not options
            if first and value == "*" and kind == "mark" and self._take(")"):
                return StatisticCall(name, ())
            if first and (kind, value) == ("name", "distinct") and self._is(("name", "word")):
                name, kind, value = "distinct", "name", self._name()
            if kind == "name" and self._take("="):
                options.append((value, self._value()))
            elif kind == "mark":
                raise self._wrong("is not an argument", back=True)
            elif options:
                raise self._wrong("stands after an option; arguments come first", back=True)
            else:
                arguments.append(_number(value) if kind == "number" else value)
        if len({key for key, _ in options}) < len(options):
            raise InvalidInput("query", name, "must not give one option twice")
        return StatisticCall(ALIASES.get(name, name), tuple(arguments), tuple(sorted(options)))

    def _key(self) -> str | StatisticCall:
        """A column that groups are made of, or a function of one."""
        if self._is(("name",)) and self._is(("mark",), "(", 1):
            return self._ask()
        return self._name()

    def _level(self) -> float:
        """The chance that an interval holds."""
        kind, value, _ = self._next("a level of confidence")
        if kind != "number" or not LEVELS[0] <= float(value) <= LEVELS[1]:
            raise self._wrong(f"must be a number from {LEVELS[0]:g} to {LEVELS[1]:g}", back=True)
        return float(value)

    def _terms(self, depth: int) -> tuple[Condition | AnyOf, ...]:
        """Terms that must all hold."""
        choices = self._list(lambda: self._all(depth), MOST_PARTS, "or")
        return choices[0] if len(choices) == 1 else (AnyOf(choices),)

    def _all(self, depth: int) -> tuple[Condition | AnyOf, ...]:
        parts = self._list(lambda: self._term(depth), MOST_PARTS, "and")
        return tuple(term for part in parts for term in part)

    def _term(self, depth: int) -> tuple[Condition | AnyOf, ...]:
        if not self._take("("):
            return (self._condition(),)
        if depth >= MOST_NESTED:
            raise self._wrong(f"must not stand in more than {MOST_NESTED} parentheses", back=True)
        found = self._terms(depth + 1)
        if not self._take(")"):
            raise self._wrong("is not expected here; a ) is missing")
        return found

    def _condition(self) -> Condition:
        column, (kind, mark, _) = self._name(), self._next("a comparison")
        if (kind, mark) == ("name", "in"):
            if not self._take("("):
                raise self._wrong("must be followed by values in parentheses", back=True)
            values = self._list(self._value, MOST_LISTED)
            if not self._take(")"):
                raise self._wrong("is not expected here; a ) is missing")
            return Condition(column, mark, values)
        if (kind, mark) == ("name", "is") and self._is(("name",)):
            _, value, _ = self._next("missing or present")
            if value not in ("missing", "present"):
                raise self._wrong("must be missing or present", back=True)
            return Condition(column, mark, value)
        if kind != "mark" or mark not in COMPARISONS:
            raise self._wrong(f"must be one of {' '.join(COMPARISONS)} in", back=True)
        return Condition(column, mark, self._value())

    def _name(self) -> str:
        kind, value, _ = self._next("the name of a column")
        if kind not in ("name", "word") or (kind == "name" and value in WORDS):
            raise self._wrong("must be the name of a column", back=True)
        return value

    def _value(self) -> str | float:
        kind, value, _ = self._next("a value")
        if kind == "mark":
            raise self._wrong("must be a value", back=True)
        return _number(value) if kind == "number" else value

    def _next(self, due: str) -> tuple[str, str, int]:
        if self.place >= len(self.tokens):
            raise InvalidInput("query", self.text[-40:], f"ends where {due} must stand")
        self.place += 1
        return self.tokens[self.place - 1]

    def _is(self, kinds: tuple[str, ...], value: str = "", ahead: int = 0) -> bool:
        """Whether the next token, or one after it, is of these kinds, and this value."""
        if self.place + ahead >= len(self.tokens):
            return False
        kind, held, _ = self.tokens[self.place + ahead]
        return kind in kinds and value in ("", held)

    def _take(self, mark: str, kind: str = "mark") -> bool:
        found = self.place < len(self.tokens) and self.tokens[self.place][:2] == (kind, mark)
        self.place += found
        return found

    def _take_word(self, word: str) -> bool:
        return self._take(word, "name")

    def _wrong(self, rule: str, *, back: bool = False) -> InvalidInput:
        place = min(self.place - back, len(self.tokens) - 1)
        _, value, at = self.tokens[place]
        return InvalidInput("query", value, self._where(at, rule))

    def _where(self, at: int, rule: str) -> str:
        return f"at character {at + 1}: {rule}"


def _number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise InvalidInput("query", text, "must be a finite number")
    return value
