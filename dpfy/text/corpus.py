"""Private texts, and whose each of them is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Person, Unit, single_owner
from dpfy.runs.dataset import Dataset
from dpfy.tables.columns import OpenColumn, Text
from dpfy.tables.table import PrivateTable

DOCUMENT = Unit("document")
"""A text as the unit of privacy: all of it, however much of it is read."""


class Texts:
    """Private texts, for `dpfy.synthesize` and `dpfy.text.train_tokenizer`.

        made = dpfy.synthesize(dpfy.Texts(reviews), epsilon=3.0, records=20_000)

    Args:
        given: A list of strings; a function that gives one, and is called when the price is
            reserved; or a file (.jsonl, .csv, .parquet) or table with a column of texts.
        length: How many tokens of a text are read, from its start.
        column: The column of a table that holds the texts.

    Raises:
        InvalidInput: What is given are not texts, or `length` is not a positive whole number.

    Guarantees: nothing is read here, and no text that this object makes shows anything of it.

    Example:
        >>> import dpfy
        >>> dpfy.Texts(["a private review"], length=32).length
        32
    """

    def __init__(
        self,
        given: Sequence[str] | Callable[[], Sequence[str]] | Any,
        *,
        length: int = 64,
        column: str = "text",
    ) -> None:
        if isinstance(given, str) and not given.lower().removesuffix(".gz").endswith(TABLES):
            rule = (
                "must be a list of strings, one for each text, a function that gives one, or a "
                "file (.jsonl, .csv, .parquet)"
            )
            raise InvalidInput("texts", "one string", rule)
        self.given, self.length = given, check.integer("length", length)
        self.column = check.one_line("column", column)

    def __repr__(self) -> str:
        return f"Texts(the first {self.length} tokens of each)"


TABLES = (".jsonl", ".csv", ".tsv", ".parquet", ".pq")


@dataclass(frozen=True)
class Corpus:
    """Texts, and of a corpus with owners the number of the owner of each. Private."""

    texts: list[str] = field(repr=False)
    owners: NDArray[np.int64] | None = field(default=None, repr=False)

    def units(self, at_most: int | None = None) -> list[list[str]]:
        """The texts of each unit: of each owner the first `at_most`; without owners, one text.

        Guarantees: what is read of a unit depends on the texts of that unit alone.
        """
        if self.owners is None:
            return [[text] for text in self.texts]
        found: dict[int, list[str]] = {}
        for text, owner in zip(self.texts, self.owners.tolist(), strict=True):
            mine = found.setdefault(owner, [])
            if at_most is None or len(mine) < at_most:
                mine.append(text)
        return list(found.values())


def corpus_of(held: Dataset) -> Corpus:
    """The texts of a data set. Rows without a text, and rows that name no owner, are left out.

    Raises:
        InvalidInput: The data are no texts, or have no owners where persons are protected.
    """
    source, person = held.source, held.unit
    single_owner("texts", None if person is None else person.column)
    texts = source if isinstance(source, Texts) else None
    given = source if texts is None else texts.given
    if callable(given):
        given = given()
    if isinstance(given, list | tuple):
        if person is not None:
            rule = "needs a table with the texts and that column: Texts(frame, column=...)"
            raise InvalidInput("unit", f"dpfy.Person({person.column!r})", rule)
        if not all(isinstance(text, str) for text in given):
            rule = "must be a list of strings, one for each text"
            raise InvalidInput("texts", type(given).__name__, rule)
        return Corpus(list(given))
    column = _column(held) if texts is None else texts.column
    return _of_table(given, column, person)


def _column(held: Dataset) -> str:
    """The column of texts of a data set with a schema."""
    found = [column.name for column in held.schema.columns if isinstance(column, Text)]
    if len(found) != 1:
        rule = "must have one column of text, dpfy.Text(...), or give dpfy.Texts(..., column=...)"
        raise InvalidInput("schema", f"{len(found)} columns of text", rule)
    return found[0]


def _of_table(given: Any, column: str, person: Person | None) -> Corpus:
    table = PrivateTable(given, [OpenColumn(column)], person.column if person else None)
    found = table.texts(column)
    if table.owners is None:
        return Corpus([text for text in found if text])
    pairs = [(t, o) for t, o in zip(found, table.owners.tolist(), strict=True) if t and o >= 0]
    return Corpus([text for text, _ in pairs], np.array([who for _, who in pairs], np.int64))
