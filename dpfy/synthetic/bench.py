"""A synthesis as the self-test of the audit sees it: its steps one by one, each of which a mistake
may replace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpfy.accounting.filters import squares
from dpfy.core.ledger_rules import rehearsal
from dpfy.core.randomness import Randomness
from dpfy.synthetic.columns import BinnedColumn, Codes, ListedColumn, TableColumn
from dpfy.synthetic.constraints import within_bins
from dpfy.synthetic.counts import Marginals, count
from dpfy.synthetic.domain import Domain
from dpfy.synthetic.plan import SynthesisOptions, SynthesisPlan, SynthesisTerms, plan
from dpfy.synthetic.releases import MarginalReleases
from dpfy.synthetic.run import errors
from dpfy.synthetic.start import public_potentials
from dpfy.synthetic.task import FittedModel, SynthesisTask

Records = dict[str, list[str]]
COLUMNS: tuple[TableColumn, ...] = (
    ListedColumn("job", required=True, words=("cook", "nurse", "clerk", "judge")),
    BinnedColumn("age", required=True, edges=(0.0, 30.0, 60.0, 90.0)),
    ListedColumn("rich", required=True, words=("no", "yes")),
)
TERMS = SynthesisTerms(10.0, 1e-6, user="id", most_records=2)
METHOD, CELLS, SEED = "mst", 1 << 12, 17


def _counted(records: Records, made: SynthesisPlan) -> Marginals:
    return count(records, made.domain, made.weights, made.terms.owners)


@dataclass(frozen=True)
class Steps:
    """The steps of a synthesis. Nothing but `counted` has a use for the records; that the others
    are given them is for mistakes.
    """

    domain: Callable[[Records], Domain] = lambda records: Domain(COLUMNS, frozenset({"id"}))
    start: Callable[[Records, Domain], Sequence[Any]] = lambda records, domain: ()
    public: Callable[..., Sequence[Any]] = public_potentials
    counted: Callable[[Records, SynthesisPlan], Marginals] = _counted
    meter: Callable[[MarginalReleases], MarginalReleases] = lambda meter: meter
    size: Callable[[Records, FittedModel], int] = lambda records, model: max(1, round(model.total))
    rows: Callable[[Records, FittedModel, int], Codes] = lambda records, model, size: model.rows(
        size, np.random.default_rng(0)
    )

    def synthesized(self, records: Records) -> tuple[MarginalReleases, Any]:
        """The meter afterwards, and all that is published."""
        domain = self.domain(records)
        made = plan(domain, TERMS, SynthesisOptions(METHOD))
        marginals = self.counted(records, made)
        claim = made.claim
        permit = rehearsal(claim.event, claim.releases, claim.name, claim.adjacency)
        meter = self.meter(MarginalReleases(claim, marginals, permit, Randomness.for_tests(SEED)))
        task = SynthesisTask(domain, made.weights, meter, CELLS, public=self.start(records, domain))
        model = made.method.rule(task, made.method)
        codes = self.rows(records, model, self.size(records, model))
        table = within_bins(domain.columns, (), codes, np.random.default_rng(1))
        return meter, (
            table,
            [m.values.tolist() for m in meter.released],
            errors(meter, codes, model.total),
        )


def _people(numbers: Sequence[tuple[int, int, int]]) -> Records:
    """Records of one person each: places of job, decade of age, riches."""
    jobs, rich = (column.words for column in COLUMNS if isinstance(column, ListedColumn))
    return {
        "job": [jobs[job] for job, _, _ in numbers],
        "age": [str(10 * age + 5) for _, age, _ in numbers],
        "rich": [rich[r] for _, _, r in numbers],
        "id": [f"p{k}" for k in range(len(numbers))],
    }


def neighbours() -> Iterator[tuple[str, Records, Records, bool]]:
    """Two tables each: with one person more, who is an outlier; and two that have nothing in common
    but their schema (True).
    """
    some = _people([(k % 3, 2 + k % 3, k % 2) for k in range(40)])
    for what, age in (("old", "89"), ("young", "1")):
        more = {"job": ["judge"] * 3, "age": [age] * 3, "rich": ["yes"] * 3, "id": ["q"] * 3}
        yield (
            f"one {what} judge of three records",
            some,
            {name: [*column, *more[name]] for name, column in some.items()},
            False,
        )
    yield (
        "other people",
        some,
        _people([(k % 2 * 3, 1 + 7 * (k % 2), (k + k // 3) % 2) for k in range(23)]),
        True,
    )


def runs(
    change: Callable[[Any], Any],
) -> Iterator[tuple[str, Callable[[Records], Any], Records, Records, bool]]:
    """For the audit: a synthesis with the steps that `change` makes of the real ones, and two
    tables to run it on.
    """
    steps: Steps = change(Steps())
    for name, one, other, strangers in neighbours():
        yield name, lambda records: steps.synthesized(records)[1], one, other, strangers


def spent(change: Callable[[Any], Any]) -> tuple[float, float]:
    """The sum of squares of all that was measured, and what the claim allows."""
    meter, _ = change(Steps()).synthesized(next(neighbours())[1])
    return float(sum(squares(m.deviation / meter.claim.length) for m in meter.released)), float(
        squares(meter.claim.noise_multiplier)
    )
