"""Mistakes of fits that promise to protect a person: the records of one are not taken together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dpfy.core.unit import EXAMPLE
from dpfy_lab.checks.estimators import AT_MOST, PERSONS
from dpfy_lab.mistakes.linear import BAYES, COMPONENTS, GRADIENT, HOME
from dpfy_lab.mistakes.trees import ADDITIVE, BOOSTED, FOREST, SOFT, TOP_DOWN
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch

BOUNDED, NUMBERED = f"{HOME}.persons.bounded", f"{HOME}.persons.owners_of"


def of_a_record(patch: Patch) -> None:
    """Noise for one record, whatever the unit."""
    patch.around(
        f"{HOME}.estimator.rounds",
        lambda real, needs, terms: real(needs, replace(terms, unit=EXAMPLE)),
    )


@mistake(
    "person-gradient-as-it-is",
    "what a person adds to a gradient is charged as shortened, and is not",
    PERSONS.of(GRADIENT),
    f"{HOME}.linear.design.shortened",
)
def _(real: Any, rows: Any, factors: Any, starts: Any, at_most: int) -> Any:
    return factors


@mistake(
    "person-gradients-shortened-apart",
    "each record of a person is shortened, and not what they add together",
    PERSONS.of(GRADIENT),
    f"{HOME}.linear.design.shortened",
)
def _(real: Any, rows: Any, factors: Any, starts: Any, at_most: int) -> Any:
    return real(rows, factors, np.arange(len(factors)), at_most)


@mistake(
    "person-billed-as-record",
    "a person has a cell for each record, the noise is for one",
    PERSONS.of(BAYES),
)
def _(patch: Patch) -> None:
    of_a_record(patch)


@mistake(
    "person-with-all-records",
    "all records of a person are used, the noise is for the most that were promised",
    PERSONS.of(COMPONENTS),
    BOUNDED,
)
def _(real: Any, records: Any, cells: Any, at_most: int, key: bytes) -> Any:
    return real(records, cells, len(cells), key)


@mistake(
    "persons-kept-by-place",
    "which records of a person are used depends on everybody else's",
    PERSONS.of(ADDITIVE),
    f"{HOME}.records.EncodedRecords.content",
)
def _(real: Any, records: Any) -> Any:
    return [np.full(records.size, records.size)]


@mistake(
    "every-record-a-person",
    "each record is taken for a person of its own",
    PERSONS.of(BOOSTED),
    NUMBERED,
)
def _(real: Any, cells: Any) -> Any:
    return np.arange(len(cells)), [str(k) for k in range(len(cells))]


@mistake(
    "person-bounded-by-class",
    "the most records of a person are counted in each class, not in all",
    PERSONS.of(FOREST),
    BOUNDED,
)
def _(real: Any, records: Any, cells: Any, at_most: int, key: bytes) -> Any:
    pairs = [f"{cell} {label}" for cell, label in zip(cells, records.target, strict=True)]
    return real(records, pairs, at_most, key)


@mistake(
    "choice-billed-as-record",
    "a person's records move scores of splits, the noise is for one of them",
    PERSONS.of(TOP_DOWN),
)
def _(patch: Patch) -> None:
    of_a_record(patch)


@mistake(
    "one-record-too-many",
    "one record more than promised is used of each person",
    PERSONS.of(SOFT),
    BOUNDED,
)
def _(real: Any, records: Any, cells: Any, at_most: int, key: bytes) -> Any:
    return real(records, cells, at_most + 1, key)


@mistake(
    "person-billed-by-the-root",
    "counts and sums of a person are added as they are, the noise is for the root of their number",
    PERSONS.of("k-means"),
    f"{HOME}.budget.ReleaseNeed",
)
def _(real: Any, *given: Any, **named: Any) -> Any:
    return real(*given, **named, person=AT_MOST**0.5)


@mistake(
    "persons-of-the-first-rows",
    "the most records of a person are those of each part of the table",
    PERSONS.of("mixture"),
    BOUNDED,
)
def _(real: Any, records: Any, cells: Any, at_most: int, key: bytes) -> Any:
    return real(records, [f"{cell} {k // 8}" for k, cell in enumerate(cells)], at_most, key)
