"""A bound on a privacy profile becomes a pair that dominates: on the right side at the points,
between them and beyond.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from random_settings import _mixtures
from scipy.special import log_ndtr

from dpfy.accounting import bins, gaussian, profiles, rdp
from dpfy.accounting.bins import FAILURE, BinsCurve, ResponsePair
from dpfy.accounting.profiles import Points, dominating, hockey_stick
from dpfy.accounting.tight.accountant import TightCurve
from dpfy.accounting.tight.dominating_pairs import Composition, DominatingPair
from dpfy.core import events as ev
from dpfy.core.errors import Internal
from dpfy.core.unit import Adjacency

ADD = Adjacency.ADD_OR_REMOVE_ONE
ORDERS = np.asarray(rdp.ORDERS)


def normal(mu: float):
    """The exact profile of a Gaussian mechanism."""

    def bound(epsilons):
        above, below = (
            log_ndtr(mu / 2 - epsilons / mu),
            log_ndtr(-mu / 2 - epsilons / mu) + epsilons,
        )
        return np.exp(above) * -np.expm1(np.minimum(below - above, 0.0))

    return bound


def curve(forward: Points, backward: Points, mu: float = 0.0) -> TightCurve:
    pair = DominatingPair(dominating(forward, backward), dominating(backward, forward))
    return TightCurve(Composition(mu**2, ((pair, 1),)))


@pytest.mark.parametrize("mu", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("few", [False, True])
def test_the_pair_lies_above_the_profile_everywhere(mu, few):
    """At and between the points, and for negative epsilons, where the other direction speaks;
    closely, unless the points are few.
    """
    exact = normal(mu)
    points = profiles.points(exact)
    if few:
        points = Points(points.epsilons[::200], points.deltas[::200])
    pair = dominating(points, points)
    between = np.sort(
        np.concatenate([points.epsilons, (points.epsilons[1:] + points.epsilons[:-1]) / 2])
    )
    between = between[exact(between) > 1e-30][::7]
    found = hockey_stick(pair, between)
    assert (found >= exact(between)).all()
    if not few:
        assert (found <= exact(between) * 1.01).all()
    left = -np.expm1(-between) + np.exp(-between) * exact(between)
    assert (hockey_stick(pair, -between) >= left * (1 - 1e-15)).all()
    assert sum(pair.probabilities) + pair.infinity == pytest.approx(1.0, abs=1e-12)
    assert (
        sum(p * math.exp(-loss) for loss, p in zip(pair.losses, pair.probabilities, strict=True))
        <= 1 + 1e-12
    )


@pytest.mark.parametrize("mu", [0.01, 0.5, 5.0])
@pytest.mark.parametrize("other", [0.0, 1.0])
@pytest.mark.parametrize("delta", [1e-4, 1e-9, 1e-15])
def test_composing_through_a_profile_costs_next_to_nothing(mu, other, delta):
    points = profiles.points(normal(mu))
    exact = gaussian.epsilon(math.hypot(mu, other), delta)
    assert exact * (1 - 1e-9) <= curve(points, points, other).epsilon(delta) <= exact * (1 + 1e-4)


def test_points_in_a_dent_are_cut_off_and_the_truth_stays_below():
    """A bound that is not convex is replaced by its envelope: lower than the bound, never lower
    than the convex truth.
    """
    exact = normal(1.0)
    points = profiles.points(exact)
    rough = points.deltas * np.where(np.arange(len(points.deltas)) % 3, 3.0, 1.0)
    pair = dominating(Points(points.epsilons, rough), Points(points.epsilons, rough))
    some = points.epsilons[(points.deltas > 1e-30) & (points.epsilons > 0.2)][::11]
    found = hockey_stick(pair, some)
    assert (found >= exact(some)).all()
    assert (found <= exact(some) * 1.02).all()


def test_what_is_left_at_the_last_point_is_a_chance_of_infinite_loss():
    points = Points(np.array([0.0, 1.0, 2.0]), np.array([0.4, 0.2, 0.1]))
    pair = dominating(points, points)
    assert pair.infinity == pytest.approx(0.1, rel=1e-8)
    assert pair.infinity >= 0.1
    assert hockey_stick(pair, np.array([50.0]))[0] >= 0.1


@pytest.mark.parametrize("seed", range(20))
def test_chances_too_small_for_arithmetic_are_rounded_up(seed):
    """Near the smallest numbers a sum loses its digits: a bound there is raised, and one that is 0
    stays 0.
    """
    rng = np.random.default_rng(seed)
    mu = float(rng.uniform(0.5, 6.0))
    exact = normal(mu)
    far = np.linspace(mu * 36, mu * 40 + mu**2, 20_000)
    far = far[(exact(far) > 0) & (exact(far) < 1e-308)]
    epsilons = np.concatenate(
        [
            [0.0],
            np.sort(
                rng.choice([*rng.uniform(0, far[0], 200), *rng.choice(far, 60, False)], 250, False)
            ),
        ]
    )
    deltas = exact(epsilons)
    pair = dominating(Points(epsilons, deltas), Points(epsilons, deltas))
    large = deltas > 1e-12
    assert (hockey_stick(pair, epsilons[large]) >= deltas[large] * (1 - 1e-12)).all()
    assert (pair.infinity == 0) == (deltas[-1] == 0)
    assert pair.infinity <= 1e-229


def test_each_direction_has_its_own_pair():
    """Removing and adding differ: each pair follows its own direction forwards and the other one
    backwards.
    """
    drawn, still = [(0.9, 0.0), (0.1, 1.0)], [(1.0, 0.0)]
    mirrored = [(0.9, 0.0), (0.1, -1.0)]
    sides = []
    for p, q in ((drawn, still), (still, mirrored)):
        epsilons = np.concatenate([np.linspace(0.0, 1.0, 101), np.linspace(1.02, 6.0, 150)])
        sides.append(
            Points(epsilons, np.array([_mixtures(0.7, p, q, float(e)) + 1e-15 for e in epsilons]))
        )
    removed, added = sides
    forward, backward = dominating(removed, added), dominating(added, removed)
    some = np.array([0.02, 0.2, 0.5, 1.5])
    assert hockey_stick(forward, some) == pytest.approx(
        [_mixtures(0.7, drawn, still, e) for e in some], rel=1e-2
    )
    assert hockey_stick(backward, some) == pytest.approx(
        [_mixtures(0.7, still, mirrored, e) for e in some], rel=1e-2, abs=1e-14
    )
    assert (hockey_stick(forward, some) > hockey_stick(backward, some)).all()
    for pair, other in ((forward, added), (backward, removed)):
        at = other.epsilons[::10]
        left = -np.expm1(-at) + np.exp(-at) * other.deltas[::10]
        assert (hockey_stick(pair, -at) >= left * (1 - 1e-13)).all()


def test_points_that_do_not_ascend_are_a_fault_of_the_program():
    with pytest.raises(Internal):
        Points(np.array([0.0, 2.0, 1.0]), np.array([0.5, 0.2, 0.1]))
    with pytest.raises(Internal):
        Points(np.array([0.5, 2.0]), np.array([0.5, 0.2]))


@pytest.mark.parametrize("rho", [1e-6, 5e-3, 0.5, 50.0])
@pytest.mark.parametrize("mu", [0.1, 1.0, 5.0])
def test_renyi_curves_compose_better_through_a_profile_than_by_renyi_alone(rho, mu):
    """A zCDP bound beside a Gaussian: at most what adding the divergences gives, at least the
    Gaussian of the same zCDP.
    """
    points = profiles.points(profiles.of_renyi(ORDERS, rho * ORDERS))
    for delta in (1e-3, 1e-6, 1e-12):
        found = curve(points, points, mu).epsilon(delta)
        alone = rdp.to_epsilon(ORDERS, (rho + mu**2 / 2) * ORDERS, delta)
        truth = gaussian.epsilon(math.hypot(mu, math.sqrt(2 * rho)), delta)
        assert truth * (1 - 1e-9) <= found <= alone * (1 + 1e-4)


def banded(bins: int, sigma: float) -> ev.BallsInBins:
    gram = [[4.0 * max(0.0, 1 - abs(i - j) / 3) for j in range(bins)] for i in range(bins)]
    return ev.BallsInBins(sigma, tuple(map(tuple, gram)))


@pytest.mark.parametrize(
    "event",
    [banded(8, 2.0), ev.BallsInBins(1.5, ((4.0, 0.0), (0.0, 4.0)))],
    ids=["overlapping", "apart"],
)
def test_the_profile_of_balls_in_bins_is_near_the_figure_for_one_delta(event, monkeypatch):
    """Both come with their confidence; the profile costs a little more, at every delta, and is
    above fresh estimates.
    """
    monkeypatch.setattr(bins, "PROFILE_SAMPLES", {"remove": 2**14, "add": 2**12})
    bins.profile.cache_clear()
    removed, added = bins.profile(event)
    whole = curve(removed, added)
    for delta in (1e-3, 1e-5):
        assert (
            BinsCurve(event).epsilon(delta) * 0.99
            < whole.epsilon(delta)
            < BinsCurve(event).epsilon(delta) * 1.03
        )
    if not ResponsePair.of(event).diagonal:
        assert removed.deltas[-1] >= FAILURE
        for epsilon in (0.0, 1.0, 3.0):
            fresh = BinsCurve(event, 2**14).estimates(epsilon, seed=5, failure=1e-3)
            for points, name in ((removed, "remove"), (added, "add")):
                bound = float(np.interp(epsilon, points.epsilons, points.deltas))
                assert bound > fresh[name].mean - 4 * fresh[name].standard_error
    bins.profile.cache_clear()


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_renyi_divergences_of_two_bins_meet_direct_integration(overlap):
    """Never below; equal at whole orders for removing, where the weights of all bins are alike."""
    x = np.linspace(-14, 16, 1201)
    first, second = np.meshgrid(x, x)
    root = np.linalg.cholesky(np.array([[1.0, overlap], [overlap, 1.0]]) + 1e-12 * np.eye(2))
    log_q = -(first**2 + second**2) / 2 - math.log(2 * math.pi) + 2 * math.log(x[1] - x[0])
    log_y = np.logaddexp(
        *(root[k, 0] * first + root[k, 1] * second - 0.5 for k in (0, 1))
    ) - math.log(2)
    orders = np.array([1.5, 2.0, 3.0, 6.0])
    removed, added = bins.divergences(ev.BallsInBins(1.0, ((1.0, overlap), (overlap, 1.0))), orders)
    for k, order in enumerate(orders):
        true_removed = math.log(np.exp(log_q + order * log_y).sum()) / (order - 1)
        true_added = math.log(np.exp(log_q - (order - 1) * log_y).sum()) / (order - 1)
        assert removed[k] >= true_removed * (1 - 1e-9)
        assert added[k] >= true_added * (1 - 1e-9)
        assert removed[k] <= order / 2 * (1 + 1e-8)
    assert removed[1] == pytest.approx(math.log((math.e + math.exp(overlap)) / 2), rel=1e-8)
