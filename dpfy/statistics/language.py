"""The language of queries: what is asked, in one line.

    mean(age), count() by sex where income = ">50K"

    query      statistic {, statistic} [by column {, column}] [where condition {and condition}]
    statistic  name(argument, ..., key=value)
    condition  column = value     also != < <= > >=

`by` and `where` hold for all statistics of the query. A name or a word with other characters than
letters, digits, _ . - is written in quotes. Nothing here knows the columns, and nothing reads the
data.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from dpfy.core.errors import InvalidInput

MOST_TEXT, MOST_ASKS, MOST_PARTS = 2000, 50, 8
TOKEN = re.compile(
    r"\s*(?:(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))|(?P<name>[A-Za-z_][\w.-]*)"
    r"|\"(?P<double>[^\"]*)\"|'(?P<single>[^']*)'|(?P<mark>!=|<=|>=|[(),=<>]))"
)
COMPARISONS = ("=", "!=", "<", "<=", ">", ">=")
WORDS = ("by", "where", "and")


@dataclass(frozen=True)
class StatisticCall:
    """One statistic as it was written: its name, its arguments in order, and those by name."""

    function: str
    arguments: tuple[str | float, ...]
    options: tuple[tuple[str, str | float], ...] = ()

    def __str__(self) -> str:
        shown = [written(a) for a in self.arguments] + [
            f"{key}={written(value)}" for key, value in self.options
        ]
        return f"{self.function}({', '.join(shown)})"


@dataclass(frozen=True)
class Condition:
    """Which records are counted: `column` compared with `value`."""

    column: str
    comparison: str
    value: str | float

    def __str__(self) -> str:
        return f"{written(self.column)} {self.comparison} {written(self.value, word=True)}"


@dataclass(frozen=True)
class Query:
    """Everything that is asked at once."""

    asks: tuple[StatisticCall, ...]
    by: tuple[str, ...] = ()
    where: tuple[Condition, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """Each statistic as a query of its own."""
        tail = f" by {', '.join(written(b) for b in self.by)}" if self.by else ""
        tail += f" where {' and '.join(str(c) for c in self.where)}" if self.where else ""
        return tuple(f"{ask}{tail}" for ask in self.asks)


def written(value: str | float, *, word: bool = False) -> str:
    """A name, a word or a number as the language writes it."""
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if not word and re.fullmatch(r"[A-Za-z_][\w.-]*", value) and value not in WORDS:
        return value
    return f"'{value}'" if '"' in value else f'"{value}"'


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
        by = self._list(self._name, MOST_PARTS) if self._take_word("by") else ()
        where = self._list(self._condition, MOST_PARTS, "and") if self._take_word("where") else ()
        if self.place < len(self.tokens):
            raise self._wrong("is not expected here; the order is: statistics, by, where")
        if len(set(asks)) < len(asks):
            raise InvalidInput("query", self.text, "must not ask one statistic twice")
        if len(set(by)) < len(by):
            raise InvalidInput("query by", ", ".join(by), "must not name one column twice")
        return Query(tuple(asks), tuple(by), tuple(where))

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
        arguments: list[str | float] = []
        options: list[tuple[str, str | float]] = []
        while not self._take(")"):
            if (arguments or options) and not self._take(","):
                raise self._wrong("needs a comma before it, or a ) is missing")
            kind, value, _ = self._next("an argument")
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
        return StatisticCall(name.lower(), tuple(arguments), tuple(sorted(options)))

    def _condition(self) -> Condition:
        column, (kind, mark, _) = self._name(), self._next("a comparison")
        if kind != "mark" or mark not in COMPARISONS:
            raise self._wrong(f"must be one of {' '.join(COMPARISONS)}", back=True)
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
