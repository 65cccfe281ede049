"""The meter: no method can spend more than its claim, and nothing but noise tells neighbours
apart.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from made_up_people import SCHEMA, people

from dpfy import accounting
from dpfy.accounting.filters import noise_of, squares
from dpfy.core import events
from dpfy.core.errors import BudgetExceeded, InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency, Unit
from dpfy.core.values import mock_permit
from dpfy.synthetic.claim import Synthesis
from dpfy.synthetic.counts import RecordOwners, closure, count
from dpfy.synthetic.domain import Domain
from dpfy.synthetic.methods import METHODS, SynthesisTask
from dpfy.synthetic.plan import SynthesisOptions, SynthesisTerms, plan
from dpfy.synthetic.releases import MarginalReleases
from dpfy.synthetic.run import errors
from dpfy_lab import replay

DOMAIN = Domain.parse(SCHEMA, "people.toml")
CLAIM = Synthesis("a method", str(DOMAIN), "pairs", 3.0, 20, 4, 0.2)
MARGINALS = count(people(200), DOMAIN, closure(combinations(range(5), 2)))


def meter(claim=CLAIM, marginals=MARGINALS, seed=1, **more):
    return MarginalReleases(
        claim,
        marginals,
        mock_permit(claim.event, claim.releases, claim.name, claim.adjacency),
        Randomness.for_tests(seed),
        **more,
    )


def test_whatever_is_asked_for_stays_within_the_claim():
    """50 random sequences of requests, many of them too large: what was released never exceeds the
    claim.
    """
    rng = np.random.default_rng(0)
    for trial in range(50):
        held = meter(seed=trial)
        spent, chosen = Fraction(0), 0
        for _ in range(20):
            try:
                if rng.random() < 0.3:
                    held.choose(rng.normal(0, 10, 5).tolist())
                    chosen += 1
                else:
                    noise = float(rng.lognormal(2, 1))
                    held.measure((int(rng.integers(0, 5)),), noise)
                    spent += squares(noise)
            except BudgetExceeded:
                continue
        assert spent <= squares(CLAIM.noise_multiplier)
        assert chosen <= CLAIM.choices
        assert held.left == held.whole - spent


def test_all_that_is_left_can_be_spent_and_no_more():
    held = meter()
    held.measure((0,), noise_of(held.left))
    with pytest.raises(BudgetExceeded, match="left of the sum"):
        held.measure((0,), 1e6)
    for _ in range(CLAIM.choices):
        held.choose([1.0, 2.0])
    with pytest.raises(BudgetExceeded, match="no choice is left"):
        held.choose([1.0, 2.0])
    _, deviation = held.number(5.0, Fraction(1))
    assert deviation == pytest.approx(3.0 * np.sqrt(200), rel=1e-4)
    assert 0 <= held.kept < squares(CLAIM.noise_multiplier) / 10**12


def test_a_permit_for_something_else_is_refused():
    held = meter()
    held.permit = mock_permit(events.Gaussian(3.0), 10)
    with pytest.raises(InvalidInput, match="is not what the permit"):
        held.measure((0,), 10.0)
    with pytest.raises(InvalidInput, match="is not what the permit"):
        held.choose([1.0, 2.0])


def test_the_noise_has_the_stated_deviation():
    """4,000 cells: the deviation is right to 4.5 of its own deviations (false alarm 1e-5); 2/3 and
    3/2 of it are rejected.
    """
    for claim in (
        CLAIM,
        Synthesis("m", "d", "w", 3.0, 20, unit=Unit("user", 3)),
        Synthesis("m", "d", "w", 3.0, 20, adjacency="replace-one"),
    ):
        wide = Domain.of({"a": 4000})
        marginals = count({"a": [0] * 10}, wide, [(0,)])
        found = meter(claim, marginals).measure((0,), 6.0)
        noise = found.values.numpy() - marginals.tables[(0,)]
        assert found.deviation == pytest.approx(6.0 * claim.length)
        ratio = noise.std() / found.deviation
        assert abs(ratio - 1) < 4.5 / np.sqrt(2 * 4000)
        for wrong in (2 / 3, 3 / 2):
            assert abs(ratio / wrong - 1) > 4.5 / np.sqrt(2 * 4000)


def test_a_high_score_is_chosen_as_often_as_stated():
    """Two scores that differ by d: odds of exp(epsilon d / 2), to 4.5 deviations in 3,000 choices;
    half and twice epsilon are rejected.
    """
    claim, gap, count_ = Synthesis("m", "d", "w", 3.0, 1, 3000, 0.2), 8.0, 3000
    held = meter(claim)
    share = sum(held.choose([0.0, gap]) for _ in range(count_)) / count_

    def odds(epsilon):
        return 1 / (1 + np.exp(-epsilon * gap / 2))

    assert abs(share - odds(0.2)) < 4.5 * np.sqrt(odds(0.2) * (1 - odds(0.2)) / count_)
    for wrong in (0.1, 0.4):
        assert abs(share - odds(wrong)) > 4.5 * np.sqrt(odds(wrong) * (1 - odds(wrong)) / count_)


def made(method, records, owners=None, terms=None, seed=2):
    """A whole synthesis but for the folder: what is measured, the rows, and the error."""
    held = plan(DOMAIN, terms or SynthesisTerms(1.0, 1e-6), SynthesisOptions(method))
    marginals = count(records, DOMAIN, held.weights, owners)
    m = meter(held.claim, marginals, seed)
    model = held.method.rule(
        SynthesisTask(DOMAIN, held.weights, m, 1 << 16, held.terms.records), held.method
    )
    rows = model.rows(50, np.random.default_rng(0))
    return (
        [x.values.numpy().tolist() for x in m.released],
        rows.tolist(),
        errors(m, rows, model.total),
    )


OUTLIERS = [
    {"age": "80", "job": "cook", "grade": "low", "since": "2021-12-31", "rich": "no", "id": "x"},
    {"age": "nonsense", "job": "king", "grade": "", "since": "", "rich": "?", "id": "x"},
    {
        "age": "-1e300",
        "job": "clerk",
        "grade": "high",
        "since": "1066-10-14",
        "rich": "yes",
        "id": "p3",
    },
]


@pytest.mark.parametrize(
    ("method", "outlier"),
    [(method, outlier) for method in METHODS for outlier in range(3)],
)
def test_nothing_but_noise_tells_neighbours_apart(method, outlier):
    """Record and replay: with the same noisy values both do the same, and what mechanisms are given
    is as close as their bounds say.
    """
    records = people(60)
    more = {name: [*column, OUTLIERS[outlier][name]] for name, column in records.items()}
    assert replay.check(lambda data: made(method, data), records, more) == []


def test_users_and_replaced_records_too():
    records, owners = people(60), RecordOwners("id", 2)
    more = {name: [*column, *[OUTLIERS[0][name]] * 5] for name, column in records.items()}
    budget = SynthesisTerms(1.0, 1e-6, user="id", most_records=2)
    assert replay.check(lambda data: made("mst", data, owners, budget), records, more) == []
    other = {name: [OUTLIERS[0][name], *column[1:]] for name, column in records.items()}
    replaced = SynthesisTerms(1.0, 1e-6, records=60)
    assert (
        replay.check(
            lambda data: made("aim", data, None, replaced),
            records,
            other,
            adjacency=Adjacency.REPLACE_ONE,
        )
        == []
    )


@pytest.mark.parametrize("method", METHODS)
def test_what_was_released_costs_no_more_than_the_claim(method):
    """The releases of a run, as a plan that was fixed in advance: their exact composition is within
    epsilon.
    """
    held = plan(DOMAIN, SynthesisTerms(1.0, 1e-6), SynthesisOptions(method))
    m = meter(held.claim, count(people(300), DOMAIN, held.weights))
    model = held.method.rule(SynthesisTask(DOMAIN, held.weights, m, 1 << 16), held.method)
    errors(m, model.rows(40, np.random.default_rng(0)), model.total)
    made_ = [events.Gaussian(x.deviation / held.claim.length) for x in m.released]
    choices = held.claim.choices - m.choices
    bill = events.Composed(
        (*made_, events.Repeated(events.BoundedRange(held.claim.width or 1.0), choices))
    )
    assert 0.9 < accounting.epsilon(bill, 1e-6) <= 1.0
    assert accounting.epsilon(held.claim.event, 1e-6) <= 1.0
