"""Local protocols: the exact privacy ratio by enumeration, unbiased estimates, and errors that are
those of the formulas.
"""

from __future__ import annotations

import itertools
import math
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from dpfy.core import events
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.core.values import mock_permit
from dpfy.local import frequencies as module
from dpfy.local import means
from dpfy.local.frequencies import (
    HadamardResponse,
    KaryResponse,
    LocalHashing,
    Rappor,
    UnaryEncoding,
)
from dpfy.local.means import DuchiMean, LaplaceMean, PrivUnit
from dpfy.local.protocol import DeviceReport
from dpfy.mechanisms import response

sys.path.insert(0, str(Path(__file__).parents[1] / "mechanisms"))
from enumerated import ONE, Again, Branches

FREQUENCIES = {
    "k-ary": KaryResponse,
    "unary": UnaryEncoding,
    "symmetric": lambda epsilon, buckets: UnaryEncoding(epsilon, buckets, False),
    "rappor": lambda epsilon, buckets: Rappor(2 * epsilon, buckets, once=epsilon),
    "hashing": LocalHashing,
    "binary hashing": lambda epsilon, buckets: LocalHashing(epsilon, buckets, 2),
    "hadamard": HadamardResponse,
}


@pytest.fixture
def branches(monkeypatch):
    """Every sampler replaced by branches over all of its outcomes."""
    found = Branches()
    for place, names in ((response, ("coins", "uniform")), (module, ("coins", "uniform"))):
        for name in names:
            monkeypatch.setattr(place, name, getattr(found, name))
    return found


def ratio(laws) -> float:
    """The largest log ratio of the chances of one report, over all pairs of values."""
    logs = [{outcome: math.log(chance / ONE) for outcome, chance in law.items()} for law in laws]
    assert all(
        set(log) == set(logs[0]) for log in logs
    )  # no report is possible for one value and not for another
    return max(
        abs(p[outcome] - q[outcome]) for p, q in itertools.combinations(logs, 2) for outcome in p
    )


def laws_of(branches, protocol, values):
    return [
        branches.law(
            lambda v=value: tuple(np.ravel(protocol.draw(protocol.given([v]), None)[0]).tolist())
        )
        for value in values
    ]


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("name", ["k-ary", "unary", "symmetric", "rappor", "hadamard"])
def test_the_ratio_is_epsilon(branches, name, epsilon):
    for buckets in (2, 3, 4):
        laws = laws_of(branches, FREQUENCIES[name](epsilon, buckets), range(buckets))
        assert epsilon * (1 - 1e-9) <= ratio(laws) <= epsilon * (1 + 1e-14)
        assert all(abs(sum(law.values()) / ONE - 1) < 1e-12 for law in laws)


@pytest.mark.parametrize(("blocks", "side"), [(1, 8), (2, 4), (4, 2)])
def test_the_ratio_of_hadamard_response_in_blocks(branches, blocks, side, monkeypatch):
    buckets = blocks * (side - 1)
    monkeypatch.setattr(HadamardResponse, "layout", (blocks, side))
    laws = laws_of(branches, HadamardResponse(1.5, buckets), range(buckets))
    assert 1.5 * (1 - 1e-9) <= ratio(laws) <= 1.5 * (1 + 1e-14)
    assert all(len(law) == blocks * side for law in laws)


@pytest.mark.parametrize("cells", [0, 2, 5])
def test_the_ratio_of_hashing_is_epsilon_for_every_hash_function(branches, cells, monkeypatch):
    protocol = LocalHashing(1.2, 6, cells)
    for a, b in ((1, 0), (123457, 98765), (module.PRIME - 1, 5)):
        drawn = iter(itertools.cycle((a, b)))
        monkeypatch.setattr(
            module, "uniform", lambda count, n, bits, drawn=drawn: np.full(count, next(drawn))
        )
        found = ratio(laws_of(branches, protocol, range(6)))
        assert 1.2 * (1 - 1e-9) <= found <= 1.2 * (1 + 1e-14)


def test_rappor_states_both_guarantees(branches):
    """The permanent row costs epsilon, one report `once`; two reports of one row no more than
    epsilon, and more than one.
    """
    protocol = Rappor(2.0, 2, once=0.7)
    rows = [
        branches.law(lambda v=v: tuple(protocol.permanent(np.array([v]), None)[0].tolist()))
        for v in (0, 1)
    ]
    assert ratio(rows) == pytest.approx(2.0, rel=1e-9)
    assert ratio(laws_of(branches, protocol, (0, 1))) == pytest.approx(0.7, rel=1e-9)

    def several(value, reports):
        row = protocol.permanent(np.array([value]), None)
        return tuple(
            bit for _ in range(reports) for bit in protocol.instantaneous(row, None)[0].tolist()
        )

    found = [
        ratio([branches.law(lambda v=v, n=n: several(v, n)) for v in (0, 1)]) for n in (1, 2, 3)
    ]
    assert 0.7 * (1 - 1e-9) < found[0] < found[1] < found[2] < 2.0
    with pytest.raises(InvalidInput, match="must be below epsilon"):
        Rappor(1.0, 5, once=1.0)


def test_rappor_has_the_published_numbers():
    """Erlingsson et al. 2014 with f = 1/2, p = 1/2, q = 3/4 and two hash functions: 4.394 for good
    and 1.0743 once; half with one.
    """
    f, p, q = 0.5, 0.5, 0.75
    high, low = (1 - f / 2) * q + f / 2 * p, f / 2 * q + (1 - f / 2) * p
    assert 2 * math.log(high * (1 - low) / (low * (1 - high))) == pytest.approx(1.0743, abs=1e-4)
    protocol = Rappor(2 * math.log((1 - f / 2) / (f / 2)), 8, once=0.5)
    assert float(protocol.flips[0]) == pytest.approx(f / 2)
    assert 2 * protocol.epsilon == pytest.approx(4.394, abs=1e-3)


class Signs:
    """Random bits of which the second call, the signs of a report, takes every branch; a third is a
    rejection.
    """

    def __init__(self, branches, dimension):
        self.branches, self.dimension, self.calls = branches, dimension, 0

    def words(self, count):
        self.calls += 1
        if self.calls == 1:
            return np.full(count, 1 << 63, np.uint64)
        if self.calls > 2:
            raise Again
        each = ONE >> self.dimension
        chosen = self.branches.branch(
            [(v << (8 - self.dimension), each) for v in range(1 << self.dimension)]
        )
        return np.full(count, chosen, np.uint64)


@pytest.mark.parametrize("dimension", [1, 2, 3, 4, 5])
def test_the_ratio_of_duchi_is_epsilon_and_its_mean_the_value(branches, dimension, monkeypatch):
    """The signs are drawn again until they fit the coin, which is not drawn again: one law for each
    side of it.
    """
    protocol = DuchiMean(1.3, dimension)
    corners = list(itertools.product((-1.0, 1.0), repeat=dimension))[:4]
    laws = []
    for corner in corners:
        law = {}
        for near, chance in ((True, protocol.chance), (False, 1 - protocol.chance)):
            monkeypatch.setattr(
                means, "coins", lambda count, p, bits, near=near: np.full(count, near)
            )
            given = protocol.given([corner])
            side = branches.law(
                lambda g=given: tuple(protocol.draw(g, Signs(branches, dimension))[0].tolist())
            )
            law |= {signs: law.get(signs, 0) + int(chance * part) for signs, part in side.items()}
        laws.append(law)
    assert 1.3 * (1 - 1e-9) <= ratio(laws) <= 1.3 * (1 + 1e-14)
    for corner, law in zip(corners, laws, strict=True):
        mean = sum(np.array(signs) * (chance / ONE) for signs, chance in law.items())
        assert (2 * mean - 1) * protocol.scale == pytest.approx(corner, abs=1e-9)


def test_laplace_is_exact():
    for epsilon, low, high in (
        (0.1, -1.0, 1.0),
        (1.0, 0.0, 1e6),
        (7.3, -3e-9, 1e-3),
        (1.0, 1e6, 1e6 + 1),
    ):
        protocol = LaplaceMean(epsilon, low, high)
        ends = protocol.given([low, high, -math.inf, math.inf, math.nan])
        assert ends[0] == ends[2]
        assert ends[1] == ends[3]
        assert ends[0] < ends[4] < ends[1]
        cost = Fraction(
            int(ends[1] - ends[0]), protocol.parameter
        )  # the log ratio of two-sided geometric noise
        assert epsilon * (1 - 1e-6) < cost <= Fraction(epsilon)


def of_settings(count, seed):
    rng = np.random.default_rng(seed)
    for number in range(count):
        buckets = int(rng.integers(2, 30))
        yield (
            number,
            math.exp(rng.uniform(-1.2, 1.6)),
            buckets,
            rng.dirichlet(np.full(buckets, 0.5)),
            rng,
        )


@pytest.mark.parametrize("name", FREQUENCIES)
def test_error_of_frequencies_is_that_of_the_formula(name):
    """Over random settings: z of one share, 60 times each. Mean 0; the mean square is 1 within 5 of
    its deviations, so not 2/3 nor 3/2.
    """
    settings, repeats, people = 15, 60, 300
    found = []
    for number, epsilon, buckets, shares, rng in of_settings(
        settings, seed=sorted(FREQUENCIES).index(name)
    ):
        protocol = FREQUENCIES[name](epsilon, buckets)
        values = rng.choice(buckets, size=people, p=shares)
        truth = np.bincount(values, minlength=buckets) / people
        rows = protocol.reports(np.tile(values, repeats), randomness=Randomness.for_tests(number))
        deviation = np.sqrt(protocol.variances(truth) / people)
        target = int(rng.integers(buckets))
        for part in np.split(rows, repeats):
            found.append(
                (protocol.estimate(part).value[target] - truth[target]) / deviation[target]
            )
    z = np.array(found)
    assert abs(z.mean()) * math.sqrt(len(z)) < 4
    assert abs((z**2).mean() - 1) < 5 * math.sqrt(2 / len(z)) < 1 / 3


def test_intervals_cover():
    rng, covered, total = np.random.default_rng(1), 0, 0
    for name, make in FREQUENCIES.items():
        protocol, values = make(1.0, 8), rng.integers(8, size=2000)
        truth = np.bincount(values, minlength=8) / 2000
        for seed in range(10):
            found = protocol.estimate(
                protocol.reports(values, randomness=Randomness.for_tests(100 + seed)), 0.9
            )
            covered, total = (
                covered + int(((found.low <= truth) & (truth <= found.high)).sum()),
                total + 8,
            )
        assert found.reports == 2000, name
    assert abs(covered / total - 0.9) < 5 * math.sqrt(0.9 * 0.1 / total)


def test_error_of_means_is_that_of_the_formula():
    rng = np.random.default_rng(2)
    for number in range(6):
        epsilon, dimension = math.exp(rng.uniform(-0.5, 1.5)), int(rng.integers(1, 9))
        numbers_ = rng.uniform(-1, 1, size=(400, dimension))
        for protocol, values in (
            (LaplaceMean(epsilon, -1.0, 1.0), numbers_[:, 0]),
            (DuchiMean(epsilon, dimension), numbers_),
        ):
            rows = protocol.reports(
                np.tile(values, (150, 1)[: values.ndim]), randomness=Randomness.for_tests(number)
            )
            z = []
            for part in np.split(rows, 150):
                found = protocol.estimate(part)
                z.append(
                    np.atleast_1d((found.value - values.mean(axis=0)) / found.standard_error)[0]
                )
            assert abs(np.mean(z)) * math.sqrt(150) < 4.5
            assert abs(np.mean(np.square(z)) - 1) < 5 * math.sqrt(2 / 150)


@pytest.mark.parametrize(("epsilon", "dimension"), [(1.0, 2), (2.0, 3), (8.0, 20), (4.0, 300)])
def test_privunit(epsilon, dimension):
    """Its epsilon, the measure of its cap, its mean and its error, by the chances that are used;
    the cap with the least error.
    """
    protocol, people = PrivUnit(epsilon, dimension), 4000
    chance, measure, begins, length = protocol._cut
    assert epsilon - 1e-8 < protocol.exact_epsilon <= epsilon
    rng = np.random.default_rng(3)
    uniform = rng.standard_normal((20_000, dimension))
    share = np.mean(uniform[:, 0] / np.linalg.norm(uniform, axis=1) >= begins)
    assert abs(share - measure) < 5 * math.sqrt(measure * (1 - measure) / 20_000)
    value = rng.standard_normal(dimension)
    value /= np.linalg.norm(value)
    rows = protocol.reports(np.tile(value * 7, (people, 1)), randomness=Randomness.for_tests(4))
    along = rows @ value
    assert abs(np.mean(along >= begins) - chance) < 5 * math.sqrt(chance * (1 - chance) / people)
    assert abs(along.mean() / length - 1) < 5 * along.std() / length / math.sqrt(people)
    errors = ((rows / length - value) ** 2).sum(axis=1)
    assert abs(errors.mean() - protocol.variance) < 5 * errors.std() / math.sqrt(people)
    found = protocol.estimate(rows)
    assert found.refused == 0
    assert abs(((found.value - value) ** 2 / found.standard_error**2).mean() - 1) < 5 * math.sqrt(
        2 / dimension
    )
    caps = [
        PrivUnit(epsilon, dimension, float(cap)).variance
        for cap in np.linspace(0.01, 1, 40) * epsilon
    ]
    assert protocol.variance <= min(caps) * (1 + 1e-6)
    assert (rows / protocol.step == np.rint(rows / protocol.step)).all()  # on the grid


def test_privunit_without_a_direction_has_mean_zero():
    protocol = PrivUnit(2.0, 3)
    for lost in (0.0, math.nan, math.inf):
        found = protocol.estimate(
            protocol.reports(np.full((3000, 3), lost), randomness=Randomness.for_tests(5))
        )
        assert (np.abs(found.value) < 4.5 * found.standard_error).all()


def test_bad_reports_are_left_out_and_bad_values_counted_inside():
    protocol = KaryResponse(1.0, 4)
    found = protocol.estimate(
        [DeviceReport(protocol, np.int64(v)) for v in (0, 3, 4, -1, 2**62)]
        + [DeviceReport(protocol, np.array([1.0]))]
    )
    assert (found.reports, found.refused) == (2, 4)
    hashed = LocalHashing(1.0, 4)
    assert (
        hashed.estimate(np.array([[1, 2, 0], [1, 2, 99], [-1, 0, 0], [module.PRIME, 0, 0]])).refused
        == 3
    )
    unit = PrivUnit(1.0, 2)
    assert (
        unit.estimate(np.array([[1.0, 0.0], [1e300, 0.0], [math.nan, 0.0], [0.0, 0.0]])).refused
        == 3
    )
    laplace = LaplaceMean(1.0, 0.0, 1.0)
    assert laplace.estimate(np.array([0, 2**62, -(2**62)])).refused == 2
    assert protocol.given([-5, 9, 10**30, -(10**30)]).tolist() == [0, 3, 3, 0]
    with pytest.raises(InvalidInput, match="must be reports of"):
        protocol.estimate([DeviceReport(KaryResponse(2.0, 4), np.int64(1))])
    with pytest.raises(InvalidInput, match="at least one"):
        protocol.estimate([])
    with pytest.raises(InvalidInput, match="rows of shape"):
        protocol.estimate(np.zeros((3, 2)))


def test_a_permit_must_be_for_this_protocol_and_for_replaced_values():
    protocol, secret = KaryResponse(1.0, 4), Randomness.for_tests(6)
    permit = mock_permit(protocol.event, 2, adjacency=Adjacency.REPLACE_ONE)
    protocol.report(2, permit, secret)
    with pytest.raises(InvalidInput, match="was released before"):
        protocol.report(2, permit, secret)
    with pytest.raises(InvalidInput, match="is not what the permit"):
        KaryResponse(2.0, 4).report(2, permit, secret, 1)
    with pytest.raises(InvalidInput, match="adjacency"):
        protocol.report(2, mock_permit(protocol.event, 1), secret)
    assert UnaryEncoding(1.0, 4).event == events.EpsilonDelta(1.0)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: KaryResponse(0.0, 4), "epsilon"),
        (lambda: KaryResponse(31.0, 4), "epsilon"),
        (lambda: PrivUnit(1e-6, 4), "epsilon"),
        (lambda: KaryResponse(1.0, 1), "buckets"),
        (lambda: LocalHashing(1.0, 4, 1), "cells"),
        (lambda: LaplaceMean(1.0, 2.0, 2.0), "high"),
        (lambda: DuchiMean(1.0, 0), "dimension"),
        (lambda: PrivUnit(1.0, 1), "dimension"),
        (lambda: PrivUnit(1.0, 3, 2.0), "cap"),
        (lambda: KaryResponse(1.0, 4).report("red"), "must"),
        (lambda: DuchiMean(1.0, 2).report([1.0, 2.0, 3.0]), "values"),
    ],
)
def test_bad_input_is_one_line(make, field):
    with pytest.raises(InvalidInput, match=field):
        make()


@pytest.mark.parametrize("epsilon", [1e-4, 30.0])
def test_the_ends_of_the_range_have_estimates(epsilon):
    """Nothing divides by zero, and the least and the largest epsilon are kept."""
    for make in FREQUENCIES.values():
        if epsilon == 30.0 and make is FREQUENCIES["rappor"]:
            continue  # 60 for all reports
        protocol = make(epsilon, 1000)
        found = protocol.estimate(
            protocol.reports(np.arange(50), randomness=Randomness.for_tests(0))
        )
        assert np.isfinite(found.value).all()
        assert np.isfinite(found.standard_error).all()
    for protocol, values in (
        (LaplaceMean(epsilon, 0.0, 1.0), np.linspace(0, 1, 9)),
        (DuchiMean(epsilon, 4), np.zeros((9, 4))),
        (PrivUnit(epsilon, 4), np.eye(4)),
    ):
        assert np.isfinite(
            protocol.estimate(protocol.reports(values, randomness=Randomness.for_tests(0))).value
        ).all()
    assert PrivUnit(epsilon, 4).exact_epsilon <= epsilon
