"""Methods of the lab: they spend no more than their claim, keep the rules, and leave folders that
verify.
"""

from __future__ import annotations

import csv

import numpy as np
import pytest
from made_up_people import SCHEMA, people

import dpfy
from dpfy import accounting
from dpfy.core import events
from dpfy.core.randomness import Randomness
from dpfy.core.values import mock_permit
from dpfy.runs.run import Run
from dpfy.synthetic.counts import count
from dpfy.synthetic.domain import Domain
from dpfy.synthetic.methods import SynthesisTask
from dpfy.synthetic.plan import SynthesisOptions, SynthesisTerms, plan
from dpfy.synthetic.releases import MarginalReleases
from dpfy.synthetic.run import errors, synthesize_table
from dpfy_lab import replay
from dpfy_lab.table_methods.network import _dependence

METHODS = ("mwem", "privbayes", "rap", "independent")
DOMAIN, TERMS = Domain.parse(SCHEMA, "people.toml"), SynthesisTerms(1.0, 1e-6)
OUTLIERS = (
    {"age": "80", "job": "cook", "grade": "low", "since": "2021-12-31", "rich": "no", "id": "x"},
    {"age": "nonsense", "job": "king", "grade": "", "since": "", "rich": "?", "id": "x"},
)


def made(method, records):
    """A whole synthesis but for the folder: the plan, its releases, the rows, and the error."""
    held = plan(DOMAIN, TERMS, SynthesisOptions(method))
    permit = mock_permit(
        held.claim.event, held.claim.releases, held.claim.name, held.claim.adjacency
    )
    m = MarginalReleases(
        held.claim, count(records, DOMAIN, held.weights), permit, Randomness.for_tests(2)
    )
    model = held.method.rule(SynthesisTask(DOMAIN, held.weights, m, 1 << 16), held.method)
    rows = model.rows(50, np.random.default_rng(0))
    return held, m, rows, errors(m, rows, model.total)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_leaves_a_folder_that_verifies(tmp_path, method):
    options = SynthesisOptions(method, rows=70)
    made = synthesize_table(
        people(300), schema=DOMAIN, terms=TERMS, run=tmp_path / "run", options=options
    )
    assert all(finding.holds for finding in dpfy.verify(made.run))
    assert made.facts["rows"] == 70
    assert 0.98 < made.report["guarantee"]["epsilon"] <= 1.0
    assert made.report["sections"][0]["kind"] == "synthesis"


@pytest.mark.parametrize(
    ("method", "outlier"),
    [
        (method, outlier)
        for method in METHODS
        for outlier in range(2)
        if outlier == 0 or method not in ("rap", "mwem")
    ],
)
def test_nothing_but_noise_tells_neighbours_apart(method, outlier):
    """Record and replay: with the same noisy values both do the same, and what mechanisms are given
    is as close as their bounds say.
    """

    def published(records):
        _, m, rows, found = made(method, records)
        return [x.values.numpy().tolist() for x in m.released], rows.tolist(), found

    records = people(60)
    more = {name: [*column, OUTLIERS[outlier][name]] for name, column in records.items()}
    assert replay.check(published, records, more) == []


@pytest.mark.parametrize("method", METHODS)
def test_what_was_released_costs_no_more_than_the_claim(method):
    """The releases of a run, as a plan that was fixed in advance: their exact composition is within
    epsilon.
    """
    held, m, _, _ = made(method, people(300))
    measured = [events.Gaussian(x.deviation / held.claim.length) for x in m.released]
    choices = held.claim.choices - m.choices
    chosen = events.Repeated(events.BoundedRange(held.claim.width or 1.0), choices)
    assert 0.9 < accounting.epsilon(events.Composed((*measured, chosen)), 1e-6) <= 1.0
    assert accounting.epsilon(held.claim.event, 1e-6) <= 1.0


class Stop(BaseException):
    """As a kill: nothing is undone."""


def test_privbayes_is_resumed_to_the_same_bits(tmp_path, monkeypatch):
    options, records = SynthesisOptions("privbayes"), people(150)

    def make(name, resume=False):
        place = Run(tmp_path / name, resume=resume, seed=9)
        return synthesize_table(records, schema=DOMAIN, terms=TERMS, run=place, options=options)

    whole, real = make("whole"), MarginalReleases._bind
    for after in (False, True):

        def bind(self, *rest, after=after):
            if self.step != 6 or after:
                real(self, *rest)
            if self.step == 6:
                raise Stop

        with monkeypatch.context() as patch:
            patch.setattr(MarginalReleases, "_bind", bind)
            with pytest.raises(Stop):
                make(f"{after}")
        assert make(f"{after}", resume=True).table.read_bytes() == whole.table.read_bytes()


@pytest.mark.parametrize("method", ["privbayes", "rap"])
def test_constraints_hold_in_every_row(tmp_path, method):
    rules = [
        'rule = "rich = \'no\'"\nwhen = "age < 34"',
        "rule = \"grade >= 'mid'\"\nwhen = \"job = 'cook'\"",
    ]
    schema = SCHEMA + "".join(f"[[constraints]]\n{rule}\n" for rule in rules)
    made = synthesize_table(
        people(400),
        schema=Domain.parse(schema, "people.toml"),
        terms=TERMS,
        run=tmp_path / "run",
        options=SynthesisOptions(method, rows=500),
    )
    with made.table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert not [row for row in rows if int(row["age"]) < 34 and row["rich"] == "yes"]
    assert not [row for row in rows if row["job"] == "cook" and row["grade"] == "low"]
    assert len(rows) > 250


def test_a_record_changes_a_dependence_by_at_most_one_and_nearly_so():
    """2,000 random tables of two and three columns, and a record more in any cell."""
    rng = np.random.default_rng(3)
    largest = 0.0
    for _ in range(2000):
        clique = (0, 1, 2)[: int(rng.integers(2, 4))]
        table = rng.poisson(rng.lognormal(0, 2), [int(n) for n in rng.integers(2, 5, len(clique))])
        v = int(rng.integers(0, len(clique)))
        shares = rng.dirichlet(np.full(table.shape[v], 0.3))
        more = table.copy()
        more[tuple(int(rng.integers(0, n)) for n in table.shape)] += 1
        before, after = (_dependence({clique: t}, shares, v, clique) for t in (table, more))
        largest = max(largest, abs(after - before))
    assert 0.9 < largest <= 1 + 1e-9
    assert _dependence({}, shares, 0, (0,)) == 0
