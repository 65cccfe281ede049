"""Checks, events, codec, guarantee, randomness."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpfy.core import check, events
from dpfy.core import guarantee as tradeoff
from dpfy.core.codec import Codec
from dpfy.core.errors import InvalidInput
from dpfy.core.guarantee import Guarantee, decimal_up
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.core.values import Bound


@pytest.mark.parametrize(
    ("function", "bad"),
    [
        (check.positive, [0, -1.0, math.nan, math.inf, "3", None, True]),
        (check.nonnegative, [-1e-9, math.nan, math.inf]),
        (check.inside_unit, [0, 1, -0.1, math.nan]),
        (check.rate, [0, 1.0001]),
        (check.fraction, [-0.1, 1.1]),
        (check.integer, [0, 1.0, "2", True]),
    ],
)
def test_checks_refuse_with_name_value_and_rule(function, bad):
    for value in bad:
        with pytest.raises(InvalidInput) as caught:
            function("field", value)
        assert str(caught.value).startswith("field: got ")
        assert "; must" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_one_of_names_the_nearest():
    with pytest.raises(InvalidInput, match="did you mean 'epsilon'"):
        check.known_keys("privacy", ["epsilom"], ("epsilon", "delta"))


EVENTS = [
    events.Nothing(),
    events.NotPrivate(),
    events.MetricPrivacy(2.0, "distance"),
    events.Gaussian(1.5),
    events.Laplace(0.5),
    events.DiscreteLaplace(0.3, 2),
    events.DiscreteGaussian(4.0, 2),
    events.DistributedDiscreteGaussian(4.0, 10, 9, 3),
    events.DistributedSkellam(0.5, 10, 9, 3),
    events.RandomizedResponse(0.25, 4),
    events.MixtureOfGaussians(1.0, (0.0, 1.0), (0.9, 0.1)),
    events.EpsilonDelta(1.0, 1e-6),
    events.Shuffled(1.0, 100, 4),
    events.RandomCheckIns(1.0, 100, 0.5),
    events.Zcdp(0.1, 0.0),
    events.RenyiCurve((2.0, 8.0), (0.1, 0.5)),
    events.BoundedRange(0.5),
    events.NoisyThreshold(1.5),
    events.NoisyArgmax(4.0, 3),
    events.ObjectivePerturbation(1.5, 0.25, True, 0.1),
    events.PoissonSampled(0.01, events.Gaussian(1.0)),
    events.SampledWithoutReplacement(100, 10, events.Gaussian(1.0)),
    events.SampledWithReplacement(100, 10, events.Gaussian(1.0)),
    events.TruncatedPoissonGaussian(100, 0.1, 20, 1.0),
    events.BallsInBins(2.0, ((1.0, 0.5), (0.5, 1.0))),
    events.RandomlyAllocated(2.0, 30),
    events.Repeated(events.Gaussian(1.0), 7),
    events.Composed((events.Gaussian(1.0), events.Laplace(2.0))),
    events.Parallel((("north", events.Gaussian(1.0)), ("south", events.Nothing()))),
    events.RepeatAndSelect(events.Gaussian(1.0), 10.0, math.inf),
    events.OneOf((events.Gaussian(1.0), events.Laplace(2.0))),
    events.Stopped(events.Repeated(events.Gaussian(1.0), 7), 0.2),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_events_survive_json(event):
    import json

    assert events.CODEC.decode(json.loads(json.dumps(events.CODEC.encode(event)))) == event


def test_every_event_is_in_the_codec():
    assert {type(e) for e in EVENTS} == set(events.CODEC.table.values())


def test_codec_constructs_nothing_outside_its_table():
    for data in (
        {"kind": "os.system", "command": "x"},
        {"kind": "gaussian", "noise_multiplier": 1.0, "extra": 1},
        {"kind": "gaussian"},
    ):
        with pytest.raises(InvalidInput):
            events.CODEC.decode(data)
    with pytest.raises(InvalidInput):
        Codec("nothing", {}).encode(Bound(1.0))


def test_flatten_multiplies_counts():
    inner = events.Repeated(events.Gaussian(1.0), 3)
    whole = events.Composed(
        (events.Repeated(inner, 5), events.Gaussian(1.0), events.Nothing(), events.Laplace(1.0))
    )
    assert events.flatten(whole) == [(events.Gaussian(1.0), 16), (events.Laplace(1.0), 1)]


def test_printed_epsilon_is_never_below_the_value():
    generator = np.random.default_rng(0)
    for value in generator.uniform(0, 10, 200):
        assert float(decimal_up(value)) >= value
    assert decimal_up(3.0) == "3.000"


class _Gauss:
    """The exact curve of one Gaussian with mu = 1."""

    def delta(self, epsilon):
        from scipy.stats import norm

        return norm.cdf(0.5 - epsilon) - math.exp(epsilon) * norm.cdf(-0.5 - epsilon)

    def epsilon(self, delta):
        return 4.3775

    def epsilon_lower(self, delta):
        return None


def test_tradeoff_is_below_and_close_to_the_exact_one():
    from scipy.stats import norm

    guarantee = Guarantee(_Gauss(), "exact", Adjacency.ADD_OR_REMOVE_ONE)
    rates = [0.001, 0.01, 0.1, 0.3, 0.5, 0.9]
    exact = [norm.cdf(norm.ppf(1 - a) - 1) for a in rates]
    for got, truth in zip(guarantee.tradeoff(rates), exact, strict=True):
        assert truth - 0.01 <= got <= truth + 1e-12


def test_every_way_to_ask_gives_the_same_attacker():
    """Guarantee, calculator, card and audit read one trade-off curve."""
    from dpfy.accounting import interpretation
    from dpfy.audit.families import ClaimedFamily

    guarantee, family = (
        Guarantee(_Gauss(), "exact", Adjacency.ADD_OR_REMOVE_ONE),
        ClaimedFamily(lambda strength: _Gauss()),
    )
    curve = tradeoff.of_curve(_Gauss().delta)
    for rate in (0.0, 1e-6, 0.001, 0.01, 0.5, 1.0):
        missed = curve.miss_rate(rate)
        assert guarantee.tradeoff([rate]) == [missed]
        assert family.tradeoff(1.0)(rate) == pytest.approx(missed, abs=1e-15)
        assert (
            interpretation.true_positive_rate(_Gauss(), rate)
            == curve.hit_rate(rate)
            == 1 - missed
            >= rate
        )
    assert interpretation.meaning(_Gauss(), 1e-5).tpr_at_1_percent == curve.hit_rate(0.01)


def test_a_tradeoff_curve_at_its_ends():
    assert tradeoff.Tradeoff(()).hit_rates([0.0, 0.3]) == [
        1.0,
        1.0,
    ]  # nothing is known: nothing is excluded
    pure = tradeoff.of_curve(lambda epsilon: 0.0)
    assert pure.points == ((0.0, 0.0),)  # perfect privacy: one point says all
    assert pure.hit_rates([0.0, 0.3, 1.0]) == pytest.approx([0.0, 0.3, 1.0])
    assert tradeoff.Tradeoff(((1e6, 0.0),)).miss_rate(0.5) >= 0.0
    assert tradeoff.of_curve(lambda epsilon: 1.0).hit_rates([0.0, 0.5]) == [1.0, 1.0]


@pytest.mark.parametrize("shape", ["flat", "steps", "falling", "zero from 3 on", "one at the end"])
def test_a_flat_curve_is_read_at_few_of_its_points_and_no_other_curve_loses_one(shape):
    """A single reading can take a second: no attacker gains or loses anything by those left out."""
    deltas = {
        "flat": [0.5] * 33,
        "steps": [1.0 - 0.1 * (k // 4) for k in range(33)],
        "falling": [2.0**-k for k in range(33)],
        "zero from 3 on": [0.3, 0.2, 0.2] + [0.0] * 30,
        "one at the end": [0.4] * 32 + [0.1],
    }[shape]
    read = []

    def delta(epsilon):
        read.append(epsilon)
        return deltas[tradeoff.GRID.index(epsilon)]

    ended = deltas.index(0.0) + 1 if 0.0 in deltas else len(deltas)
    found = tradeoff.of_curve(delta)
    assert found.points == tuple(zip(tradeoff.GRID, deltas))[:ended]
    assert len(read) == len(set(read)) <= (8 if shape == "flat" else 33)


def test_sentence_names_unit_adjacency_and_accountant():
    sentence = Guarantee(
        _Gauss(), "exact", Adjacency.ADD_OR_REMOVE_ONE, caveats=("x holds",)
    ).sentence(1e-5)
    for part in (
        "(4.378, 1e-05)",
        "one example",
        "add-or-remove-one",
        "exact accountant",
        "Provided that: x holds",
    ):
        assert part in sentence


def test_randomness_is_a_function_of_its_address():
    one = Randomness.for_tests(1)
    assert one.generator("noise", 3).random() == one.generator("noise", 3).random()
    keys = {
        one.key(s, t, size)[:8]
        for s in ("noise", "sampling", "nois")
        for t in range(50)
        for size in (8, 16, 32)
    }
    assert len(keys) == 450
    assert Randomness.for_tests(2).key("noise", 3) != one.key("noise", 3)
    assert Randomness.from_os().secret != Randomness.from_os().secret
    assert one.secret.hex() not in repr(one)
    assert one.fixed
    assert not Randomness.from_os().fixed


@pytest.mark.parametrize(
    "value",
    [
        "", "plain", 'a "quoted" word', "back\\slash", "new\nline, tab\t, "
                                                       "return\r", "\x00\x01\x1f\x7f\x85", "é ∑ \U0001f600",
        "\u2028\u202e",
        True, False, 0, -1, 10**15, 0.1, 1e-05, 1e300, -0.0, math.inf, (), (1, 2), (2.0, 1.5), ("a", 'b"\n'), ((1,), (2, 3)),  # noqa: E501
    ],
)  # fmt: skip
def test_a_setting_written_as_toml_is_read_as_the_same(value):
    import tomllib

    from dpfy.core import settings

    def listed(found):
        return [listed(part) for part in found] if isinstance(found, tuple) else found

    written = settings.toml(value)
    assert "\n" not in written
    read = tomllib.loads(f"x = {written}")["x"]
    assert (read, type(read)) == (listed(value), type(listed(value)))
