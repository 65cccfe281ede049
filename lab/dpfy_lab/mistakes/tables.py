"""Mistakes of synthetic tables: something of the records goes around the noise, weighs more than
was declared, or is not billed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dpfy_lab.checks.tables import BILLED, REPLAYED
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch

RUN, METER = "dpfy.synthetic.run", "dpfy.synthetic.releases.MarginalReleases"
EXECUTE = f"{RUN}.execute"


def column_of_the_data(name: str, make: Callable[[Any, list[str]], Any]) -> Callable[..., Any]:
    """A synthesis whose domain has one column that is made of the records."""

    def execute(real: Any, data: Any, made: Any, *more: Any) -> Any:
        columns = (make(c, data[name]) if c.name == name else c for c in made.domain.columns)
        return real(data, replace(made, domain=replace(made.domain, columns=tuple(columns))), *more)

    return execute


mistake("table-categories", "the categories of a column are those of the data", REPLAYED, EXECUTE)(
    column_of_the_data(
        "job",
        lambda column, cells: replace(
            column, column=replace(column.column, categories=tuple(sorted(set(cells))))
        ),
    )
)


def data_range(column: Any, cells: list[str]) -> Any:
    """The column from the least value to the largest."""
    low, high = min(map(float, cells)), max(map(float, cells))
    return replace(column, edges=tuple(np.linspace(low, high, len(column.edges)).tolist()))


mistake(
    "table-range",
    "a range is clipped to the data's own least and largest value",
    REPLAYED,
    EXECUTE,
)(column_of_the_data("age", data_range))


@mistake(
    "table-rows-counted",
    "the synthetic table has exactly as many rows as the real one",
    REPLAYED,
    EXECUTE,
)
def _(real: Any, data: Any, made: Any, *more: Any) -> Any:
    rows = len(data["job"])
    return real(data, replace(made, options=replace(made.options, rows=rows)), *more)


@mistake("table-rows-copied", "rows are resampled from the records", REPLAYED)
def _(patch: Patch) -> None:
    given: dict[str, Any] = {}

    def execute(real: Any, data: Any, *more: Any) -> Any:
        given.update(data)
        return real(data, *more)

    def allowed(real: Any, domain: Any, codes: Any) -> Any:
        cells = [column.codes(given[column.name]) for column in domain.columns]
        rows = np.stack(cells, axis=1)
        return rows[np.random.default_rng(0).integers(0, len(rows), len(codes))]

    patch.around(EXECUTE, execute)
    patch.around(f"{RUN}.allowed", allowed)


@mistake("table-public", "private rows are declared public, to start from", REPLAYED, EXECUTE)
def _(real: Any, data: Any, made: Any, place: Any) -> Any:
    return real(data, made, place, {name: data[name] for name in made.domain.names})


@mistake(
    "table-choice-free",
    "marginals are chosen without noise, and not charged",
    REPLAYED,
    f"{METER}.choose",
)
def _(real: Any, self: Any, scores: Any, most: float = 1.0) -> int:
    return int(np.argmax(scores))


@mistake(
    "table-choice-loud",
    "a record changes scores by more than was declared",
    REPLAYED,
    f"{METER}.choose",
)
def _(real: Any, self: Any, scores: Any, most: float = 1.0) -> Any:
    return real(self, [4 * score for score in scores], most)


@mistake(
    "table-error-exact",
    "the error of the table is told without noise",
    REPLAYED,
    f"{METER}.number",
)
def _(real: Any, self: Any, value: float, share: Any) -> Any:
    return value, 0.0


@mistake(
    "table-person",
    "all records of a person are counted",
    REPLAYED,
    "dpfy.synthetic.counts._of_owners",
)
def _(real: Any, codes: Any, names: Any, owners: Any, key: str) -> Any:
    return codes


@mistake("table-unbilled", "measurements are not taken off the budget", BILLED, f"{METER}.measure")
def _(real: Any, self: Any, clique: Any, noise_multiplier: float) -> Any:
    left = self.left
    found = real(self, clique, noise_multiplier)
    self.left = left
    return found
