"""How mechanisms behave: what they refuse, what depends on the permit, and that no data make them
fail.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpfy.core import events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.mechanisms.additive import GaussianMechanism, LaplaceMechanism
from dpfy.mechanisms.candidates import PrivateSelection
from dpfy.mechanisms.choice import Exponential, NoisyMax, PermuteAndFlip
from dpfy.mechanisms.discrete import DiscreteLaplaceMechanism
from dpfy.mechanisms.histogram import StabilityHistogram
from dpfy.mechanisms.response import RandomizedResponseMechanism, UnaryResponse
from dpfy.mechanisms.sparse import SparseVector
from dpfy_lab.mechanisms.aggregate import AggregateMean, AggregateMedian
from dpfy_lab.mechanisms.local_sensitivity import (
    Near,
    ProposeTestRelease,
    SmoothQuantile,
    smooth_sensitivity,
)
from dpfy_lab.mechanisms.staircase import Staircase

SECRET = Randomness.for_tests(5)
ADD, REPLACE = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE
ONE = Bound.scalar(1.0)
ODD = [0.0, -0.0, 1.0, math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324]


def release(mechanism, value, bound=ONE, adjacency=ADD, **more):
    return mechanism.release(
        Bounded(value, bound), mock_permit(mechanism.event, 1, adjacency=adjacency), SECRET, **more
    ).value


STATED = [
    (Staircase, lambda a: Staircase(1.0, adjacency=a), 1.0, ONE),
    (Exponential, lambda a: Exponential(1.0, adjacency=a), [1, 2], ONE),
    (PermuteAndFlip, lambda a: PermuteAndFlip(1.0, adjacency=a), [1, 2], ONE),
    (NoisyMax, lambda a: NoisyMax(1.0, adjacency=a), [1, 2], ONE),
    (
        ProposeTestRelease,
        lambda a: ProposeTestRelease(1.0, 1e-6, 1.0, adjacency=a),
        Near(1.0, 3),
        ONE,
    ),
]


@pytest.mark.parametrize(
    ("_", "made", "value", "bound"), STATED, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_bill_for_other_neighbours_is_refused(_, made, value, bound):
    """What is stated for adding a unit says nothing of replacing one, which moves twice as far: the
    ledger must agree.
    """
    for mine, ledgers in ((ADD, REPLACE), (REPLACE, ADD)):
        mechanism = made(mine)
        with pytest.raises(InvalidInput, match="is not that of the ledger"):
            release(mechanism, value, bound, ledgers)
        release(mechanism, value, bound, mine)


def test_a_ledger_gives_permits_with_its_adjacency(tmp_path):
    for adjacency in (ADD, REPLACE):
        ledger = Ledger.open(tmp_path / f"{adjacency.value}.jsonl", adjacency=adjacency)
        mechanism = Exponential(0.5, adjacency=adjacency)
        permit = ledger.reserve("choice", mechanism.event)
        assert permit.adjacency is adjacency
        mechanism.release(Bounded([1, 2, 3], ONE), permit)
        with pytest.raises(InvalidInput, match="was released before"):
            mechanism.release(Bounded([1, 2, 3], ONE), permit)


def test_replacement_doubles_the_noise():
    rng_free = [Staircase(1.0, adjacency=a).grid(ONE).exponent for a in (ADD, REPLACE)]
    assert rng_free[1] == rng_free[0] + 1
    assert Exponential(1.0, adjacency=REPLACE)._laid(Bounded([1, 2], ONE))[1] == 4
    assert Exponential(1.0, True)._laid(Bounded([1, 2], ONE))[1] == 1
    wide, narrow = (
        SparseVector(1.0, 3.0, adjacency=a).scales()[0] * 2**a_bits
        for a, a_bits in ((REPLACE, 1), (ADD, 0))
    )
    assert float(wide / narrow) == pytest.approx(2.0, rel=1e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("odd", ODD)
def test_no_value_raises(odd):
    release(Staircase(1.0), odd)
    for kind in (Exponential, PermuteAndFlip, NoisyMax):
        assert release(kind(1.0), np.array([odd, 0.0, 1.0])) in (0, 1, 2)
    release(ProposeTestRelease(1.0, 1e-6, 1.0), Near(odd, 100))
    stream = SparseVector(1.0, 0.0, answers=2, numeric=0.5).open(
        mock_permit(events.EpsilonDelta(1.0), 3), SECRET
    )
    stream.ask(Bounded(odd, ONE))
    assert (
        0
        <= release(
            SmoothQuantile(1.0, 1e-3, 0.0, 10.0), np.array([odd, 1.0, 2.0]), Bound(), REPLACE
        )
        <= 10
    )
    for kind in (AggregateMean, AggregateMedian):
        mechanism = kind(1.0, 3, 0.0, 10.0)
        found = mechanism.release(
            lambda rows: rows.sum() * odd, np.ones(20), mock_permit(mechanism.event, 1), SECRET
        ).value
        assert math.isfinite(found)


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (lambda: release(Exponential(1.0), [1, 2], Bound()), "without a bound on its linf norm"),
        (lambda: release(Exponential(1.0), np.zeros(0)), "at least one candidate"),
        (lambda: release(Staircase(1.0), np.zeros(2)), "use Laplace"),
        (lambda: NoisyMax(1.0, noise="gauss"), "must be one of"),
        (lambda: NoisyMax(-1.0), "greater than 0"),
        (lambda: NoisyMax(math.nan), "finite"),
        (lambda: RandomizedResponseMechanism(0.0), "noise_parameter"),
        (lambda: RandomizedResponseMechanism(0.5, 1), "buckets"),
        (lambda: UnaryResponse(1.0, adjacency=ADD), "cannot be absent"),
        (lambda: SparseVector(1.0, 0.0, monotone=True, adjacency=REPLACE), "leave out monotone"),
        (lambda: SparseVector(1.0, 0.0, answers=0), "answers"),
        (lambda: SparseVector(1.0, 0.0, numeric=1.0), "below 1"),
        (lambda: SmoothQuantile(1.0, 1e-6, 0.0, 1.0, adjacency=ADD), "replace-one"),
        (lambda: SmoothQuantile(1e-6, 1e-6, 0.0, 1.0), "exponential mechanism"),
        (lambda: SmoothQuantile(1.0, 1e-6, 1.0, 0.0), "above lower"),
        (lambda: AggregateMean(1.0, 3, 1.0, 1.0), "above lower"),
        (
            lambda: release(ProposeTestRelease(1.0, 1e-6, 1.0), Near(1.0, 3), Bound.scalar(2.0)),
            "at most 1",
        ),
        (lambda: StabilityHistogram(DiscreteLaplaceMechanism(1.0), 5, keys=2), "keys \\* most, 2"),
        (
            lambda: release(
                StabilityHistogram(DiscreteLaplaceMechanism(1.0), 5), {"a": 3}, Bound.scalar(2.0)
            ),
            "within keys",
        ),
        (
            lambda: release(
                StabilityHistogram(DiscreteLaplaceMechanism(1.0), 5), {"a": 3}, Bound(1.0)
            ),
            "l1 norm",
        ),
        (lambda: PrivateSelection(events.Laplace(1.0), 0.5), "1 to 100,000"),
        (lambda: DiscreteLaplaceMechanism(1e-15), "between 2.-20 and 2.45"),
        (lambda: SparseVector(1e-9, 0.0, answers=1000), "between 2.-20 and 2.45"),
        (lambda: LaplaceMechanism(0.0), "greater than 0"),
        (lambda: GaussianMechanism(1e-9), "must be 0 or lie between"),
    ],
)
def test_refused(attempt, words):
    with pytest.raises((InvalidInput, Unsupported), match=words):
        attempt()


def test_a_stream_ends_with_its_answers_and_its_permit():
    mechanism = SparseVector(50.0, 100.0, answers=2)
    permit = mock_permit(mechanism.event, 5)
    stream = mechanism.open(permit, SECRET)
    asked = [stream.ask(Bounded(value, ONE)).value for value in (0, 200, 0, 200)]
    assert asked == [False, True, False, True]
    with pytest.raises(InvalidInput, match="the 2 answers above"):
        stream.ask(Bounded(0, ONE))
    with pytest.raises(
        InvalidInput, match="was released before"
    ):  # a second stream under the same permit
        mechanism.open(permit, SECRET).ask(Bounded(0, ONE))
    short = mechanism.open(mock_permit(mechanism.event, 1), SECRET)
    short.ask(Bounded(0, ONE))
    with pytest.raises(InvalidInput, match="covers 1 releases"):
        short.ask(Bounded(0, ONE))
    with pytest.raises(InvalidInput, match="at most 1, which is charged"):
        mechanism.open(mock_permit(mechanism.event, 5), SECRET).ask(Bounded(0, Bound.scalar(2.0)))


def test_every_stream_has_a_threshold_of_its_own():
    mechanism = SparseVector(1.0, 0.0)
    streams = [
        mechanism.open(mock_permit(mechanism.event, 3), Randomness.for_tests(k)) for k in range(30)
    ]
    assert len({s._threshold for s in streams}) == 30
    assert np.std([math.ldexp(s._threshold, mechanism.grid.exponent) for s in streams]) > 1
    assert (
        mechanism.open(mock_permit(mechanism.event, 3))._threshold
        != mechanism.open(mock_permit(mechanism.event, 3))._threshold
    )


def test_a_resumed_stream_answers_the_same():
    mechanism, questions = SparseVector(2.0, 5.0, answers=3, numeric=0.3), [3, 6, 4, 9, 1]

    def answers():
        stream = mechanism.open(mock_permit(mechanism.event, 10), SECRET)
        return [stream.ask(Bounded(q, ONE)).value for q in questions if stream.left]

    assert answers() == answers()


def test_the_budget_is_split_as_the_proof_needs():
    """Threshold epsilon_1, comparisons epsilon_2, numbers epsilon_3 add up; the noise of
    comparisons grows with the answers.
    """
    for answers, numeric, monotone in ((1, 0.0, False), (7, 0.25, False), (7, 0.25, True)):
        mechanism = SparseVector(1.5, 0.0, answers=answers, numeric=numeric, monotone=monotone)
        assert sum(mechanism.split) == 1.5
        width = math.floor(mechanism.grid.steps(1.0)) + 1
        first, each, number = mechanism.scales()
        spent = (
            width / first
            + answers * width * (1 if monotone else 2) / each
            + (answers * width / number if number else 0)
        )
        assert spent == 1.5
        assert width / first == mechanism.split[0]
        assert float(mechanism.split[1] / mechanism.split[0]) == pytest.approx(
            (answers * (1 if monotone else 2)) ** (2 / 3)
        )


def test_a_stable_value_is_released_as_it_is():
    mechanism = ProposeTestRelease(1.0, 1e-6, 0.0)
    assert release(mechanism, Near("Tuesday", 1000)) == "Tuesday"
    assert release(mechanism, Near("Tuesday", 0)) is None
    assert mechanism.threshold == 14


def test_sample_and_aggregate_is_near():
    rows = np.random.default_rng(0).normal(5.0, 1.0, 20_000)
    for kind in (AggregateMean, AggregateMedian):
        mechanism = kind(1.0, 100, 0.0, 10.0)
        found = mechanism.release(np.median, rows, mock_permit(mechanism.event, 1), SECRET).value
        assert found == pytest.approx(5.0, abs=0.4)

    def fails(rows):
        raise RuntimeError(str(rows))

    mechanism = AggregateMean(1e6, 3, 0.0, 10.0)
    assert mechanism.release(
        fails, rows, mock_permit(mechanism.event, 1), SECRET
    ).value == pytest.approx(5.0, abs=0.01)


def test_smooth_sensitivity_by_its_definition():
    """The largest exp(-beta k) times the largest local sensitivity of any data that differ in k
    values.
    """
    from itertools import product

    width, beta, n, rank = 3, 0.4, 3, 1
    tables = [tuple(sorted(t)) for t in product(range(width + 1), repeat=n)]

    def apart(a, b):
        left = list(b)
        for x in a:
            if x in left:
                left.remove(x)
        return len(left)

    local = {
        a: max(abs(a[rank] - b[rank]) for b in tables if apart(a, b) <= 1) for a in set(tables)
    }
    for a in set(tables):
        brute = max(math.exp(-beta * apart(a, b)) * local[b] for b in set(tables))
        assert smooth_sensitivity(np.array(a), rank, width, beta) == pytest.approx(brute)
    for a in set(tables):
        for b in set(tables):
            if apart(a, b) == 1:
                high, low = (smooth_sensitivity(np.array(t), rank, width, beta) for t in (a, b))
                assert high <= math.exp(beta) * low * (1 + 1e-12)


def test_the_smooth_median_of_dense_data_is_close():
    rows = np.random.default_rng(1).normal(50.0, 5.0, 20_001)
    mechanism = SmoothQuantile(1.0, 1e-6, 0.0, 1e6)
    found = [
        mechanism.release(
            Bounded(rows, Bound()), mock_permit(mechanism.event, 20, adjacency=REPLACE), SECRET, k
        ).value
        for k in range(20)
    ]
    assert (
        np.median(np.abs(np.array(found) - np.median(rows))) < 5
    )  # the range is a million wide: it is the floor of the noise that counts


def test_keys_come_sorted_and_absent_ones_never():
    mechanism = StabilityHistogram.of(1.0, 1e-9)
    counts = {"b": 500, "a": 400, "zero": 0, "less": -3, 7: 300, "one": 1, "no number": math.nan}
    found = release(mechanism, counts, mechanism.bound)
    again = release(mechanism, dict(reversed(counts.items())), mechanism.bound)
    assert list(found) == list(again) == [7, "a", "b"]
    assert found == again
    assert release(mechanism, {"many": math.inf, "more": 10**30}, mechanism.bound)["more"] > 1e17
    wide = StabilityHistogram(GaussianMechanism(2.0), 60, keys=4, most=2)
    assert set(release(wide, {"a": 1000, "b": 1}, wide.bound)) == {"a"}
    assert wide.delta < 1e-6
    for _ in range(200):  # a key that the data do not have can never come out
        assert (
            "zero"
            not in StabilityHistogram(DiscreteLaplaceMechanism(0.1), 1)
            .release(
                Bounded({"zero": 0}, ONE),
                mock_permit(StabilityHistogram(DiscreteLaplaceMechanism(0.1), 1).event, 1),
            )
            .value
        )


def test_far_tails_cost_no_time():
    far = StabilityHistogram(DiscreteLaplaceMechanism(20.0), 1 << 40)
    assert 0 < far.delta < 1e-300
    assert StabilityHistogram.of(1e-9, 1e-300).delta <= 1e-300


def test_the_best_of_private_runs():
    inner = LaplaceMechanism(1.0)
    mechanism = PrivateSelection(inner.event, 20.0, 0.0)
    names = []

    def run(number, permit, randomness):
        names.append(permit.name)
        score = inner.release(Bounded(float(number), ONE), permit, randomness).value
        return score, score

    found = mechanism.release(run, mock_permit(mechanism.event, 1), SECRET).value
    assert len(set(names)) == len(names)
    assert len(names) >= 1
    count, first = len(names), list(names)
    names.clear()
    assert mechanism.release(run, mock_permit(mechanism.event, 1), SECRET).value == found
    assert names == first
    with pytest.raises(
        InvalidInput, match="is not what the permit"
    ):  # a run must release what is billed
        mechanism.release(
            lambda k, permit, secret: (
                0,
                LaplaceMechanism(2.0).release(Bounded(1, ONE), permit, secret),
            ),
            mock_permit(mechanism.event, 1),
        )
    with pytest.raises(InvalidInput, match="may run several times"):
        mock_permit(inner.event, 1).inner(inner.event, 0)
    assert count == len(names)
    none = PrivateSelection(inner.event, 1e-6, math.inf)
    assert none.release(run, mock_permit(none.event, 1), SECRET).value is None
