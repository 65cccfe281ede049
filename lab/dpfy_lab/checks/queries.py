"""Checks of statistics and queries, from outside: neighbours that differ in one extreme person, the
noise on empty cells, keys that one person has, and the ledger while a query reads and draws.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy import accounting
from dpfy.core import events
from dpfy.core.ledger import Ledger
from dpfy.queries import plan, run
from dpfy.queries.plan import QueryPlan, QueryTerms
from dpfy.runs.folder import LEDGER
from dpfy.runs.run import Run
from dpfy.tables.columns import Category, Column, Number, OpenColumn
from dpfy.tables.schema import Schema
from dpfy_lab.checks.published import in_folder, temporary
from dpfy_lab.checks.replayed import faults
from dpfy_lab.selftest.mistake import Found, check
from dpfy_lab.selftest.patch import patching

Cells = Mapping[str, Any]
JOBS = ("clerk", "nurse", "smith")
COLUMNS: dict[str, Column] = {
    "age": Number("age", 0, 100),
    "pay": Number("pay", 0, 10),
    "job": Category("job", JOBS),
    "sex": Category("sex", ("f", "m")),
    "town": Category("town", tuple(f"t{k}" for k in range(2000))),
    "who": OpenColumn("who"),
    "word": OpenColumn("word"),
    "job2": Category("job2", JOBS),
    "pay2": OpenColumn("pay2"),
}
SEED, SIGMAS = 37, 6.0
QUERIES = {
    "counts": "count(), histogram(age, 20, 40, 60), table(job, sex)",
    "sums": "sum(pay), mean(age), variance(age), covariance(age, pay) by sex",
    "margins": "margins(job, sex, job2, order=2)",
    "ranks": "median(age), quantile(age, 0.1, 0.9), max(pay), mode(job)",
    "keys": "top(word), range(pay2)",
}
"""Every kind of release has one."""
TERMS = {
    "three records of a person": QueryTerms(1.0, 1e-6, user="who", most_records=3),
    "two groups of a person": QueryTerms(
        1.0, 1e-6, user="who", most_records=4, most_groups=2, most_each=2
    ),
    "Laplace noise": QueryTerms(1.0, user="who", most_records=2),
}


def people(count: int = 40, first: int = 0) -> dict[str, list[Any]]:
    """One record of each person."""
    rng, numbers = np.random.default_rng(3), range(first, first + count)
    return {
        "age": rng.integers(20, 60, count).tolist(),
        "pay": rng.uniform(2, 6, count).tolist(),
        "pay2": rng.uniform(2, 6, count).tolist(),
        "job": [JOBS[k % 2] for k in numbers],
        "job2": [JOBS[k % 2] for k in numbers],
        "sex": ["fm"[k % 2] for k in numbers],
        "town": [f"t{k % 3}" for k in numbers],
        "who": [f"p{k}" for k in numbers],
        "word": ["ah" if k % 2 else "oh" for k in numbers],
    }


EXTREMES: dict[str, dict[str, Any]] = {
    "high": {"age": 1e9, "pay": 1e9, "pay2": 1e9, "job": "smith", "job2": "smith", "sex": "m"},
    "low": {"age": -1e9, "pay": -1e9, "pay2": 1e-9, "job": "judge", "job2": "clerk", "sex": "f"},
    "odd": {"age": "old", "pay": "", "pay2": "none", "job": "", "job2": "", "sex": "?"},
}


def with_person(table: Cells, kind: str, records: int = 6) -> dict[str, list[Any]]:
    """One person more, of several records that are alike but for the words."""
    own = {**EXTREMES[kind], "town": "t7", "who": "q"}
    more = {name: [value] * records for name, value in own.items()}
    more["word"] = [f"new{k}" for k in range(records)]
    return {name: [*column, *more[name]] for name, column in table.items()}


def _cases(prefix: str) -> Iterator[tuple[str, QueryPlan]]:
    """Plans of queries whose names begin so."""
    for name, text in QUERIES.items():
        for how, terms in TERMS.items():
            if (terms.delta or name != "keys") and name.startswith(prefix):
                yield f"{name}, {how}", plan.plan(text, Schema.of(COLUMNS), terms)


@check("queries")
def REPLAYED(prefix: str = "") -> Found:
    """With the same noisy answers the same is published, whatever the records are; what mechanisms
    are given of neighbours is as close as declared, and they pay no more than was asked.
    """
    some = people()
    pairs = [(f"one {kind} person", some, with_person(some, kind), False) for kind in EXTREMES]
    pairs.append(("other people", some, people(23, 200), True))
    for name, made in _cases(prefix):

        def answers(cells: Cells, made: QueryPlan = made) -> dict[str, bytes]:
            return in_folder(lambda place: run.answer(cells, made, place), SEED)

        claimed = None if made.terms.delta else events.EpsilonDelta(made.terms.epsilon)
        if found := faults(answers, pairs, claimed):
            return f"{name}: {found}"
    return None


@check("query charges")
def BILLED() -> Found:
    """What the ledger of a query reserves is, all together, within what was asked."""
    for name, made in _cases(""):
        asked, delta = made.terms.epsilon, made.terms.delta
        with temporary() as folder:
            run.answer(people(), made, Run(folder, seed=SEED))
            found = [permit.event for permit in Ledger.read(folder / LEDGER).permits()]
        whole = events.Composed(tuple(found))
        spent = accounting.epsilon(whole, delta, accountant="tight" if delta else "basic")
        if not spent <= asked * (1 + 1e-6):
            return f"{name}: {len(found)} statistics cost epsilon {spent:.4g}, asked {asked:g}"
    return None


def _noise(text: str, terms: QueryTerms, seed: int) -> NDArray[np.float64]:
    """The answers of counts of towns that nobody lives in, by statistic: noise alone."""
    cells = people()
    columns = Schema.of(COLUMNS)
    seen: list[NDArray[np.float64]] = []

    def release(real: Any, self: Any, total: Any, *given: Any) -> Any:
        found = real(self, total, *given)
        seen.append(np.asarray(found.value, np.float64).reshape(-1)[10:2000])
        return found

    made = plan.plan(text, columns, terms)
    with temporary() as folder, patching() as patch:
        for mechanism in ("additive.Additive", "discrete.Discrete"):
            patch.around(f"dpfy.mechanisms.{mechanism}.release", release)
        run.answer(cells, made, Run(folder, seed=seed))
    return np.array(seen)


@check("query noise")
def NOISE() -> Found:
    """The noise of counts is at least that of a person's records, has the share of the budget that
    each statistic has, and is fresh for every statistic and every run.
    """
    terms = QueryTerms(1.0, user="who", most_records=2)
    one, two = (_noise("table(town), histogram(town)", terms, seed) for seed in (1, 2))
    least = math.sqrt(2) * 2 / (terms.epsilon / 2)  # Laplace noise for two records and half of it
    least = 1 / (math.sqrt(2) * math.sinh(1 / (math.sqrt(2) * least)))  # of whole numbers
    spread = math.sqrt(float((one**2).mean()))
    if spread < least * (1 - SIGMAS * 1.2 / math.sqrt(one.size)):
        return f"noise of standard deviation {spread:.3f} hides a person, who needs {least:.3f}"
    for what, first, second in (
        ("two statistics", one[0], one[1]),
        ("two runs", one[0], two[0]),
    ):
        alike = float(np.corrcoef(first, second)[0, 1]) * math.sqrt(first.size)
        if not abs(alike) < SIGMAS:
            return f"the noise of {what} is alike ({alike:.0f} standard deviations)"
    return None


@check("query keys")
def KEYS() -> Found:
    """Words that one person has are released no more often than delta allows."""
    count, delta = 4000, 0.01
    cells = {"word": [f"w{k}" for k in range(count)], "who": [f"p{k}" for k in range(count)]}
    columns = Schema.of({"word": OpenColumn("word"), "who": OpenColumn("who")})
    terms = QueryTerms(1.0, delta, user="who", most_records=1)
    with temporary() as folder:
        made = run.answered(
            cells, "top(word)", schema=columns, terms=terms, run=Run(folder, seed=SEED)
        )
    most = count * delta + SIGMAS * math.sqrt(count * delta)
    shown = len(made.answers)
    return None if shown <= most else f"{shown} of {count} words of one person each were released"


class Watched(dict[str, Any]):
    """Cells that note what the ledger of a run says when they are read."""

    def __init__(self, cells: Cells, folder: Path) -> None:
        super().__init__(cells)
        self.folder, self.said = folder, list[set[str]]()

    def items(self) -> Any:
        """The cells, read."""
        self.said.append(kinds(self.folder))
        return super().items()


def kinds(folder: Path) -> set[str]:
    """The kinds of lines that a ledger holds."""
    file = folder / LEDGER
    lines = file.read_text().splitlines() if file.is_file() else []
    return {json.loads(line)["body"]["type"] for line in lines}


@check("query order")
def ORDER() -> Found:
    """When cells are read, the ledger holds the reservation; when noise is drawn, that the release
    has begun.
    """
    drawn: list[set[str]] = []
    with temporary() as folder, patching() as patch:
        cells = Watched(people(), folder)

        def release(real: Any, self: Any, *given: Any) -> Any:
            drawn.append(kinds(folder))
            return real(self, *given)

        made = plan.plan("sum(pay)", Schema.of(COLUMNS), TERMS["three records of a person"])
        patch.around("dpfy.mechanisms.additive.Additive.release", release)
        run.answer(cells, made, Run(folder, seed=SEED))
    if not cells.said or any("reserve" not in said for said in cells.said):
        return "cells were read before the query was reserved"
    if not drawn or any("begun" not in said for said in drawn):
        return "noise was drawn before the ledger said that the release has started"
    return None


CHECKS = (REPLAYED, BILLED, NOISE, KEYS, ORDER)
