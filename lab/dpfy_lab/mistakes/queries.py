"""Mistakes of queries: budgets that are not composed, noise that two answers share, data that is read
before it is paid for, and what a report tells beside the answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.values import mock_permit
from dpfy.mechanisms.exact import Bits
from dpfy_lab.checks.queries import BILLED, NOISE, ORDER, REPLAYED
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch

HOME = "dpfy.queries"
RUN, PLAN = f"{HOME}.run", f"{HOME}.plan"
COUNTS = REPLAYED.of("counts")


@mistake(
    "query-composition-forgotten",
    "every statistic of a query may spend the whole budget",
    BILLED,
    f"{PLAN}.whole",
)
def _(real: Any, claims: Any) -> Any:
    return real(claims[:1])


@mistake(
    "query-persons-forgotten",
    "the column that says whose a record is is not looked at",
    COUNTS,
    f"{RUN}.table_of",
)
def _(real: Any, data: Any, made: Any) -> Any:
    table = real(data, made)
    table.table.owners = None
    return table


@mistake(
    "query-person-in-two",
    "a person whose records are far apart is two persons",
    COUNTS,
    "dpfy.tables.table.owners_of",
)
def _(real: Any, cells: Any) -> Any:
    found, words = real(cells)
    twice = [f"{word} {k}" for word in words for k in range(2)]
    return np.where(found < 0, found, 2 * found + np.arange(len(found)) % 2), twice


@mistake("query-reads-first", "data is read before the query is reserved", ORDER, f"{RUN}.answer")
def _(real: Any, data: Any, made: Any, place: Any, *more: Any) -> Any:
    dict(data.items())
    return real(data, made, place, *more)


@mistake(
    "query-without-permit",
    "noise is drawn before the ledger says that the release has started",
    ORDER,
    "dpfy.runs.folder.RunFolder.begin",
)
def _(real: Any, self: Any, name: str) -> Any:
    claim = next(claim for claim in self.claims if claim.name == name)
    return mock_permit(claim.event, claim.releases, claim.name, claim.adjacency)


@mistake(
    "query-noise-shared",
    "two statistics of a query have the same noise",
    NOISE,
    "dpfy.mechanisms.mechanism.source",
)
def _(real: Any, event: Any, permit: Any, randomness: Any, step: int) -> Any:
    bits = real(event, permit, randomness, step)
    return bits if randomness is None else Bits(randomness, "query", step)


@mistake(
    "query-known-seed",
    "the noise comes from a seed that is not secret",
    NOISE,
    f"{RUN}.Spend",
)
def _(real: Any, claim: Any, contribution: Any, permit: Any, randomness: Any, *more: Any) -> Any:
    return real(claim, contribution, permit, Randomness.for_tests(0), *more)


def told_beside(change: Callable[[Any, Any], Any]) -> Callable[[Patch], None]:
    """Answers, in the order of the plan, that `change` makes of the real ones and the table."""

    def apply(patch: Patch) -> None:
        tables: list[Any] = []

        def table_of(real: Any, *given: Any) -> Any:
            tables[:] = [real(*given)]
            return tables[0]

        def release(real: Any, self: Any, *given: Any) -> Any:
            return change(real(self, *given), tables[0]) if tables else real(self, *given)

        patch.around(f"{RUN}.table_of", table_of)
        patch.around("dpfy.statistics.statistic.SumStatistic.release", release)

    return apply


mistake("query-records-told", "an answer notes how many records it was made of", COUNTS)(
    told_beside(lambda answers, table: [replace(a, note=f"of {table.rows()}") for a in answers])
)


def by_truth(answers: Any, table: Any) -> Any:
    """Sorted by how many records have each word."""
    words = [word for name in ("job", "sex") for word in table.table.texts(name)]
    return sorted(answers, key=lambda a: -sum(words.count(word) for word in a.place.values()))


mistake("query-order-by-truth", "groups are listed by their true counts", COUNTS)(
    told_beside(by_truth)
)


@mistake(
    "query-refuses-a-value",
    "a value that is no number ends the query with an error",
    REPLAYED.of("sums"),
    "dpfy.tables.columns.RangedColumn.settle",
)
def _(real: Any, self: Any, parsed: Any) -> Any:
    found = real(self, parsed)
    if np.isnan(found).any():
        raise InvalidInput(self.name, "a cell", "must be a number")
    return found
