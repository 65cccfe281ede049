"""Record and replay: every statistic passes on neighbours of every kind, and the peers' known
mistakes are flagged.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import numpy as np
import pytest

from dpfy.core import events
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.engines.contributions import ContributionLimit
from dpfy.mechanisms.additive import GaussianMechanism, LaplaceMechanism
from dpfy.mechanisms.candidates import PrivateSelection
from dpfy.mechanisms.choice import Exponential, NoisyMax, PermuteAndFlip
from dpfy.mechanisms.discrete import DiscreteGaussianMechanism, DiscreteLaplaceMechanism
from dpfy.mechanisms.histogram import StabilityHistogram
from dpfy.mechanisms.response import RandomizedResponseMechanism, UnaryResponse
from dpfy.mechanisms.sparse import SparseVector
from dpfy.mechanisms.votes import MOVED, GaussianArgmax, GaussianThreshold
from dpfy.statistics import functions, language
from dpfy.statistics.claim import BudgetShare
from dpfy.statistics.statistic import Spend
from dpfy.tables.table import PrivateTable
from dpfy_lab import replay
from dpfy_lab.mechanisms.aggregate import AggregateMean, AggregateMedian
from dpfy_lab.mechanisms.local_sensitivity import Near, ProposeTestRelease, SmoothQuantile
from dpfy_lab.mechanisms.staircase import Staircase

sys.path.insert(0, str(Path(__file__).parents[1] / "statistics"))
from public import COLUMNS

SECRET = Randomness.for_tests(5)


def noisy(mechanism, value, bound, name):
    permit = mock_permit(mechanism.event, 1, name)
    return mechanism.release(Bounded(value, bound), permit, SECRET).value


ASKED = [
    "count()",
    "sum(age)",
    "sum(hours)",
    "mean(age)",
    "mean(hours)",
    "variance(age)",
    "stddev(share)",
    "covariance(age, hours, share)",
    "histogram(age, 10, 20, 50)",
    "histogram(job)",
    "table(sex, job)",
    "margins(sex, job, guess)",
    "accuracy(sex, guess)",
    "confusion(sex, guess)",
    "calibration(share, sex, bins=4)",
    "median(age)",
    "quantile(hours, 0.1, 0.5, 0.9)",
    "min(age)",
    "max(share)",
    "mode(job)",
    "top(id)",
    "range(age)",
]
TAILS = [
    "",
    " by job",
    " where age >= 40 and sex != 'm'",
    " by bins(hours, 0, 30, 60), month(day) where age < 20 or job in ('a', 'c') and share > 0.5",
]
PEOPLE = [  # the record that neighbours differ in: at the ends, missing, unknown, ordinary
    {
        "age": 100,
        "hours": -5,
        "share": 1,
        "sex": "m",
        "job": "c",
        "guess": "m",
        "id": 0,
        "day": "2021-02-28",
    },
    {
        "age": -1e300,
        "hours": float("inf"),
        "share": 0,
        "sex": "f",
        "job": "a",
        "guess": "m",
        "id": 0,
        "day": "1200-01-01",
    },
    {
        "age": None,
        "hours": None,
        "share": "x",
        "sex": None,
        "job": "zzz",
        "guess": "",
        "id": 99,
        "day": "no day",
    },
    {
        "age": 55,
        "hours": 40,
        "share": 0.4999,
        "sex": "f",
        "job": "b",
        "guess": "f",
        "id": 3,
        "day": None,
    },
]


def people(n, *more):
    r = np.random.default_rng(0)
    rows = [
        {
            "age": int(a),
            "hours": float(h),
            "share": float(s),
            "sex": x,
            "job": j,
            "guess": g,
            "id": int(i),
            "day": f"2020-{1 + i:02d}-17",
        }
        for a, h, s, x, j, g, i in zip(
            r.integers(0, 101, n),
            r.normal(30, 20, n),
            r.random(n),
            r.choice(["f", "m"], n),
            r.choice(["a", "b"], n),
            r.choice(["f", "m"], n),
            r.integers(0, 9, n),
            strict=True,
        )
    ]
    return [*rows, *more]


ONE = ContributionLimit()


def asked(text, family, contribution=ONE, records=None, **about):
    (statistic,) = functions.build(language.parse(text), COLUMNS, records)
    claim = statistic.claim(contribution, BudgetShare(0.8, family, delta=1e-6), **about)

    def run(rows):
        cells = {name: [row[name] for row in rows] for name in COLUMNS}
        table = PrivateTable(cells, COLUMNS, "id" if contribution.records > 1 else None)
        permit = mock_permit(claim.event, claim.releases, claim.name, adjacency=claim.adjacency)
        return [
            a.to_json()
            for a in statistic.release(table, Spend(claim, contribution, permit, SECRET))
        ]

    return run, claim.event


@pytest.mark.parametrize("family", ["laplace", "gaussian"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("text", ASKED)
def test_every_statistic(text, tail, family):
    if tail == " by job" and "job" in text:
        pytest.skip("a column is named once")
    run, event = asked(text + tail, family)
    for person in PEOPLE:
        for n in (0, 60):
            assert replay.check(run, people(n), people(n, person), claimed=event) == []


@pytest.mark.parametrize("text", ASKED)
def test_every_statistic_per_user(text):
    """A whole user with more records than are used."""
    run, event = asked(text, "laplace", ContributionLimit(3, 2, 2))
    mine = [{**person, "id": 42, "job": "abc"[k % 3]} for k, person in enumerate(PEOPLE * 2)]
    for records in (mine, [{**PEOPLE[0], "id": 42}] * 8, [{**PEOPLE[1], "id": 42}] * 8):
        assert replay.check(run, people(40), people(40, *records), claimed=event) == []


@pytest.mark.parametrize("text", ASKED)
def test_every_statistic_with_a_public_number_of_records(text):
    run, _ = asked(text, "gaussian", records=61, adjacency="replace-one")
    for one in PEOPLE:
        for other in PEOPLE:
            found = replay.check(
                run, people(60, one), people(60, other), adjacency=Adjacency.REPLACE_ONE
            )
            assert found == []


@pytest.mark.parametrize("tail", ["", " by job", " by bins(age, 0, 50, 100), sex"])
@pytest.mark.parametrize("contribution", [ContributionLimit(3, 2, 2), ContributionLimit(2)])
def test_different_persons_are_counted_once_in_each_group(tail, contribution):
    """A whole person more, in more groups and with more records than are used."""
    (statistic,) = functions.build(language.parse(f"distinct(id){tail}"), COLUMNS, person="id")
    claim = statistic.claim(contribution, BudgetShare(0.8, "laplace"))

    def run(rows):
        cells = {name: [row[name] for row in rows] for name in COLUMNS}
        table = PrivateTable(cells, COLUMNS, "id")
        permit = mock_permit(claim.event, claim.releases, claim.name)
        return [
            a.to_json()
            for a in statistic.release(table, Spend(claim, contribution, permit, SECRET))
        ]

    mine = [{**person, "id": 42, "job": "abc"[k % 3]} for k, person in enumerate(PEOPLE * 2)]
    for records in (mine, [{**PEOPLE[0], "id": 42}] * 8, [{**PEOPLE[1], "id": 42}] * 8):
        assert replay.check(run, people(40), people(40, *records), claimed=claim.event) == []


@pytest.mark.parametrize("more", ["count()", "mean(age)", "sum(hours), variance(age)"])
def test_groups_of_words_that_a_release_found(more):
    """The release that finds them and those over them, on neighbours: the second depends on the
    data through words that were released.
    """
    statistics = functions.build(language.parse(f"{more} by top(id)"), COLUMNS)
    claims = [s.claim(ONE, BudgetShare(0.8, "laplace", delta=1e-2)) for s in statistics]
    whole = events.Composed(tuple(claim.event for claim in claims))

    def run(rows):
        table = PrivateTable({name: [row[name] for row in rows] for name in COLUMNS}, COLUMNS)
        words, found = {}, []
        for statistic, claim in zip(statistics, claims, strict=True):
            permit = mock_permit(claim.event, claim.releases, claim.name)
            answers = statistic.knowing(words).release(table, Spend(claim, ONE, permit, SECRET))
            words |= statistic.words(answers) if statistic is statistics[0] else {}
            found += [answer.to_json() for answer in answers]
        assert words["id"], "something is found"
        return found

    for person in PEOPLE:
        for one in (person, {**person, "id": 1}):
            assert replay.check(run, people(200), people(200, one), claimed=whole) == []


R = Adjacency.REPLACE_ONE
ONE_SCALAR, ONES = Bound.scalar(1.0), Bound(1.0, 1.0, 1.0)


def ask(mechanism, questions):
    stream = mechanism.open(mock_permit(mechanism.event, len(questions)), SECRET)
    return [stream.ask(Bounded(float(q), ONE_SCALAR)).value for q in questions if stream.left]


def best_of(ages):
    inner = LaplaceMechanism(4.0)

    def run(number, permit, secret):
        value = inner.release(Bounded(sum(ages) / 120, ONE_SCALAR), permit, secret).value
        return value, number

    chosen = PrivateSelection(inner.event, mean=4.0, shape=1.0)
    return chosen.release(run, mock_permit(chosen.event, 1), SECRET).value


def released(mechanism, value, bound=ONE_SCALAR, adjacency=Adjacency.ADD_OR_REMOVE_ONE):
    return mechanism.release(
        Bounded(value, bound), mock_permit(mechanism.event, 1, adjacency=adjacency), SECRET
    ).value


def blocks(mechanism, ages):
    return mechanism.release(
        lambda rows: rows.mean(), np.array(ages, float), mock_permit(mechanism.event, 1), SECRET
    ).value


def votes(ages):
    """Five voters, each of whom has a fifth of the people and votes by the sum of their ages."""
    return np.bincount([sum(ages[k::5]) % 3 for k in range(5)], minlength=3)


MECHANISMS = {
    "GaussianArgmax": lambda ages: released(GaussianArgmax(4.0, 3), votes(ages), MOVED),
    "GaussianThreshold": lambda ages: released(GaussianThreshold(4.0, 3.0), int(votes(ages).max())),
    "LaplaceMechanism": lambda ages: released(LaplaceMechanism(2.0), len(ages)),
    "GaussianMechanism": lambda ages: released(
        GaussianMechanism(2.0), np.bincount(ages, minlength=120), ONES
    ),
    "DiscreteLaplaceMechanism": lambda ages: released(
        DiscreteLaplaceMechanism(0.5), np.bincount(ages, minlength=120), ONES
    ),
    "DiscreteGaussianMechanism": lambda ages: released(DiscreteGaussianMechanism(2.0), len(ages)),
    "Staircase": lambda ages: released(Staircase(0.5), len(ages)),
    "Exponential": lambda ages: released(
        Exponential(0.5), np.bincount(ages, minlength=120), Bound(linf=1.0)
    ),
    "PermuteAndFlip": lambda ages: released(
        PermuteAndFlip(0.5, monotone=True), np.bincount(ages, minlength=120), Bound(linf=1.0)
    ),
    "NoisyMax": lambda ages: released(
        NoisyMax(0.5), np.bincount(ages, minlength=120), Bound(linf=1.0)
    ),
    "StabilityHistogram": lambda ages: released(
        StabilityHistogram.of(1.0, 1e-3), {a: ages.count(a) for a in set(ages)}, ONES
    ),
    "Stream": lambda ages: ask(
        SparseVector(0.5, threshold=20, answers=2),
        [sum(a > t for a in ages) for t in (90, 60, 30, 10)],
    ),
    "PrivateSelection": best_of,
    "ProposeTestRelease": lambda ages: released(
        ProposeTestRelease(1.0, 1e-3, 0.0),
        Near("many" if len(ages) > 9 else "few", abs(len(ages) - 9)),
    ),
    "AggregateMean": lambda ages: blocks(AggregateMean(0.5, 5, 0.0, 120.0), ages),
    "AggregateMedian": lambda ages: blocks(AggregateMedian(0.5, 5, 0.0, 120.0), ages),
}
REPLACED = {
    "RandomizedResponseMechanism": lambda ages: released(
        RandomizedResponseMechanism(0.4, 120), np.array(ages), Bound(linf=119.0), R
    ),
    "UnaryResponse": lambda ages: released(
        UnaryResponse(1.0, 120), np.array(ages), Bound(linf=119.0), R
    ),
    "SmoothQuantile": lambda ages: released(
        SmoothQuantile(1.0, 1e-3, 0.0, 120.0), np.array(ages, float), Bound(linf=120.0), R
    ),
}
AGES = [20, 30, 30, 44, 51, 51, 51, 70, 88] * 4


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism(name):
    for other in (119, 0, 51):
        assert replay.check(MECHANISMS[name], AGES, [*AGES, other]) == []
        assert replay.check(MECHANISMS[name], [*AGES, other], AGES) == []


@pytest.mark.parametrize("name", REPLACED)
def test_every_mechanism_under_replace_one(name):
    for one, other in ((119, 0), (0, 51)):
        assert replay.check(REPLACED[name], [*AGES, one], [*AGES, other], adjacency=R) == []


def test_no_mechanism_is_forgotten():
    """Of the package of mechanisms; parts of releases that applications bill together are replayed
    with their applications.
    """
    named = set(MECHANISMS) | set(REPLACED)
    for cls in replay.mechanisms():
        kinds = [c for c in [cls, *cls.__subclasses__()] if c.__module__.startswith(replay.HOMES)]
        concrete = {c.__name__ for c in kinds if not inspect.isabstract(c)}
        assert concrete & named, cls
        assert {c for c in concrete if not c.startswith("_")} <= named


def kinds(run, data, neighbour, **more):
    return {fault.kind for fault in replay.check(run, data, neighbour, **more)}


ROWS = np.random.default_rng(1).random((30, 2))
FAR = np.vstack([ROWS, [[1.0, 1.0]]])


def test_a_lower_bound_used_twice_leaves_a_diagonal_without_noise():
    """Sensitivity low^2 in place of high^2: for bounds (0, 1) it is zero, and no noise is added."""

    def moments(rows, low=0.0, high=1.0, fixed=False):
        total = rows.T @ rows
        off = noisy(LaplaceMechanism(2.0), float(total[0, 1]), Bound.scalar(high**2), "off")
        sensitivity = high**2 if fixed else low**2
        diagonal = [
            noisy(LaplaceMechanism(2.0), float(total[k, k]), Bound.scalar(sensitivity), f"{k}")
            if sensitivity
            else float(total[k, k])
            for k in range(2)
        ]
        return [off, *diagonal]

    assert kinds(moments, ROWS, FAR) == {"result"}
    assert kinds(lambda rows: moments(rows, fixed=True), ROWS, FAR) == set()


def test_a_swapped_split_of_the_budget():
    """Counts were to get a small part of epsilon and sums in d dimensions the rest; on return the
    two are swapped.
    """

    def clusters(rows, swapped=True):
        d = rows.shape[1]
        small, large = 0.2, 0.8 / d  # of the count, and of each dimension of the sum: 1.0 in all
        if swapped:
            small, large = large, small
        count = noisy(DiscreteLaplaceMechanism(small), len(rows), Bound.scalar(1.0), "count")
        sums = [
            noisy(
                LaplaceMechanism(1 / large), float(rows[:, k].sum()), Bound.scalar(1.0), f"sum {k}"
            )
            for k in range(d)
        ]
        return [count, *sums]

    wide, more = np.tile(ROWS, 8), np.tile(FAR, 8)
    claimed = events.EpsilonDelta(1.0)
    assert kinds(clusters, wide, more, claimed=claimed) == {"cost"}
    assert kinds(lambda rows: clusters(rows, swapped=False), wide, more, claimed=claimed) == set()


def test_a_bound_of_r_where_it_is_r_squared():
    def quadratic(rows, power=1, r=3.0):
        rows = rows * r
        return noisy(
            GaussianMechanism(2.0), float((rows[:, 0] ** 2).sum()), Bound.scalar(r**power), "q"
        )

    assert kinds(quadratic, ROWS, FAR) == {"distance"}
    assert kinds(lambda rows: quadratic(rows, power=2), ROWS, FAR) == set()


def test_a_number_of_records_that_is_not_public():
    def mean(rows, own=True):
        total = noisy(LaplaceMechanism(2.0), float(rows[:, 0].sum()), Bound.scalar(1.0), "sum")
        count = (
            len(rows)
            if own
            else noisy(DiscreteLaplaceMechanism(0.5), len(rows), Bound.scalar(1.0), "count")
        )
        return total / count

    assert kinds(mean, ROWS, FAR) == {"result"}
    assert kinds(lambda rows: mean(rows, own=False), ROWS, FAR) == set()

    def scaled(rows):  # the same mistake in the sensitivity: range / n, with the n of the data
        return noisy(
            LaplaceMechanism(2.0), float(rows[:, 0].mean()), Bound.scalar(1.0 / len(rows)), "mean"
        )

    assert kinds(scaled, ROWS, FAR) == {"flow"}


def test_categories_read_from_the_data():
    words, more = ["a", "b", "a"], ["a", "b", "a", "only me"]

    def histogram(cells, public=()):
        keys = list(public) or sorted(set(cells))
        counts = noisy(
            DiscreteLaplaceMechanism(0.5),
            np.array([cells.count(k) for k in keys]),
            Bound(1.0, 1.0, 1.0),
            "counts",
        )
        return dict(zip(keys, counts.tolist(), strict=True))

    assert "flow" in kinds(histogram, words, more)
    assert kinds(lambda cells: histogram(cells, ("a", "b", "only me")), words, more) == set()


def test_an_empty_cluster_that_is_skipped():
    def centres(rows, skip=True):
        found = []
        for k in range(2):
            mine = rows[rows[:, 0] > 0.995] if k else rows[rows[:, 0] <= 0.995]
            if skip and not len(mine):
                found.append(None)
                continue
            found.append(
                noisy(
                    LaplaceMechanism(2.0), float(mine[:, 1].sum()), Bound.scalar(1.0), f"centre {k}"
                )
            )
        return found

    assert "flow" in kinds(centres, ROWS, FAR)
    assert kinds(lambda rows: centres(rows, skip=False), ROWS, FAR) == set()


def test_a_seed_of_one_byte_shows_itself_in_repeats():
    """Noise of a million possible values, drawn 600 times: with 256 seeds there are at most 256 of
    them.
    """
    mechanism = DiscreteLaplaceMechanism(1e-3)

    def draws(secrets):
        permits = (mock_permit(mechanism.event, 1, "draw") for _ in range(600))
        return {
            mechanism.release(Bounded(0, Bound.scalar(1.0)), p, s).value
            for p, s in zip(permits, secrets, strict=False)
        }

    byte = (Randomness(bytes([k % 256]) * 32) for k in range(600))
    assert len(draws(byte)) <= 256
    assert len(draws(Randomness.from_os() for _ in range(600))) > 450


def test_an_error_that_depends_on_the_data():
    def fragile(rows):
        noisy(LaplaceMechanism(2.0), float(rows[:, 0].sum()), Bound.scalar(1.0), "sum")
        if rows.max() >= 1:
            raise ValueError(rows.max())

    assert "flow" in kinds(fragile, ROWS, FAR)


def test_everything_is_as_it_was_afterwards():
    before = [dict(vars(cls)) for cls in replay.mechanisms()]
    replay.check(lambda rows: 1 / 0, ROWS, FAR)
    assert [dict(vars(cls)) for cls in replay.mechanisms()] == before
