"""Mistakes of synthetic tables: something of the records goes around the noise, weighs more than
was declared, or is not billed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dpfy.audit.bench import Bug

REPLAYED, BILLED = "synthetic tables", "synthetic bills"


def _with_column(
    real: Any, name: str, make: Callable[[Any, list[str]], Any]
) -> Callable[[Any], Any]:
    """The domain with one column that is made of the records."""

    def domain(records: Any) -> Any:
        held = real.domain(records)
        return replace(
            held,
            columns=tuple(make(c, records[name]) if c.name == name else c for c in held.columns),
        )

    return domain


def categories_of_the_data(real: Any) -> Any:
    """Categories are those that are met."""
    return replace(
        real,
        domain=_with_column(
            real, "job", lambda c, cells: replace(c, words=tuple(sorted(set(cells))))
        ),
    )


def range_of_the_data(real: Any) -> Any:
    """A range is from the least value to the largest."""

    def ends(column: Any, cells: list[str]) -> Any:
        low, high = min(map(float, cells)), max(map(float, cells))
        return replace(column, edges=tuple(np.linspace(low, high, len(column.edges)).tolist()))

    return replace(real, domain=_with_column(real, "age", ends))


def rows_counted(real: Any) -> Any:
    """The synthetic table has as many rows as the real one."""
    return replace(real, size=lambda records, model: len(records["job"]))


def rows_copied(real: Any) -> Any:
    """Rows are drawn from the records, in place of the model."""

    def rows(records: Any, model: Any, size: int) -> Any:
        domain = real.domain(records)
        codes = np.stack(
            [column.codes(records[column.name], {}) for column in domain.columns], axis=1
        )
        return codes[np.random.default_rng(0).integers(0, len(codes), size)]

    return replace(real, rows=rows)


def private_as_public(real: Any) -> Any:
    """The private records are given as the public table to start from."""
    return replace(real, start=lambda records, domain: real.public(records, domain, 1 << 12))


def _with_meter(
    real: Any, name: str, method: Callable[[Any, Callable[..., Any]], Callable[..., Any]]
) -> Any:
    """A meter one of whose methods is `method(meter, the real one)`."""

    def meter(held: Any) -> Any:
        setattr(held, name, method(held, getattr(held, name)))
        return held

    return replace(real, meter=meter)


def choice_without_noise(real: Any) -> Any:
    """The marginal with the largest score is taken, and nothing is billed."""
    return _with_meter(
        real, "choose", lambda held, choose: lambda scores, most=1.0: int(np.argmax(scores))
    )


def choice_too_loud(real: Any) -> Any:
    """Scores are weighed without dividing by the largest weight: a record moves them by more than
    was declared.
    """
    return _with_meter(
        real,
        "choose",
        lambda held, choose: lambda scores, most=1.0: choose([4 * s for s in scores], most),
    )


def error_without_noise(real: Any) -> Any:
    """How far off the table is, is told exactly."""
    return _with_meter(real, "number", lambda held, number: lambda value, share: (value, 0.0))


def measured_for_nothing(real: Any) -> Any:
    """What a measurement takes of the budget is not taken off."""

    def method(held: Any, measure: Callable[..., Any]) -> Callable[..., Any]:
        def again(clique: Any, noise_multiplier: float) -> Any:
            left = held.left
            found = measure(clique, noise_multiplier)
            held.left = left
            return found

        return again

    return _with_meter(real, "measure", method)


def all_records_of_a_person(real: Any) -> Any:
    """The limit on the records of a person is forgotten."""

    def counted(records: Any, made: Any) -> Any:
        apart = records | {"id": [str(k) for k in range(len(records["id"]))]}
        return real.counted(apart, made)

    return replace(real, counted=counted)


BUGS = (
    Bug(
        "table-categories",
        "the categories of a column are those of the data",
        REPLAYED,
        synthesis=categories_of_the_data,
    ),
    Bug(
        "table-range",
        "a range is clipped to the data's own least and largest value",
        REPLAYED,
        synthesis=range_of_the_data,
    ),
    Bug(
        "table-rows-counted",
        "the synthetic table has exactly as many rows as the real one",
        REPLAYED,
        synthesis=rows_counted,
    ),
    Bug(
        "table-rows-copied", "rows are resampled from the records", REPLAYED, synthesis=rows_copied
    ),
    Bug(
        "table-public",
        "private rows are declared public, to start from",
        REPLAYED,
        synthesis=private_as_public,
    ),
    Bug(
        "table-choice-free",
        "marginals are chosen without noise, and not billed",
        REPLAYED,
        synthesis=choice_without_noise,
    ),
    Bug(
        "table-choice-loud",
        "a record changes scores by more than was declared",
        REPLAYED,
        synthesis=choice_too_loud,
    ),
    Bug(
        "table-error-exact",
        "the error of the table is told without noise",
        REPLAYED,
        synthesis=error_without_noise,
    ),
    Bug(
        "table-person",
        "all records of a person are counted",
        REPLAYED,
        synthesis=all_records_of_a_person,
    ),
    Bug(
        "table-unbilled",
        "measurements are not taken off the budget",
        BILLED,
        synthesis=measured_for_nothing,
    ),
)
