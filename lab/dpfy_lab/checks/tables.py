"""Checks of synthetic tables, by record and replay: nothing but noisy values tells two tables of
records apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from dpfy.accounting.filters import squares
from dpfy.runs.run import Run
from dpfy.synthetic import run
from dpfy.synthetic.columns import TableColumn, table_column
from dpfy.synthetic.domain import Domain
from dpfy.synthetic.plan import SynthesisOptions, SynthesisTerms, plan
from dpfy.tables.columns import Category, Number
from dpfy_lab.checks.published import in_folder
from dpfy_lab.checks.replayed import faults
from dpfy_lab.selftest.mistake import Found, check

Records = dict[str, list[str]]
JOBS, RICHES = ("cook", "nurse", "clerk", "judge"), ("no", "yes")
COLUMNS: tuple[TableColumn, ...] = (
    table_column(Category("job", JOBS, required=True)),
    table_column(Number("age", 0, 90, bins=(0, 30, 60, 90), required=True)),
    table_column(Category("rich", RICHES, required=True)),
)
TERMS = SynthesisTerms(10.0, 1e-6, user="id", most_records=2)
PLAN = plan(Domain(COLUMNS, frozenset({"id"})), TERMS, SynthesisOptions("mst"))
SEED = 17


def synthesized(records: Records) -> dict[str, bytes]:
    """All that is published of a synthetic table of these records."""

    def make(place: Run) -> object:
        return run.execute(records, PLAN, place)

    return in_folder(make, SEED)


def people(numbers: Sequence[tuple[int, int, int]]) -> Records:
    """One record a person: the places of job, decade of age, riches."""
    return {
        "job": [JOBS[job] for job, _, _ in numbers],
        "age": [str(10 * age + 5) for _, age, _ in numbers],
        "rich": [RICHES[r] for _, _, r in numbers],
        "id": [f"p{k}" for k in range(len(numbers))],
    }


def pairs() -> Iterator[tuple[str, Records, Records, bool]]:
    """Two tables each: with one person more, who is an outlier, and with other people."""
    some = people([(k % 3, 2 + k % 3, k % 2) for k in range(40)])
    for what, age in (("old", "89"), ("young", "1")):
        more = {"job": ["judge"] * 3, "age": [age] * 3, "rich": ["yes"] * 3, "id": ["q"] * 3}
        larger = {name: [*column, *more[name]] for name, column in some.items()}
        yield f"one {what} judge of three records", some, larger, False
    others = people([(k % 2 * 3, 1 + 7 * (k % 2), (k + k // 3) % 2) for k in range(23)])
    yield "other people", some, others, True


@check("synthetic tables")
def REPLAYED() -> Found:
    """With the same noisy values the same is published, whatever the records are."""
    return faults(synthesized, pairs())


@check("synthetic charges")
def BILLED() -> Found:
    """All measurements together are within the claim."""
    claim = PLAN.claim
    facts = json.loads(synthesized(next(pairs())[1])["synthesis.json"])
    spent = sum(squares(m["deviation"] / claim.length) for m in facts["marginals"])
    claimed = squares(claim.noise_multiplier)
    if spent <= claimed:
        return None
    return f"measurements take {float(spent / claimed):.2f} times what is claimed"


CHECKS = (REPLAYED, BILLED)
