"""Contracts over every leaf and accountant: repetition is composition, tight is tightest, more
exposure never costs less.
"""

from __future__ import annotations

import math

import pytest

from dpfy import accounting
from dpfy.core import events as ev
from dpfy.core.errors import DpfyError, InvalidInput, Unsupported
from dpfy.core.unit import Adjacency

ADD, REPLACE, ZERO = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE, Adjacency.ZERO_OUT
DELTA = 1e-6

LEAVES: list[tuple[ev.Event, Adjacency]] = [
    (ev.Gaussian(4.0), ADD),
    (ev.Gaussian(4.0), REPLACE),
    (ev.PoissonSampled(0.05, ev.Gaussian(2.0)), ADD),
    (ev.PoissonSampled(0.05, ev.Gaussian(2.0)), ZERO),
    (ev.PoissonSampled(0.05, ev.Gaussian(2.0)), REPLACE),
    (ev.Laplace(8.0), ADD),
    (ev.PoissonSampled(0.2, ev.Laplace(4.0)), ADD),
    (ev.DiscreteLaplace(0.2, 1), ADD),
    (ev.DiscreteGaussian(6.0, 1), ADD),
    (ev.PoissonSampled(0.2, ev.DiscreteLaplace(0.5, 1)), ADD),
    (ev.RandomizedResponse(0.8, 3), REPLACE),
    (ev.RandomizedResponse(0.8, 3), ZERO),
    (ev.MixtureOfGaussians(4.0, (0.0, 1.0, 2.0), (0.7, 0.2, 0.1)), ADD),
    (ev.EpsilonDelta(0.1, 0.0), ADD),
    (ev.EpsilonDelta(0.1, 1e-9), ADD),
    (ev.SampledWithoutReplacement(200, 10, ev.Gaussian(3.0)), REPLACE),
    (ev.SampledWithReplacement(200, 10, ev.Gaussian(3.0)), REPLACE),
    (ev.TruncatedPoissonGaussian(200, 0.05, 20, 2.0), ADD),
]
IDS = [
    f"{type(e).__name__}-{getattr(getattr(e, 'event', None), '__class__', type(None)).__name__}-{a.value}"
    for e, a in LEAVES
]
SOUND = ("rdp", "pld", "zcdp", "gdp", "advanced", "basic")


def _epsilon(event: ev.Event, adjacency: Adjacency, accountant: str = "tight") -> float:
    return accounting.epsilon(event, DELTA, adjacency=adjacency, accountant=accountant)


@pytest.mark.parametrize(("leaf", "adjacency"), LEAVES, ids=IDS)
def test_repetition_is_composition(leaf: ev.Event, adjacency: Adjacency) -> None:
    for name in ("tight", "rdp"):
        if accounting.accountant(name).why_not(leaf, adjacency) is None:
            repeated = _epsilon(ev.Repeated(leaf, 6), adjacency, name)
            composed = _epsilon(
                ev.Composed((leaf, ev.Repeated(leaf, 3), ev.Composed((leaf, leaf)))),
                adjacency,
                name,
            )
            assert repeated == pytest.approx(composed, rel=1e-12)


@pytest.mark.parametrize(("leaf", "adjacency"), LEAVES, ids=IDS)
def test_tight_is_never_above_another_sound_bound_nor_below_its_lower_one(
    leaf: ev.Event, adjacency: Adjacency
) -> None:
    event = ev.Repeated(leaf, 12)
    curve = accounting.curve(event, adjacency=adjacency, accountant="tight")
    upper, lower = curve.epsilon(DELTA), curve.epsilon_lower(DELTA)
    assert math.isfinite(upper)
    assert lower is None or lower <= upper
    for name in SOUND:
        if accounting.accountant(name).why_not(event, adjacency) is None:
            other = _epsilon(event, adjacency, name)
            # The reference PLD is itself exact up to its grid; the others are strictly looser.
            assert upper <= other * (1 + (2e-4 if name == "pld" else 1e-9)) + 1e-6, name
            assert lower is None or lower <= other * (1 + 1e-9), name


@pytest.mark.parametrize(("leaf", "adjacency"), LEAVES, ids=IDS)
def test_more_steps_never_cost_less(leaf: ev.Event, adjacency: Adjacency) -> None:
    values = [_epsilon(ev.Repeated(leaf, count), adjacency) for count in (1, 2, 5, 13)]
    assert values == sorted(values)


@pytest.mark.parametrize("name", ["tight", "rdp"])
def test_more_rate_and_less_noise_never_cost_less(name: str) -> None:
    def train(rate: float, noise: float) -> float:
        return _epsilon(ev.Repeated(ev.PoissonSampled(rate, ev.Gaussian(noise)), 300), ADD, name)

    by_rate = [train(rate, 1.5) for rate in (1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0)]
    by_noise = [train(0.01, noise) for noise in (30.0, 10.0, 3.0, 1.0, 0.5)]
    assert by_rate == sorted(by_rate)
    assert by_noise == sorted(by_noise)


@pytest.mark.parametrize("name", ["tight", *SOUND])
def test_unsupported_pairs_name_event_and_way_out(name: str) -> None:
    route = accounting.accountant(name)
    for event, adjacency in (
        (ev.RandomizedResponse(0.5), ADD),
        (ev.SampledWithoutReplacement(10, 2, ev.Gaussian(1.0)), ADD),
    ):
        reason = route.why_not(event, adjacency)
        assert reason is not None
        assert type(event).__name__ in reason
        assert "use" in reason or "analysed under" in reason
        with pytest.raises(Unsupported):
            route.curve(event, adjacency)


def test_degenerate_settings_have_right_answers() -> None:
    train = ev.PoissonSampled(0.01, ev.Gaussian(1.0))
    for nothing in (ev.Nothing(), ev.Repeated(train, 0), ev.PoissonSampled(0.0, ev.Gaussian(1.0))):
        assert _epsilon(nothing, ADD) == 0.0
    assert _epsilon(ev.PoissonSampled(1.0, ev.Gaussian(2.0)), ADD) == _epsilon(
        ev.Gaussian(2.0), ADD
    )
    assert math.isinf(_epsilon(ev.NotPrivate(), ADD))
    assert math.isinf(accounting.epsilon(ev.EpsilonDelta(1.0, 1e-3), 1e-6))
    assert accounting.epsilon(ev.EpsilonDelta(1.0, 0.0), 1e-9) <= 1.0
    for delta in (0.0, 1.0, -1e-5, math.nan):
        with pytest.raises(InvalidInput, match="delta"):
            accounting.epsilon(train, delta)
    with pytest.raises(DpfyError, match="noise_multiplier"):
        ev.Gaussian(0.0)
    assert 0 < accounting.epsilon(ev.Repeated(train, 10), 1e-100) < 100


def test_adjacencies_order_as_they_should() -> None:
    event = ev.Repeated(ev.PoissonSampled(0.05, ev.Gaussian(2.0)), 100)
    assert _epsilon(event, ADD) == _epsilon(event, ZERO) < _epsilon(event, REPLACE)
    assert _epsilon(ev.Gaussian(4.0), REPLACE) == _epsilon(ev.Gaussian(2.0), ADD)


def test_fixed_size_sampling_against_its_neighbours() -> None:
    """Without replacement is amplified, and drawing with replacement, where a unit may come twice,
    costs more.
    """
    base = _epsilon(ev.Repeated(ev.Gaussian(3.0), 50), REPLACE)
    without = _epsilon(
        ev.Repeated(ev.SampledWithoutReplacement(500, 10, ev.Gaussian(3.0)), 50), REPLACE
    )
    with_replacement = _epsilon(
        ev.Repeated(ev.SampledWithReplacement(500, 10, ev.Gaussian(3.0)), 50), REPLACE
    )
    assert without < with_replacement < base
    # One step, by hand: amplification of the exact Gaussian (Balle, Barthe & Gaboardi 2018).
    from dpfy.accounting import gaussian

    once = accounting.epsilon(
        ev.SampledWithoutReplacement(500, 10, ev.Gaussian(3.0)), DELTA, adjacency=REPLACE
    )
    by_hand = math.log1p(0.02 * math.expm1(gaussian.epsilon(2 / 3.0, DELTA / 0.02)))
    assert once == pytest.approx(by_hand, rel=2e-3)
    assert once >= by_hand * (1 - 1e-6)


def test_truncation_far_above_the_batch_costs_nothing_and_tight_truncation_costs() -> None:
    plain = _epsilon(ev.Repeated(ev.PoissonSampled(0.05, ev.Gaussian(2.0)), 20), ADD)
    roomy = _epsilon(ev.Repeated(ev.TruncatedPoissonGaussian(1000, 0.05, 1000, 2.0), 20), ADD)
    narrow = _epsilon(ev.Repeated(ev.TruncatedPoissonGaussian(1000, 0.05, 50, 2.0), 20), ADD)
    assert roomy == pytest.approx(plain, rel=1e-4)
    assert narrow > plain


def test_kairouz_is_the_tight_composition_of_black_boxes() -> None:
    from dpfy.accounting.composition import advanced, basic, kairouz

    event = ev.Repeated(ev.EpsilonDelta(0.1, 1e-8), 50)
    curve = accounting.curve(event, accountant="tight")
    attained = kairouz(0.1, 1e-8, 50, 1e-5)
    assert curve.epsilon(1e-5) <= attained * (1 + 1e-6)
    assert curve.delta(attained) <= 1e-5 * (1 + 1e-4)
    lower = curve.epsilon_lower(1e-5)
    assert lower is not None
    assert attained - 0.2 <= lower <= attained
    assert attained <= advanced(0.1, 1e-8, 50, 1e-5 - 50e-8)[0]
    assert basic(0.1, 1e-8, 50) == (5.0, 50e-8)
