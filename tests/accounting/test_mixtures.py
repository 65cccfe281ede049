"""Whatever a ledger holds has a guarantee: mixtures of every language, against splitting delta and
against exact composition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from scipy.special import ndtr

from dpfy import accounting
from dpfy.accounting import bins, gaussian, rdp, tuning
from dpfy.accounting.tight import mixtures
from dpfy.accounting.tight.accountant import Tight
from dpfy.core import events as ev
from dpfy.core.errors import Unsupported
from dpfy.core.ledger import Ledger
from dpfy.core.unit import Adjacency

ADD, REPLACE, ZERO = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE, Adjacency.ZERO_OUT
SGD = ev.Repeated(ev.PoissonSampled(0.01, ev.Gaussian(1.0)), 1000)
GRAM = tuple(tuple(4.0 * max(0.0, 1 - abs(i - j) / 3) for j in range(8)) for i in range(8))
BANDED = ev.BallsInBins(2.0, GRAM)
ORDERS = tuple(float(a) for a in range(2, 65))
SEVEN = {
    "count": ev.Laplace(4.0),
    "choice": ev.BoundedRange(0.3),
    "tuning": ev.RepeatAndSelect(
        ev.Repeated(ev.PoissonSampled(0.005, ev.Gaussian(1.0)), 200), 20.0, 1.0
    ),
    "training": SGD,
    "banded training": BANDED,
    "black box": ev.EpsilonDelta(0.2, 1e-7),
    "data-dependent analysis": ev.RenyiCurve(ORDERS, tuple(0.01 * a for a in ORDERS)),
}


@pytest.fixture
def few_draws(monkeypatch):
    monkeypatch.setattr(bins, "PROFILE_SAMPLES", {"remove": 2**13, "add": 2**11})
    bins.profile.cache_clear()
    yield
    bins.profile.cache_clear()


def test_one_ledger_holds_seven_languages(tmp_path: Path, few_draws) -> None:
    """At most what splitting delta evenly gives by each one's best accountant; at least each one's
    own lower bound.
    """
    delta = 1e-5
    ledger = Ledger.open(tmp_path / "people.jsonl")
    for name, event in SEVEN.items():
        ledger.reserve(name, event)
    whole = Ledger.read(ledger.path).guarantee(Tight())
    upper, lower = whole.epsilon(delta), whole.epsilon_lower(delta)
    curves = {name: accounting.curve(event) for name, event in SEVEN.items()}
    split = sum(curve.epsilon(delta / len(SEVEN)) for curve in curves.values())
    assert upper <= 0.75 * split
    assert lower is not None
    for curve in curves.values():
        assert (curve.epsilon_lower(delta) or 0.0) <= lower * (1 + 1e-3) <= upper
        assert curve.epsilon(delta) <= upper
    assert whole.delta(upper) <= delta * (1 + 1e-3)
    assert accounting.why_not(ledger.event(), delta) is None
    assert "infinite at delta 1e-09" in str(accounting.why_not(ledger.event(), 1e-9))


def _exact(
    gaussians: list[float], laplaces: list[float], responses: list[float], epsilon: float
) -> float:
    """delta by quadrature: the mean, over the losses of Laplace and randomized response, of the
    Gaussian's closed form.
    """
    mu = math.sqrt(sum(s**-2 for s in gaussians)) * 2
    losses, masses = np.zeros(1), np.ones(1)
    nodes, weights = np.polynomial.legendre.leggauss(60)
    for scale in laplaces:
        width = 2 / scale
        inner = np.exp((width * nodes - width) / 2) / 4 * weights * width
        ends, mass = np.array([width, -width]), np.array([0.5, 0.5 * math.exp(-width)])
        more, chances = np.concatenate([width * nodes, ends]), np.concatenate([inner, mass])
        losses, masses = (
            np.add.outer(losses, more).ravel(),
            np.multiply.outer(masses, chances).ravel(),
        )
    for p in responses:
        loss = math.log((1 - p / 2) / (p / 2))
        losses = np.add.outer(losses, np.array([loss, -loss])).ravel()
        masses = np.multiply.outer(masses, np.array([1 - p / 2, p / 2])).ravel()
    left = epsilon - losses
    return float(
        np.sum(masses * (ndtr(mu / 2 - left / mu) - np.exp(left) * ndtr(-mu / 2 - left / mu)))
    )


@pytest.mark.parametrize(
    ("gaussians", "laplaces", "responses"),
    [([4.0], [6.0], [0.5]), ([10.0, 3.0], [1.0, 9.0], [0.8, 0.9]), ([0.4], [2.0], [])],
)
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9])
def test_gaussian_laplace_and_randomized_response_meet_the_exact_composition(
    gaussians, laplaces, responses, delta
) -> None:
    """Under replace-one, to 1e-3 of epsilon; and never below."""
    parts = (
        *map(ev.Gaussian, gaussians),
        *map(ev.Laplace, laplaces),
        *map(ev.RandomizedResponse, responses),
    )
    curve = accounting.curve(ev.Composed(parts), adjacency=REPLACE)
    upper = curve.epsilon(delta)
    assert _exact(gaussians, laplaces, responses, upper) <= delta * (1 + 1e-6)
    assert _exact(gaussians, laplaces, responses, upper * (1 - 1e-3)) > delta
    lower = curve.epsilon_lower(delta)
    assert lower is not None
    assert _exact(gaussians, laplaces, responses, lower) >= delta * (1 - 1e-6)


@pytest.mark.parametrize("rho", [1e-4, 0.05, 2.0])
def test_what_is_known_by_renyi_divergences_never_costs_more_than_by_them_alone(rho: float) -> None:
    """zCDP beside exact releases: below adding up divergences, above the Gaussian that has the same
    zCDP.
    """
    for rest in (ev.Gaussian(1.0), SGD, ev.Laplace(1.0)):
        mixed = accounting.epsilon(ev.Composed((ev.Zcdp(rho), rest)), 1e-6)
        assert mixed <= accounting.epsilon(
            ev.Composed((ev.Zcdp(rho), rest)), 1e-6, accountant="rdp"
        ) * (1 + 1e-4)
        alike = accounting.curve(
            ev.Composed((ev.Gaussian(1 / math.sqrt(2 * rho)), rest))
        ).epsilon_lower(1e-6)
        assert alike is not None
        assert alike <= mixed
    assert accounting.epsilon(ev.Zcdp(rho), 1e-6) <= accounting.epsilon(
        ev.Zcdp(rho), 1e-6, accountant="rdp"
    )
    assert accounting.curve(ev.Zcdp(rho)).epsilon_lower(1e-6) is None


def test_renyi_curves_are_added_before_they_are_converted() -> None:
    """Ten curves cost what their sum costs, not ten conversions."""
    one = ev.RenyiCurve((2.0, 8.0, 32.0), (0.02, 0.08, 0.32))
    ten = ev.RenyiCurve((2.0, 8.0, 32.0), (0.2, 0.8, 3.2))
    assert accounting.epsilon(ev.Repeated(one, 10), 1e-6) == pytest.approx(
        accounting.epsilon(ten, 1e-6), rel=1e-9
    )
    parts = (*(one for _ in range(10)), ev.Gaussian(2.0))
    assert accounting.epsilon(ev.Composed(parts), 1e-6) == pytest.approx(
        accounting.epsilon(ev.Composed((ten, ev.Gaussian(2.0))), 1e-6), rel=1e-6
    )


def test_tuning_by_a_poisson_number_of_runs_uses_the_tight_curve_of_one_run() -> None:
    run = ev.Gaussian(8.0)
    whole = ev.RepeatAndSelect(run, 100.0, math.inf)
    found = accounting.epsilon(whole, 1e-6)
    best = tuning.random_trials(run, 100.0, math.inf, 1e-6, tight=True)
    assert best * (1 - 1e-9) <= found <= best * 1.02
    assert found < 0.8 * accounting.epsilon(whole, 1e-6, accountant="rdp")


def test_tuning_of_what_may_fail_pays_for_every_run() -> None:
    """A run with a chance of infinite loss: the chance grows with the mean number of runs, the rest
    is as without it.
    """
    plain, failing = ev.EpsilonDelta(0.1), ev.EpsilonDelta(0.1, 1e-9)
    for shape in (1.0, math.inf):
        exact = accounting.epsilon(ev.RepeatAndSelect(plain, 10.0, shape), 1e-5, accountant="rdp")
        found = accounting.epsilon(ev.RepeatAndSelect(failing, 10.0, shape), 1e-5, accountant="rdp")
        assert exact < found < exact * 1.01
        assert math.isinf(
            accounting.epsilon(ev.RepeatAndSelect(failing, 10.0, shape), 0.99e-8, accountant="rdp")
        )
        assert math.isinf(accounting.epsilon(ev.RepeatAndSelect(failing, 10.0, shape), 0.99e-8))


def _selected_of(
    outcomes: list[tuple[float, float]], generating: Callable[[float], float], epsilon: float
) -> float:
    """delta of the best of a random number of runs with finitely many outcomes (P, Q), worst first:
    by hand.

    `generating` is the generating function of the number of runs; that there is none is an outcome
    of equal chance in both worlds.
    """
    deltas = []
    for side, other in ((0, 1), (1, 0)):
        total, below = 0.0, [0.0, 0.0]
        for row in outcomes:
            upto = [below[k] + row[k] for k in (0, 1)]
            chance = [generating(upto[k]) - generating(below[k]) for k in (0, 1)]
            total += max(0.0, chance[side] - math.exp(epsilon) * chance[other])
            below = upto
        deltas.append(total)
    return max(deltas)


def _geometric(x: float, gamma: float) -> float:
    """The generating function of the number of runs."""
    return gamma * x / (1 - (1 - gamma) * x)


def _poisson(x: float, mean: float) -> float:
    return math.exp(mean * (x - 1))


@pytest.mark.parametrize("fail", [1e-4, 1e-2])
def test_tuning_of_what_may_fail_is_above_a_tuning_computed_by_hand(fail: float) -> None:
    """Randomized response that tells all with a small chance, every order of its outcomes, the best
    of a geometric number.
    """
    high, low = (1 - fail) / (1 + math.exp(-0.5)), (1 - fail) / (1 + math.exp(0.5))
    rows = [(fail, 0.0), (high, low), (low, high), (0.0, fail)]
    bound = accounting.curve(ev.RepeatAndSelect(ev.EpsilonDelta(0.5, fail), 5.0, 1.0))
    for epsilon in (0.2, 0.8, 1.2):
        truth = max(
            _selected_of(list(order), lambda x: _geometric(x, 0.2), epsilon)
            for order in permutations(rows)
        )
        assert bound.delta(epsilon) >= truth


@pytest.mark.parametrize("mean", [0.1, 0.9, 1.5, 30.0])
@pytest.mark.parametrize("gap", [0.3, 3.0])
def test_a_poisson_number_of_runs_may_be_none_and_is_never_free(mean: float, gap: float) -> None:
    """Below a mean of one the formula that forgets the empty outcome is negative. Against every
    order of the outcomes, by hand.
    """
    high, low = 1 / (1 + math.exp(-gap)), 1 / (1 + math.exp(gap))
    event = ev.RepeatAndSelect(ev.EpsilonDelta(gap), mean, math.inf)
    rows = [(high, low), (low, high)]
    beside = accounting.curve(ev.Composed((event, ev.Laplace(1e9))))
    orders = np.array([1.1, 1.5, 2.0, 4.0, 16.0])
    known = rdp.divergences(event, ADD, tuple(orders))
    for first, second in permutations(rows):
        worlds = [
            (
                math.exp(-mean),
                _poisson(first[k], mean) - math.exp(-mean),
                1 - _poisson(first[k], mean),
            )
            for k in (0, 1)
        ]
        exact = [
            math.log(sum(p**a * q ** (1 - a) for p, q in zip(*worlds, strict=True))) / (a - 1)
            for a in orders
        ]
        assert (known >= np.array(exact) * (1 - 1e-9)).all()
        for epsilon in (0.0, 0.2, gap / 2):
            truth = _selected_of([first, second], lambda x: _poisson(x, mean), epsilon)
            assert accounting.curve(event).delta(epsilon) >= truth
            assert beside.delta(epsilon) >= truth * (1 - 1e-6)
    for tight in (False, True):
        bound_at = tuning.random_trials(ev.EpsilonDelta(gap), mean, math.inf, 1e-4, tight=tight)
        truth = max(
            _selected_of(list(order), lambda x: _poisson(x, mean), bound_at)
            for order in permutations(rows)
        )
        assert truth <= 1e-4


def test_sampling_what_is_known_by_renyi_divergences() -> None:
    """A zCDP release on a Poisson sample: above the Gaussian of the same zCDP, below not sampling
    it, zero beyond the rate.
    """
    noise = 1.0
    stated, true = ev.Zcdp(1 / (2 * noise**2)), ev.Gaussian(noise)
    for rate, count in ((0.01, 300), (0.3, 5)):
        mixed = accounting.curve(ev.Repeated(ev.PoissonSampled(rate, stated), count))
        exact = accounting.curve(ev.Repeated(ev.PoissonSampled(rate, true), count)).epsilon_lower(
            1e-6
        )
        assert exact is not None
        assert exact <= mixed.epsilon(1e-6) <= accounting.epsilon(ev.Repeated(stated, count), 1e-6)
    assert accounting.epsilon(ev.PoissonSampled(1e-3, stated), 2e-3) == 0.0
    several = ev.Composed((ev.Gaussian(2.0), ev.Laplace(2.0)))
    assert accounting.epsilon(ev.PoissonSampled(0.1, several), 1e-6) < accounting.epsilon(
        several, 1e-6
    )
    with pytest.raises(Unsupported):
        accounting.curve(ev.PoissonSampled(0.1, stated), adjacency=REPLACE)


def test_thinning_a_pair_is_right_in_both_directions() -> None:
    """Against the closed form of a subsampled Laplace release, whose profile is exact."""
    from dpfy.accounting import profiles
    from dpfy.accounting.tight.accountant import TightCurve
    from dpfy.accounting.tight.dominating_pairs import Composition, DominatingPair
    from dpfy.accounting.tight.other_losses import LaplacePair

    side = profiles.points(lambda e: np.maximum(0.0, -np.expm1((e - 1.5) / 2)))
    base = profiles.dominating(side, side)
    for mine, exact in (
        (mixtures.thinned_removed(base, 0.2), LaplacePair(1.5, 0.2)),
        (mixtures.thinned_added(base, 0.2), LaplacePair(1.5, 0.2, added=True)),
    ):
        bounds = [
            TightCurve(Composition(0.0, ((DominatingPair(loss, loss), 6),)))
            for loss in (mine, exact)
        ]
        for delta in (1e-2, 1e-5):
            lower = bounds[1].epsilon_lower(delta)
            assert lower is not None
            assert lower <= bounds[0].epsilon(delta) <= bounds[1].epsilon(delta) * (1 + 2e-3)


def test_many_choices_by_the_exponential_mechanism_are_cheaper_by_their_divergences() -> None:
    one = accounting.epsilon(ev.BoundedRange(0.1), 1e-6)
    assert one < 0.1
    many = accounting.epsilon(ev.Repeated(ev.BoundedRange(0.1), 400), 1e-6)
    assert many <= accounting.epsilon(ev.Zcdp(400 * 0.1**2 / 8), 1e-6) * (1 + 1e-6)
    assert many < 0.75 * accounting.epsilon(ev.Repeated(ev.EpsilonDelta(0.1), 400), 1e-6)


def test_choices_of_a_wide_range_take_the_cheaper_language() -> None:
    for event in (ev.Repeated(ev.BoundedRange(6.0), 40), ev.Repeated(ev.BoundedRange(3.0), 5)):
        assert accounting.epsilon(event, 1e-6) <= accounting.epsilon(
            event, 1e-6, accountant="rdp"
        ) * (1 + 1e-4)


def test_balls_in_bins_with_a_tiny_delta_fall_back_on_what_is_certain(few_draws) -> None:
    """Below the chance that draws mislead the bound rests on divergences and on the longest
    response alone.
    """
    both = ev.Composed((BANDED, ev.Gaussian(4.0)))
    longest = gaussian.epsilon(math.hypot(math.sqrt(GRAM[0][0]) / 2.0, 1 / 4), 1e-12)
    assert accounting.epsilon(both, 1e-5) < accounting.epsilon(both, 1e-12) <= longest * (1 + 1e-4)
    with pytest.raises(Unsupported, match="replace-one"):
        accounting.curve(both, adjacency=REPLACE)


def test_balls_in_bins_keep_their_worse_direction_in_a_mixture(few_draws) -> None:
    """Beside a release that costs next to nothing they cost what they cost alone: removing is worse
    than adding here.
    """
    beside = accounting.epsilon(ev.Composed((BANDED, ev.Gaussian(1e4))), 1e-5)
    alone = accounting.epsilon(BANDED, 1e-5)
    assert alone * 0.99 < beside < alone * 1.05
    curve = accounting.curve(BANDED, accountant="monte-carlo").estimates(
        alone, seed=9, failure=1e-3
    )  # type: ignore[attr-defined]
    assert curve["add"].bound < 0.5 * curve["remove"].mean


@pytest.mark.parametrize("overlap", [0.0, 0.3])
def test_balls_in_bins_with_hardly_any_noise_are_billed_by_the_longest_response(
    overlap: float, recwarn
) -> None:
    """Likelihood ratios beyond the range of numbers: bins are worth at most the log of their
    number.
    """
    loud = ev.BallsInBins(0.02, ((1.0, overlap), (overlap, 1.0)))
    whole = gaussian.epsilon(50.0, 1e-5)
    for event in (loud, ev.Composed((loud, ev.Gaussian(1e4)))):
        assert whole - 1 < accounting.epsilon(event, 1e-5) < whole * 1.001
    assert accounting.curve(loud).delta(whole) <= 1.01e-5
    assert not recwarn.list


def test_why_not_answers_before_anything_is_released() -> None:
    assert accounting.why_not(ev.Composed((SGD, ev.Zcdp(0.1))), 1e-6) is None
    assert "replace-one" in str(accounting.why_not(BANDED, 1e-6, adjacency=REPLACE))
    assert "absent" in str(accounting.why_not(ev.RandomizedResponse(0.5), 1e-6))
    assert "delta" in str(accounting.why_not(SGD, 1e-250))
    assert (
        accounting.why_not(ev.NotPrivate(), 1e-6) is None
    )  # that it has no protection is what its card says
    assert accounting.why_not(ev.Laplace(1.0), 0.0, accountant="basic") is None
    assert accounting.why_not(ev.Zcdp(1.0), 1e-6, accountant="gdp") is not None


def test_routes_that_are_not_followed_would_not_have_been_better() -> None:
    """Choices of wide ranges beside other releases, at random: what is found is the least of all
    routes, or so close that none can tell.
    """
    draw, left_out = np.random.default_rng(8), 0
    for _ in range(25):
        ranges = draw.uniform(0.3, 4.0, int(draw.integers(1, 5)))
        choices = [
            ev.Repeated(ev.BoundedRange(float(r)), int(draw.integers(1, 12)))
            for r in (*ranges, 1.5)
        ]
        others = [
            ev.Gaussian(float(draw.uniform(0.4, 5.0))),
            ev.Laplace(float(draw.uniform(0.5, 5.0))),
        ][: int(draw.integers(0, 3))]
        curve = Tight().curve(ev.Composed((*choices, *others)), ADD)
        assert isinstance(curve, mixtures.MixtureCurve)
        assert len(curve._routes) == 2
        for delta in (1e-9, 1e-5, 1e-2):
            every = [route.epsilon(delta) for route in curve._routes]
            assert min(every) <= curve.epsilon(delta) <= min(every) * (1 + 1e-3)
            followed = [
                value for _, value in curve._coarse(lambda route, at=delta: route.quick(at))
            ]
            left_out += max(followed) > mixtures.WORSE * min(followed)
            epsilon = 0.8 * min(every)
            every = [route.delta(epsilon) for route in curve._routes]
            assert min(every) <= curve.delta(epsilon) <= min(every) * (1 + 5e-3)
    assert left_out >= 10


def test_coarse_bounds_lie_above_close_ones() -> None:
    draw = np.random.default_rng(9)
    for _ in range(20):
        event = ev.Composed(
            (
                ev.Repeated(ev.BoundedRange(float(draw.uniform(0.1, 0.9))), 3),
                ev.Gaussian(float(draw.uniform(0.5, 4.0))),
            )
        )
        curve = Tight().curve(event, ADD)
        for epsilon in draw.uniform(0.0, 6.0, 4):
            assert (
                math.log(max(curve.delta(float(epsilon)), 1e-300))
                <= curve.quick_log_delta(float(epsilon)) + 2e-6
            )
        assert curve.quick_log_delta(1e6) <= math.log(1e-200)
