"""The answers of a query as a table: in a terminal, in a notebook, as a frame and as a picture."""

from __future__ import annotations

import html
import re
from collections import Counter
from typing import Any, SupportsIndex, overload

from dpfy.core import errors
from dpfy.core.errors import InvalidInput
from dpfy.statistics.answer import LEVEL, Answer, percent, shown

MOST_ROWS = 60
"""Rows that a terminal or a notebook shows; `to_frame` has all."""
HEAD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^"'])*?(?= (?:by|where|level) |$)""")


class Answers(tuple[Answer, ...]):
    """The answers of a query, in their order. Printed, they are a table."""

    def __repr__(self) -> str:
        return "\n".join(self.lines(MOST_ROWS)) or "no answers"

    __str__ = __repr__

    @overload
    def __getitem__(self, place: SupportsIndex) -> Answer: ...
    @overload
    def __getitem__(self, place: slice) -> Answers: ...
    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        return Answers(found) if isinstance(place, slice) else found

    @property
    def level(self) -> float:
        """The level of confidence of the intervals."""
        return self[0].level if self else LEVEL

    @property
    def statistics(self) -> list[str]:
        """What was asked, each once."""
        return list(dict.fromkeys(answer.statistic for answer in self))

    @property
    def places(self) -> list[str]:
        """What the answers are distinguished by: the columns of groups and cells."""
        return list(dict.fromkeys(name for answer in self for name in answer.place))

    def lines(self, most: int | None = None) -> list[str]:
        """The table as text, at most so many rows. A note of several rows stands once, below."""
        head, rows, below = self._cells(most)
        if not rows:
            return []
        widths = [max(len(row[k]) for row in [head, *rows]) for k in range(len(head))]
        left = len(head) - 4
        return [
            *(
                "  ".join(
                    cell.ljust(width) if k < left or k == len(head) - 1 else cell.rjust(width)
                    for k, (cell, width) in enumerate(zip(row, widths, strict=True))
                ).rstrip()
                for row in [head, *rows]
            ),
            *below,
        ]

    def _repr_html_(self) -> str:
        head, rows, below = self._cells(MOST_ROWS)

        def row(cells: list[str], tag: str) -> str:
            return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)

        body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
        notes = "".join(f"<p>{html.escape(line)}</p>" for line in below)
        return (
            f"<table><thead><tr>{row(head, 'th')}</tr></thead><tbody>{body}</tbody></table>{notes}"
        )

    def to_frame(self) -> Any:
        """A pandas frame with a row for each answer: what was asked, a column for each column of
        groups and cells, then value, low and high (the ends of the interval), standard_error, note.
        """
        try:
            import pandas
        except ImportError:
            raise errors.missing("to_frame()", "pandas") from None
        places = self.places
        rows = [
            [
                a.statistic,
                *(a.place.get(name) for name in places),
                a.value,
                *(a.interval or (None, None)),
                a.standard_error,
                a.note,
            ]
            for a in self
        ]
        named = [f"{p} (group)" if p in FIELDS else p for p in places]
        return pandas.DataFrame(rows, columns=["statistic", *named, *FIELDS[1:]])

    def plot(self, statistic: str | None = None, axes: Any = None) -> Any:
        """Bars with their intervals, on `axes` or new ones; the axes.

        Of several statistics each has axes of its own, which are returned as an array, as
        ``pyplot.subplots`` does; or name one of `statistics`.

        Args:
            statistic: Draw this one alone.
            axes: Matplotlib axes to draw on; one for each statistic.

        Returns:
            The axes.

        Raises:
            InvalidInput: No answer of it is a number, or there is no such statistic.
        """
        numeric = [a for a in self if isinstance(a.value, int | float)]
        asked = [s for s in self.statistics if any(a.statistic == s for a in numeric)]
        if statistic is not None:
            if statistic not in asked:
                raise InvalidInput(
                    "statistic", statistic, f"must be one of {', '.join(asked) or '(no numbers)'}"
                )
            asked = [statistic]
        if not asked:
            raise InvalidInput("answers", len(self), "must hold numbers to be drawn")
        import numpy as np

        if axes is None:
            from matplotlib import pyplot

            _, axes = pyplot.subplots(len(asked), 1, layout="constrained")
        drawn = np.ravel(np.asarray(axes, object))
        if len(drawn) != len(asked):
            raise InvalidInput("axes", len(drawn), f"must be {len(asked)}, one for each statistic")
        for place, name in zip(drawn, asked, strict=True):
            _draw(place, name, [a for a in numeric if a.statistic == name])
        return axes

    def _cells(self, most: int | None) -> tuple[list[str], list[list[str]], list[str]]:
        """The head, the rows and the lines below."""
        places, several = self.places, Counter(a.note for a in self if a.note)
        marks = {note: f"({k})" for k, note in enumerate(_repeated(several), start=1)}
        head = ["", *places, "answer", f"{percent(self.level)} interval", "standard error", ""]
        rows = [
            [
                str(HEAD.match(a.statistic)[0]),  # type: ignore[index]  # matches every text
                *(str(a.place.get(name, "")) for name in places),
                shown(a.value),
                "" if a.interval is None else f"{shown(a.interval[0])} to {shown(a.interval[1])}",
                "" if a.standard_error is None else f"{a.standard_error:.4g}",
                marks.get(a.note, a.note),
            ]
            for a in self[:most]
        ]
        below = [f"{mark} {note}" for note, mark in marks.items()]
        if most is not None and len(self) > most:
            below.insert(0, f"... and {len(self) - most} more")
        return head, rows, below


FIELDS = ("statistic", "value", "low", "high", "standard_error", "note")


def _repeated(several: Counter[str]) -> list[str]:
    return [note for note, count in several.items() if count > 1]


def _draw(axes: Any, name: str, answers: list[Answer]) -> None:
    """Bars of one statistic."""
    values = [float(a.value) for a in answers]  # type: ignore[arg-type]  # numbers alone
    labels = [", ".join(map(str, a.place.values())) for a in answers]
    ends = [a.interval or (v, v) for a, v in zip(answers, values, strict=True)]
    below = [max(v - low, 0.0) for v, (low, _) in zip(values, ends, strict=True)]
    above = [max(high - v, 0.0) for v, (_, high) in zip(values, ends, strict=True)]
    axes.bar(range(len(values)), values, color="tab:blue", alpha=0.7)
    if any(a.interval is not None for a in answers):
        axes.errorbar(
            range(len(values)), values, yerr=[below, above], fmt="none", color="black", capsize=3
        )
    axes.set_xticks(range(len(labels)), labels, rotation=45 if max(map(len, labels)) > 8 else 0)
    axes.set_title(f"{name} ({percent(answers[0].level)} intervals)")
