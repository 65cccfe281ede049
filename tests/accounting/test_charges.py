"""What the engine cuts, rounds and leaves out is charged: the bounds hold whatever its knobs are
set to, and broken laws are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from scipy.integrate import simpson

from dpfy import accounting
from dpfy.accounting.moments import QUADRATURE
from dpfy.accounting.tight import accountant, convolution, lattice, losses
from dpfy.accounting.tight.dominating_pairs import composition
from dpfy.accounting.tight.gaussian_losses import GaussianPair, Side
from dpfy.accounting.tight.lattice import compose_layers
from dpfy.accounting.tight.losses import Atoms, verified
from dpfy.accounting.tight.other_losses import LaplacePair, LossMixture
from dpfy.core import events as ev
from dpfy.core.errors import DpfyError, Internal, InvalidInput
from dpfy.core.unit import Adjacency, CyclicPoisson

ADD, REPLACE, ZERO = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE, Adjacency.ZERO_OUT
CASES = [(0.01, 1.0, 1000, 1e-6), (0.2, 2.0, 30, 1e-9), (0.001, 0.6, 5000, 1e-5)]


def _train(rate: float, noise: float, steps: int) -> ev.Event:
    return ev.Repeated(ev.PoissonSampled(rate, ev.Gaussian(noise)), steps)


@pytest.mark.parametrize(("rate", "noise", "steps", "delta"), CASES)
def test_a_capped_tail_is_charged_to_delta(
    rate: float, noise: float, steps: int, delta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much of delta is given to outliers: what is cut away is paid for, so the bound only
    grows.
    """
    event = _train(rate, noise, steps)
    lower, upper = (
        accounting.curve(event).epsilon_lower(delta),
        accounting.curve(event).epsilon(delta),
    )
    monkeypatch.setattr(accountant, "CUT", 0.5)
    capped = accounting.curve(event)
    assert lower is not None
    assert lower <= capped.epsilon(delta)
    assert capped.epsilon(delta) >= upper * (1 - 1e-9)
    reached = accounting.curve(event, accountant="tight").delta(upper)
    assert reached >= delta * (1 - 2e-3)


@pytest.mark.parametrize(("rate", "noise", "steps", "delta"), CASES)
def test_the_error_of_the_lattice_is_charged(
    rate: float, noise: float, steps: int, delta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coarse cut of tilted tails moves both bounds outwards, never inwards."""
    event = _train(rate, noise, steps)
    lower, upper = (
        accounting.curve(event).epsilon_lower(delta),
        accounting.curve(event).epsilon(delta),
    )
    assert lower is not None
    monkeypatch.setattr(convolution, "TAIL", 3e-2)
    coarse = accounting.curve(event)
    assert coarse.epsilon(delta) >= upper
    found = coarse.epsilon_lower(delta)
    assert found is not None
    assert found <= lower


def test_a_composition_counts_what_was_missing_and_what_it_cut() -> None:
    weights = np.random.default_rng(3).dirichlet(np.ones(60))
    part = lattice.LossLattice(0.0, 0.1, -30, weights, 0.5, 0.0, 1e-3)
    composed = lattice.compose([(part, 5)], 2e-2)
    assert composed.weights.sum() < 1 - 1e-3  # ends were cut
    assert (
        composed.weights.sum() + composed.error >= 1 + 5e-3
    )  # and are charged, with what each part lacked
    layers = compose_layers([((part,), 5)], lattice.coarsen_up, 2e-2, 1.0)
    assert layers[0].weights.sum() + layers[0].error >= 1 + 5e-3


def test_a_reading_adds_the_error_to_an_upper_bound_and_takes_it_off_a_lower_one() -> None:
    weights = np.array([0.25, 0.5, 0.25])
    plain, doubtful = (
        lattice.LossLattice(0.0, 1.0, 0, weights, 0.0, 0.0, error) for error in (0.0, 0.01)
    )
    seen = float(np.sum(weights[1:] * -np.expm1(0.5 - np.array([1.0, 2.0]))))
    assert convolution.Reading(plain, 0.0, 1).delta(0.5) == pytest.approx(seen, rel=1e-12)
    assert convolution.Reading(doubtful, 0.0, 1).delta(0.5) == pytest.approx(seen + 0.01, rel=1e-9)
    assert convolution.Reading(doubtful, 0.0, -1).delta(0.5) == pytest.approx(seen - 0.01, rel=1e-9)
    assert convolution.Reading(plain, 0.003, 1).delta(0.5) == pytest.approx(seen + 0.003, rel=1e-9)


@pytest.mark.parametrize("spacing", [0.1, 20.0, 30.0, 400.0, 1e8])
def test_discounted_masses_are_those_of_the_definition_at_every_spacing(spacing: float) -> None:
    weights = np.random.default_rng(4).dirichlet(np.ones(50))
    reading = convolution.Reading(
        lattice.LossLattice(0.0, spacing, 0, weights, 0.0, 0.0, 0.0), 0.0, 1
    )
    x = reading.positions
    due = [float(np.sum(reading.mass[k:] * np.exp(x[k] - x[k:]))) for k in range(len(x))]
    assert reading._discounted() == pytest.approx(due, rel=1e-12)


def test_the_added_direction_decides_where_it_is_worse() -> None:
    """Two answers, half of them random: removed costs log 1.5, added log 2 (the other value is half
    as likely).
    """
    event = ev.RandomizedResponse(0.5, 2)
    removed, added = math.log(0.75 / 0.5), math.log(0.5 / 0.25)
    assert added > removed
    for name in ("tight", "rdp", "basic", "advanced"):
        assert accounting.epsilon(event, 1e-9, adjacency=ZERO, accountant=name) >= added * (
            1 - 1e-8
        )
    # The same for Gaussians on Poisson samples, at a large rate and delta, by direct integration.
    from scipy.special import ndtr

    rate, noise, delta = 0.9, 1.0, 0.2
    epsilon = accounting.epsilon(ev.PoissonSampled(rate, ev.Gaussian(noise)), delta)
    x = noise**2 * math.log((math.expm1(-epsilon) + rate) / rate) + 0.5
    zero, one = float(ndtr(x / noise)), float(ndtr((x - 1) / noise))
    assert zero - math.exp(epsilon) * ((1 - rate) * zero + rate * one) <= delta * (1 + 1e-6)


@pytest.mark.parametrize(
    "broken",
    [
        Atoms((1.0, -1.0), (0.7, 0.2)),
        Atoms((1.0, -1.0), (0.2, 0.8)),
        LossMixture(((0.9, Atoms((0.0,), (1.0,))),)),
        LossMixture(((1.0, Side(GaussianPair(1.0, ((0.9, 0.0), (0.1, 1.0)), ((1.0, 0.0),)), 1)),)),
    ],
)
def test_a_loss_that_breaks_a_law_is_an_internal_error(broken: losses.PrivacyLoss) -> None:
    with pytest.raises(Internal, match="please report"):
        verified(broken)


def test_true_losses_obey_the_laws() -> None:
    for event, adjacency in (
        (ev.PoissonSampled(0.01, ev.Gaussian(0.3)), ADD),
        (ev.PoissonSampled(1e-9, ev.Gaussian(40.0)), REPLACE),
        (ev.SampledWithoutReplacement(1000, 999, ev.Gaussian(0.2)), REPLACE),
        (ev.SampledWithReplacement(10, 30, ev.Gaussian(5.0)), REPLACE),
        (ev.Laplace(0.01), ADD),
        (ev.PoissonSampled(0.3, ev.DiscreteGaussian(0.4, 2)), ADD),
        (ev.PoissonSampled(0.3, ev.DiscreteGaussian(0.05, 3)), ADD),
        (ev.MixtureOfGaussians(0.5, tuple(map(float, range(40))), tuple([1 / 40] * 40)), ADD),
    ):
        for release, _ in composition(event, adjacency).releases:
            for loss in (
                release.removed,
                release.added,
                release.removed.capped(1e-9),
                *(release.attained or ()),
            ):
                assert verified(loss) is loss
                assert loss.log_mgf(0.0).log == pytest.approx(0.0, abs=1e-8)


def test_an_upper_bound_below_the_lower_one_is_never_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    curve = accounting.curve(_train(0.01, 1.0, 1000))
    monkeypatch.setattr(type(curve), "_worst", lambda self, delta: 0.5)
    with pytest.raises(Internal, match="upper bound"):
        curve.epsilon_lower(1e-6)


def test_moments_are_right_whatever_the_edges() -> None:
    """A capped pair ends at full height: its moments must be those of direct integration."""
    pair = GaussianPair(1.0, ((0.99, 0.0), (0.01, 1.0)), ((1.0, 0.0),)).capped(1e-4)
    x = np.linspace(-12, pair.ceiling, 400_001)
    ratio = 0.99 + 0.01 * np.exp(x - 0.5)
    for s in (0.0, 0.5, 3.0, 20.0, 200.0):
        values = np.exp((s + 1) * np.log(ratio) - x**2 / 2) / math.sqrt(2 * math.pi)
        assert pair.log_mgf(s).log == pytest.approx(
            math.log(float(simpson(values, x=x))), abs=1e-10
        )
    laplace = LaplacePair(30.0)
    assert laplace.log_mgf(50.0).log == pytest.approx(math.log(51 / 101) + 1500.0, rel=1e-12)


def test_moments_of_a_gaussian_loss_are_those_of_direct_integration() -> None:
    """In closed form, whole or capped, wherever the tilt puts the middle: about the ceiling, far
    below it and far above.
    """
    draw = np.random.default_rng(5)
    for _ in range(300):
        sigma, s = float(10 ** draw.uniform(-0.7, 1.5)), float(10 ** draw.uniform(-2, 1.5))
        pair = GaussianPair(sigma, ((1.0, 1.0),), ((1.0, 0.0),))
        pair = pair if draw.random() < 0.3 else pair.capped(float(10 ** draw.uniform(-40, -1)))
        middle = 1 + s  # of x, where nothing is cut
        high = min(pair.ceiling, middle + 14 * sigma)
        low = min(middle, high) - (
            14 * sigma if high > middle - 8 * sigma else 60 * sigma**2 / (middle - high)
        )
        x = np.linspace(low, high, 40_001)
        losses = (x - 0.5) / sigma**2
        logs = s * losses - (x - 1) ** 2 / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))
        top = float(logs.max())
        e = np.exp(logs - top)
        total = float(simpson(e, x=x))
        mean = float(simpson(e * losses, x=x)) / total
        variance = float(simpson(e * (losses - mean) ** 2, x=x)) / total
        found = pair.log_mgf(s)
        assert found.log == pytest.approx(top + math.log(total), rel=1e-9, abs=1e-9)
        assert found.mean == pytest.approx(mean, rel=1e-6, abs=1e-6 * math.sqrt(variance))
        assert found.variance == pytest.approx(variance, rel=1e-5)
        assert 0 < found.error < 1e-9 * (1 + abs(found.log))


def test_a_gaussian_loss_obeys_the_laws_with_hardly_any_noise_and_with_much() -> None:
    """What is allowed for rounding covers the nodes too, not only the closed moment."""
    for sigma in np.geomspace(1e-3, 1e4, 60):
        pair = GaussianPair(float(sigma), ((1.0, 1.0),), ((1.0, 0.0),))
        assert verified(pair) is pair
        assert verified(pair.capped(1e-9)).cut == 1e-9


def test_a_sum_bounds_its_moments_as_its_parts_do() -> None:
    draw = np.random.default_rng(6)
    for _ in range(50):
        masses = draw.dirichlet(np.ones(40))
        parts = (
            (Atoms(tuple(draw.normal(0, 1, 40).tolist()), tuple(masses.tolist())), 3),
            (LaplacePair(2.0), 2),
        )
        total, s = convolution.LossSum(parts), float(10 ** draw.uniform(-2, 2))
        assert total.upper(s) == total.log_mgf(s).upper == total.upper(s)


def test_atoms_are_capped_and_aligned_by_definition() -> None:
    """The largest losses go first, as long as all that is gone stays within the mass; at least one
    stays. What was cut before counts.
    """
    draw = np.random.default_rng(7)
    for _ in range(300):
        count, even = int(draw.integers(1, 30)), draw.random() < 0.5
        values = draw.integers(-5, 5, count) * 0.25 if even else draw.normal(0, 1, count)
        masses = draw.dirichlet(np.full(count, 0.3))
        atoms, mass = (
            Atoms(tuple(values.tolist()), tuple(masses.tolist()), 0.0, 1e-5),
            float(10 ** draw.uniform(-6, 0.1)),
        )
        rows, gone = sorted(zip(values, masses, strict=True), reverse=True), 0.0
        while len(rows) > 1 and gone + rows[0][1] <= mass:
            gone += rows.pop(0)[1]
        capped = atoms.capped(mass)
        assert capped.top == max(value for value, _ in rows)
        assert sorted(zip(capped.losses, capped.probabilities, strict=True), reverse=True) == rows
        assert capped.cut == pytest.approx(1e-5 + gone, rel=1e-9)
        assert capped.cut >= 1e-5 + gone if gone else capped is atoms
        spacing = float(10 ** draw.uniform(-3, 1))
        offset, step = atoms.align(spacing, 0.0)
        assert offset == atoms.top == values.max()
        assert 0 < step <= spacing * (1 + 1e-12)
        distinct = np.unique(values)
        gaps = np.diff(distinct)
        if len(gaps) and not (
            even and ((gaps / gaps.min()) % 1).any()
        ):  # else the grid meets the extreme values only
            whole = (distinct[-1] - distinct)[slice(None) if even else [0, -1]] / step
            np.testing.assert_allclose(whole, np.rint(whole), atol=1e-6)
        assert hash(atoms) == hash(Atoms(tuple(values.tolist()), tuple(masses.tolist()), 0.0, 1e-5))


def test_an_incomplete_round_of_a_cycle_is_billed() -> None:
    from dpfy.accounting.patterns import TrainingPattern
    from dpfy.noise.toeplitz import Banded
    from dpfy.plan.pairs import event

    pattern = CyclicPoisson(0.25, 4)
    for steps, rounds in ((1, 1), (4, 1), (5, 2), (7, 2), (8, 2), (9, 3)):
        assert event(2.0, pattern, Banded((1.0, 0.5)), steps) == ev.Repeated(
            ev.PoissonSampled(0.25, ev.Gaussian(2.0)), rounds
        )
    for sampling in ("shuffled", "fixed-order"):
        for rate, steps, passes in (
            (0.25, 4, 1),
            (0.25, 5, 2),
            (0.1, 30, 3),
            (0.1, 31, 4),
            (1e-10, 1, 1),
        ):
            assert TrainingPattern(1.0, rate, steps, sampling).claim().event == ev.Repeated(
                ev.Gaussian(1.0), passes
            )


@pytest.mark.parametrize(
    ("event", "adjacency", "delta"),
    [
        (ev.RandomizedResponse(10 / (math.exp(8) + 9), 10), REPLACE, 1e-9),
        (ev.PoissonSampled(0.6306, ev.Gaussian(0.1408)), ADD, 6.64e-13),
        (_train(0.26, 0.115, 7), ADD, 3.8e-13),
        (ev.Laplace(1.2), REPLACE, 2e-10),
        (ev.MixtureOfGaussians(0.1, (0.0, 1.0, 2.0, 3.0), (0.1, 0.2, 0.2, 0.5)), ADD, 2.5e-10),
        (ev.Repeated(ev.PoissonSampled(0.002, ev.DiscreteGaussian(0.4, 3)), 13904), ADD, 1.7e-8),
    ],
)
def test_sharp_tilts_have_answers(event: ev.Event, adjacency: Adjacency, delta: float) -> None:
    curve = accounting.curve(event, adjacency=adjacency)
    upper, lower = curve.epsilon(delta), curve.epsilon_lower(delta)
    assert lower is not None
    assert 0 < lower <= upper <= lower * (1 + 1e-2)


def test_delta_of_a_rare_unit_is_at_most_the_chance_of_drawing_it() -> None:
    curve = accounting.curve(ev.PoissonSampled(1e-5, ev.Gaussian(1.26)))
    assert curve.delta(0.0) == pytest.approx(
        1e-5 * math.erf(1 / (2 * 1.26 * math.sqrt(2))), rel=1e-4
    )
    assert curve.epsilon(1e-5) == curve.epsilon(0.3) == 0.0
    for epsilon in (1e-6, 1e-3, 1.0, 20.0):
        assert 0 <= curve.delta(epsilon) <= 1e-5


HUGE = 10**100


@pytest.mark.parametrize("name", ["tight", "rdp", "pld", "zcdp", "gdp", "advanced", "basic"])
def test_numbers_beyond_floating_point_are_refused_in_one_line(name: str) -> None:
    makers: list[Callable[[], ev.Event]] = [
        *(partial(ev.Gaussian, noise) for noise in (1e308, 1e-320, 5e-324)),
        *(partial(_train, 0.1, noise, 1) for noise in (1e308, 1e-320)),
        *(partial(ev.Laplace, noise) for noise in (1e308, 1e-320)),
        *(partial(_train, 1.0, 1.0, steps) for steps in (10**16, HUGE)),
        lambda: ev.Repeated(ev.Repeated(ev.Gaussian(1.0), 10**15), 10**15),
        lambda: ev.EpsilonDelta(1e300),
        lambda: ev.DiscreteGaussian(1e300, 10**17),
        lambda: ev.DiscreteLaplace(1e-320, 10**17),
        lambda: ev.SampledWithoutReplacement(HUGE, 5, ev.Gaussian(1.0)),
        lambda: ev.SampledWithReplacement(10**16, 10**16, ev.Gaussian(1.0)),
        lambda: ev.TruncatedPoissonGaussian(10**17, 0.1, 10**16, 1.0),
    ]
    for make in makers:
        for adjacency in (ADD, REPLACE):
            with pytest.raises(DpfyError) as error:
                accounting.epsilon(make(), 1e-5, adjacency=adjacency, accountant=name)
            assert not isinstance(error.value, Internal)
            assert "\n" not in str(error.value)
            assert len(str(error.value)) < 300


def test_rates_and_deltas_at_the_edge_of_floating_point() -> None:
    assert (
        accounting.epsilon(ev.Repeated(ev.PoissonSampled(1e-320, ev.Gaussian(1.0)), 10**15), 1e-100)
        == 0.0
    )
    with pytest.raises(InvalidInput, match="delta"):
        accounting.epsilon(ev.PoissonSampled(0.1, ev.Gaussian(1.0)), 1e-320)
    assert 0 < accounting.epsilon(ev.PoissonSampled(0.1, ev.Gaussian(1.0)), 1e-150) < 1e4
    with pytest.raises(InvalidInput, match="hardly any"):
        accounting.calibrate.noise(lambda s: ev.PoissonSampled(0.0002, ev.Gaussian(s)), 1.36, 0.002)


def test_a_part_left_out_of_a_mixture_is_noted() -> None:
    rare = LossMixture(
        ((1 - 1e-8, Atoms((0.1, -0.1), _two(0.1))), (1e-8, Atoms((5.0, -5.0), _two(5.0))))
    )
    kept = rare.capped(1e-6)
    assert len(kept.parts) == 1
    assert kept.cut >= 1e-8
    assert verified(kept) is kept


def _two(epsilon: float) -> tuple[float, float]:
    """The masses of two answers, one e^epsilon times as likely as the other."""
    return 1 / (1 + math.exp(-epsilon)), 1 / (1 + math.exp(epsilon))


def test_the_error_of_a_moment_counts_as_often_as_the_release() -> None:
    pair = GaussianPair(1.0, ((0.99, 0.0), (0.01, 1.0)), ((1.0, 0.0),))
    once, often = pair.log_mgf(2.0), convolution.LossSum(((pair, 10**9),)).log_mgf(2.0)
    assert once.upper - once.log >= QUADRATURE
    assert often.upper - often.log >= 1e9 * QUADRATURE * 0.999


def test_large_orders_of_a_sampled_discrete_gaussian_are_not_cut_short() -> None:
    """Its masses underflow 37 sigma out; moments that lie beyond are bounded by those of the
    continuous one, never left out.
    """
    from dpfy.accounting.rdp import divergences

    orders = (2.0, 20.0, 100.0, 1000.0)
    discrete = divergences(ev.PoissonSampled(0.3, ev.DiscreteGaussian(2.0)), ADD, orders)
    continuous = divergences(ev.PoissonSampled(0.3, ev.Gaussian(2.0)), ADD, orders)
    assert (discrete >= continuous * 0.98).all()
    assert (discrete <= continuous * 1.2).all()


def test_a_delta_that_is_surely_one_needs_no_lattice(monkeypatch):
    """Far below the mean loss delta is 1; a lattice fine enough to say so took minutes at hundreds
    of millions of steps.
    """
    curve = accountant.Tight().curve(
        ev.Repeated(ev.PoissonSampled(0.02, ev.Gaussian(1.2)), 735_072_529),
        Adjacency.ADD_OR_REMOVE_ONE,
    )
    monkeypatch.setattr(
        accountant, "compose_sum", lambda *arguments, **options: pytest.fail("a lattice was made")
    )
    assert curve.delta(0.0) == 1.0
    assert curve.delta(1000.0) == 1.0


def test_masses_that_all_underflow_leave_the_bound_without_a_lattice():
    """Noise of 1e12 over 1.6e11 steps: the steps of the loss are lost in its digits."""
    event = ev.Repeated(ev.PoissonSampled(0.02, ev.Gaussian(1e12)), 162_048_010_400)
    curve = accountant.Tight().curve(event, Adjacency.ADD_OR_REMOVE_ONE)
    assert 0 <= curve.epsilon(1e-5) < 1
    assert curve.epsilon_lower(1e-5) <= curve.epsilon(1e-5)
