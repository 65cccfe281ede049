"""The new events against their definitions: bounded range by enumeration, Rényi curves between
their orders, disjoint parts, delta 0.
"""

from __future__ import annotations

import decimal
import itertools
import math

import numpy as np
import pytest

from dpfy import accounting
from dpfy.accounting import bounded_range, user_level
from dpfy.accounting.rdp import ORDERS, divergences, rho
from dpfy.accounting.rules import words
from dpfy.accounting.tight.dominating_pairs import worlds
from dpfy.accounting.tight.losses import verified
from dpfy.core import events as ev
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import Adjacency

ADD, REPLACE, ZERO = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE, Adjacency.ZERO_OUT
STEP = ev.PoissonSampled(0.05, ev.Gaussian(2.0))


def _parts(*events: ev.Event) -> ev.Parallel:
    return ev.Parallel(tuple((f"part {k}", event) for k, event in enumerate(events)))


# Bounded range.


def _hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())


def _exponential(scores: np.ndarray, epsilon: float) -> np.ndarray:
    weights = np.exp(epsilon * scores / 2)  # of sensitivity 1
    return weights / weights.sum()


def _scores(rng: np.random.Generator, outcomes: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of two neighbours: each moves by at most 1, more often than not as far as it may."""
    base = 3 * rng.random(outcomes)
    return base, base + rng.choice([-1.0, -1.0, 0.0, 1.0, 1.0], outcomes)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 4.0])
def test_adaptive_exponential_mechanisms_stay_below_the_curve(epsilon: float) -> None:
    """Three of them, the scores of each chosen by what came before: all outcomes enumerated."""
    rng = np.random.default_rng(7)
    curve = accounting.curve(ev.Repeated(ev.BoundedRange(epsilon), 3))
    for _ in range(8):
        p, q = np.ones(1), np.ones(1)
        for _ in range(3):
            rows = [[_exponential(s, epsilon) for s in _scores(rng, 3)] for _ in p]
            p = np.concatenate([a * row[0] for a, row in zip(p, rows, strict=True)])
            q = np.concatenate([b * row[1] for b, row in zip(q, rows, strict=True)])
        for at in (0.0, 0.4 * epsilon, 1.1 * epsilon, 2.2 * epsilon):
            assert max(_hockey_stick(p, q, at), _hockey_stick(q, p, at)) <= curve.delta(at) * (
                1 + 1e-9
            )


def _two(epsilon: float, t: float) -> list[tuple[float, float]]:
    """(loss, probability) of the worst mechanism with losses t and t - epsilon."""
    high = math.expm1(t - epsilon) / math.expm1(-epsilon)
    return [(t, high), (t - epsilon, 1 - high)]


def test_one_step_is_the_closed_form_and_two_the_best_adaptive_choice() -> None:
    epsilon, ts = 1.2, np.linspace(0, 1.2, 97)

    def reached(g: float) -> float:
        """What two steps reach at epsilon g: the second offset is chosen after the first
        outcome.
        """

        def once(left: float) -> float:
            return max(
                sum(p * max(0.0, -math.expm1(left - loss)) for loss, p in _two(epsilon, t))
                for t in ts
            )

        return max(sum(p * once(g - loss) for loss, p in _two(epsilon, t)) for t in ts)

    one, two = (accounting.curve(ev.Repeated(ev.BoundedRange(epsilon), n)) for n in (1, 2))
    for g in (0.0, 0.3, 0.8, 1.1, 1.7, 2.1):
        closed = max(0.0, math.exp(epsilon / 2) - math.exp(g / 2)) ** 2 / math.expm1(epsilon)
        assert closed <= one.delta(g) <= closed * (1 + 1e-3) + 1e-6
        best = reached(g)
        assert best * (1 - 1e-12) <= two.delta(g) <= best * 1.003 + 1e-5


@pytest.mark.parametrize("epsilon", [1e-5, 0.01, 0.7, 5.0, 50.0])
def test_the_first_step_of_a_range_is_rounded_up_and_by_hardly_anything(epsilon: float) -> None:
    """(sqrt(E) - sqrt(g))^2 / (E - 1), with fifty digits, at the very points of the grid."""
    (known,) = bounded_range._reached(epsilon, 1)
    at = epsilon / bounded_range.POINTS * np.arange(len(known))
    with decimal.localcontext(prec=50):
        whole = decimal.Decimal(epsilon).exp()
        for k in range(0, len(known), 31):
            exact = (whole.sqrt() - decimal.Decimal(float(at[k])).exp().sqrt()) ** 2 / (whole - 1)
            assert (
                exact <= decimal.Decimal(float(known[k])) <= exact * (1 + decimal.Decimal("1e-11"))
            )
    assert known[-1] == 0


def test_a_bound_for_offsets_fixed_in_advance_would_be_too_small() -> None:
    """The optimum with one offset for all steps lies below what an adaptive choice reaches, which
    is what the bill covers.
    """
    epsilon, at = 1.2, 0.0
    fixed = 0.0
    for t in np.linspace(0, epsilon, 400):
        both = itertools.product(_two(epsilon, t), repeat=2)
        fixed = max(
            fixed, sum(p * q * max(0.0, -math.expm1(at - a - b)) for (a, p), (b, q) in both)
        )
    assert accounting.curve(ev.Repeated(ev.BoundedRange(epsilon), 2)).delta(at) > fixed * 1.04


@pytest.mark.parametrize("epsilon", [1e-4, 0.1, 1.0, 8.0])
def test_divergences_of_a_range_are_the_worst_over_offsets(epsilon: float) -> None:
    orders = (1.01, 1.5, 2.0, 7.0, 60.0, 1000.0)
    found = divergences(ev.BoundedRange(epsilon), ADD, orders)
    for order, value in zip(orders, found, strict=True):
        ts = np.linspace(0, epsilon, 2001)[1:-1]
        logs = [
            np.logaddexp(*(math.log(p) + (order - 1) * loss for loss, p in _two(epsilon, t)))
            for t in ts
        ]
        worst = max(logs) / (order - 1)
        assert worst <= value * (1 + 1e-7) + 1e-13
        assert value <= worst * (1 + 1e-3) + 1e-11
        assert value <= min(epsilon, order * epsilon**2 / 8) * (1 + 1e-9) + 1e-12
    assert rho(ev.BoundedRange(epsilon), ADD) == epsilon**2 / 8


@pytest.mark.parametrize("epsilon", [1e-5, 3e-3, 0.7, 2.5, 11.0, 50.0])
def test_every_block_of_a_range_is_a_lawful_pair_that_ends_at_the_pure_epsilon(
    epsilon: float,
) -> None:
    for steps in {1, 2, 3, bounded_range.block(epsilon)}:
        if steps <= bounded_range.block(epsilon):
            loss = verified(bounded_range.composed(epsilon, steps))
            assert loss.infinity < 1e-20
            assert max(loss.losses) == pytest.approx(steps * epsilon, rel=1e-9)
            assert verified(bounded_range.attained(epsilon, steps))


def test_a_range_costs_less_than_pure_epsilon_and_more_than_half_of_it() -> None:
    for n in (1, 10, 100):
        half, whole, pure = (
            accounting.epsilon(ev.Repeated(event, n), 1e-6)
            for event in (ev.EpsilonDelta(0.1), ev.BoundedRange(0.2), ev.EpsilonDelta(0.2))
        )
        assert half <= whole <= pure
    assert whole < 0.6 * pure


def test_permute_and_flip_is_not_of_range_epsilon() -> None:
    """Two outcomes, epsilon 1: its losses span 1.66, so that BoundedRange(1) would promise too
    much.
    """
    epsilon = 1.0

    def permute_and_flip(gap: float) -> np.ndarray:
        """Outcome 2 is worse by `gap` (in units of the exponent): it is seen first with chance 1/2
        and then kept with e^-gap.
        """
        worse = math.exp(-abs(gap)) / 2
        return np.array([1 - worse, worse] if gap >= 0 else [worse, 1 - worse])

    losses = np.log(permute_and_flip(epsilon / 2) / permute_and_flip(-epsilon / 2))
    assert np.abs(losses).max() <= epsilon
    assert losses.max() - losses.min() > 1.66 * epsilon
    assert "exponential" in words(ev.BoundedRange(1.0))


# Pure differential privacy.


@pytest.mark.parametrize("epsilon", [0.05, 0.5, 3.0, 20.0])
def test_rho_of_pure_epsilon_is_exact(epsilon: float) -> None:
    bound = rho(ev.EpsilonDelta(epsilon), ADD)
    values = divergences(ev.EpsilonDelta(epsilon), ADD)
    assert (values <= bound * np.array(ORDERS) * (1 + 1e-6)).all()
    near = divergences(ev.EpsilonDelta(epsilon), ADD, (1 + 1e-4,))[0]
    assert bound == pytest.approx(near, rel=1e-3)


def test_a_pure_guarantee_is_exact_where_numbers_are() -> None:
    def pure(event: ev.Event, adjacency: Adjacency = ADD) -> float:
        return accounting.epsilon(event, 0.0, adjacency=adjacency, accountant="basic")

    assert pure(ev.Laplace(2.0)) == 0.5
    assert pure(ev.Laplace(2.0), REPLACE) == 1.0
    assert pure(ev.Repeated(ev.Laplace(1 / 0.3), 1)) == 0.3
    assert (
        pure(
            ev.Composed(
                (
                    ev.EpsilonDelta(0.25),
                    ev.DiscreteLaplace(0.5, 3),
                    ev.Repeated(ev.BoundedRange(0.125), 2),
                )
            )
        )
        == 2.0
    )
    assert pure(ev.PoissonSampled(0.1, ev.Laplace(1.0))) == pytest.approx(
        math.log1p(0.1 * math.expm1(1.0)), rel=1e-12
    )
    assert pure(ev.PoissonSampled(0.1, ev.BoundedRange(800.0))) == pytest.approx(
        800 + math.log(0.1)
    )
    assert pure(ev.RandomizedResponse(0.5, 2), REPLACE) == pytest.approx(math.log(3))
    assert pure(_parts(ev.Laplace(2.0), ev.Laplace(4.0))) == 0.5
    assert pure(_parts(ev.Laplace(2.0), ev.Laplace(4.0)), REPLACE) == 1.0
    assert pure(ev.Nothing()) == 0.0
    assert math.isinf(pure(ev.NotPrivate()))


def test_delta_zero_is_refused_where_there_is_no_pure_guarantee() -> None:
    for event in (
        ev.Gaussian(1.0),
        ev.EpsilonDelta(1.0, 1e-9),
        ev.Composed((ev.Laplace(1.0), STEP)),
        ev.RepeatAndSelect(STEP, 3.0, 1.0),
    ):
        for adjacency in (ADD, ZERO):
            if accounting.accountant("basic").why_not(event, adjacency) is None:
                with pytest.raises(Unsupported, match="delta 0"):
                    accounting.epsilon(event, 0.0, adjacency=adjacency, accountant="basic")
    with pytest.raises(Unsupported, match="under replace-one"):
        accounting.epsilon(
            ev.PoissonSampled(0.1, ev.Laplace(1.0)), 0.0, adjacency=REPLACE, accountant="basic"
        )
    for name in ("tight", "rdp", "zcdp", "gdp", "pld"):
        with pytest.raises(InvalidInput, match="--accountant basic"):
            accounting.epsilon(ev.Laplace(1.0), 0.0, accountant=name)
    for delta in (-1e-9, 1.0, math.nan):
        with pytest.raises(InvalidInput, match="delta"):
            accounting.epsilon(ev.Laplace(1.0), delta, accountant="basic")


def _sampled_box(epsilon: float, delta: float, rate: float, count: int, at: float) -> float:
    """delta at `at` of so many black boxes on Poisson samples, the worse direction, every outcome
    counted.
    """
    high, low = (1 - delta) / (1 + math.exp(-epsilon)), (1 - delta) / (1 + math.exp(epsilon))
    p, q = [high, low, delta, 0.0], [low, high, 0.0, delta]
    mixed = [(1 - rate) * b + rate * a for a, b in zip(p, q, strict=True)]
    worst = 0.0
    for first, second in ((mixed, q), (q, mixed)):
        total = 0.0
        for ks in itertools.product(range(count + 1), repeat=3):
            rest = count - sum(ks)
            if rest >= 0:
                ways = math.factorial(count) / math.prod(map(math.factorial, (*ks, rest)))
                a, b = (
                    math.prod(x**k for x, k in zip(side, (*ks, rest), strict=True))
                    for side in (first, second)
                )
                total += ways * max(0.0, a - math.exp(at) * b)
        worst = max(worst, total)
    return worst


@pytest.mark.parametrize("delta", [0.0, 1e-3])
def test_sampled_black_boxes_lie_between_their_bounds(delta: float) -> None:
    event = ev.Repeated(ev.PoissonSampled(0.3, ev.EpsilonDelta(0.8, delta)), 8)
    curve = accounting.curve(event)
    for target in (3e-2, 8e-3):
        upper, lower = curve.epsilon(target), curve.epsilon_lower(target)
        assert lower is not None
        assert _sampled_box(0.8, delta, 0.3, 8, upper) <= target * (1 + 1e-6)
        assert lower == 0 or _sampled_box(0.8, delta, 0.3, 8, lower) >= target * (1 - 1e-6)
        assert upper < 1.2 * lower


def test_large_epsilons_are_not_cut_off() -> None:
    """Once a sampled box beyond e^700, and groups of such boxes, were billed as if they were
    e^700.
    """
    assert accounting.epsilon(ev.PoissonSampled(0.3, ev.EpsilonDelta(1000.0)), 1e-9) >= 998.7
    assert user_level.of_group(ev.EpsilonDelta(650.0, 1e-30), 2) == ev.EpsilonDelta(1300.0, 1.0)
    assert user_level.of_group(ev.EpsilonDelta(650.0), 2) == ev.EpsilonDelta(1300.0)
    assert user_level.from_curve(accounting.curve(ev.EpsilonDelta(650.0, 1e-30)), 1300.0, 2) == 1.0


def test_without_replacement_pure_releases_and_black_boxes_are_amplified() -> None:
    """Balle, Barthe & Gaboardi 2018, Theorem 9, under replace-one."""
    sample = ev.SampledWithoutReplacement(100, 10, ev.Laplace(2.0))
    pure = math.log1p(0.1 * math.expm1(1.0))  # a replaced unit moves the sum by two bounds
    assert accounting.epsilon(sample, 0.0, adjacency=REPLACE, accountant="basic") == pytest.approx(
        pure, rel=1e-12
    )
    assert accounting.epsilon(sample, 1e-9, adjacency=REPLACE) == pytest.approx(pure, rel=1e-6)
    box = accounting.curve(
        ev.SampledWithoutReplacement(100, 10, ev.EpsilonDelta(1.0, 1e-6)), adjacency=REPLACE
    )
    assert box.delta(pure * (1 + 1e-9)) == pytest.approx(1e-7)
    assert box.epsilon_lower(1e-9) in (0.0, math.inf)
    for refused in (
        ev.SampledWithReplacement(100, 10, ev.Laplace(2.0)),
        ev.SampledWithoutReplacement(100, 10, ev.Zcdp(0.1)),
    ):
        with pytest.raises(Unsupported, match=" of "):
            accounting.curve(refused, adjacency=REPLACE)
    with pytest.raises(Unsupported, match="under add-or-remove-one"):
        accounting.epsilon(sample, 0.0, accountant="basic")


def test_a_sample_that_shows_who_was_left_out_does_not_amplify() -> None:
    """An answer that is not given is seen: at rate 0.1 the epsilon of randomized response stays,
    with a chance of 0.1. So it is refused.
    """
    shown = ev.PoissonSampled(0.1, ev.RandomizedResponse(0.5))
    fixed = ev.PoissonSampled(
        0.1, ev.TruncatedPoissonGaussian(200, 0.05, 12, 2.0)
    )  # its number of units is not that of the sample
    for event in (
        shown,
        fixed,
        ev.PoissonSampled(0.1, ev.Composed((ev.Gaussian(2.0), ev.RandomizedResponse(0.5)))),
    ):
        for name in accounting.TABLE:
            for adjacency in Adjacency:
                assert accounting.accountant(name).why_not(event, adjacency) is not None, (
                    event,
                    name,
                    adjacency,
                )


# Rényi curves.


def test_a_renyi_curve_is_never_below_the_mechanism_it_was_read_off() -> None:
    for event in (ev.Gaussian(3.0), STEP, ev.BoundedRange(0.5), ev.Laplace(2.0)):
        few = (1.5, 3.0, 8.0, 32.0)
        curve = ev.RenyiCurve(few, tuple(float(v) for v in divergences(event, ADD, few)))
        orders = np.linspace(1.05, 32.0, 200)
        stated, true = (
            divergences(curve, ADD, tuple(orders)),
            divergences(event, ADD, tuple(orders)),
        )
        assert (stated >= true * (1 - 1e-9)).all()
        assert np.isinf(divergences(curve, ADD, (32.01,))).all()
        exact = divergences(curve, ADD, few)
        assert exact == pytest.approx(divergences(event, ADD, few), rel=1e-12)


def test_a_renyi_curve_that_falls_is_read_from_the_right_and_its_own_orders_count() -> None:
    falling = ev.RenyiCurve((2.0, 4.0), (0.5, 0.2))
    assert float(divergences(falling, ADD, (2.0,))[0]) == pytest.approx(0.2)
    only = ev.RenyiCurve((1.05,), (0.01,))
    assert math.isfinite(accounting.epsilon(only, 1e-2, accountant="rdp"))
    selected = ev.RepeatAndSelect(only, 3.0, 1.0)
    assert math.isfinite(accounting.epsilon(selected, 1e-2, accountant="rdp"))


@pytest.mark.parametrize(
    ("orders", "values", "field"),
    [
        ((), (), "values"),
        ((2.0,), (0.1, 0.2), "values"),
        ((1.0,), (0.1,), "orders"),
        ((0.5,), (0.1,), "orders"),
        ((3.0, 2.0), (0.1, 0.2), "orders"),
        ((2.0, 2.0), (0.1, 0.2), "orders"),
        ((2.0,), (-0.1,), "values"),
        ((2.0,), (math.nan,), "values"),
        ((math.inf,), (0.1,), "orders"),
    ],
)
def test_a_renyi_curve_that_makes_no_sense_is_refused(
    orders: tuple[float, ...], values: tuple[float, ...], field: str
) -> None:
    with pytest.raises(InvalidInput, match=field):
        ev.RenyiCurve(orders, values)


# Disjoint parts.


def test_the_worst_part_decides() -> None:
    for name in ("tight", "rdp", "zcdp"):
        whole = accounting.epsilon(
            _parts(ev.Gaussian(2.0), ev.Gaussian(5.0)), 1e-5, accountant=name
        )
        assert whole == accounting.epsilon(ev.Gaussian(2.0), 1e-5, accountant=name)
    parts = _parts(STEP, ev.Laplace(4.0), ev.EpsilonDelta(0.3))
    alone = [accounting.curve(part).delta(0.1) for _, part in parts.parts]
    assert accounting.curve(parts).delta(0.1) == max(alone)
    assert accounting.curve(parts, adjacency=ZERO).delta(0.1) == max(alone)


def test_what_all_units_pay_is_added_to_every_part() -> None:
    """Neither part alone is the worst at every delta: the curve is the larger one at each."""
    rest = ev.Gaussian(6.0)
    both = accounting.curve(ev.Composed((rest, _parts(ev.Gaussian(5.0), ev.Laplace(4.0)))))
    alone = [
        accounting.curve(ev.Composed((rest, part))) for part in (ev.Gaussian(5.0), ev.Laplace(4.0))
    ]
    picked = set()
    for delta in (1e-1, 1e-3, 1e-6, 1e-12):
        values = [curve.epsilon(delta) for curve in alone]
        assert both.epsilon(delta) == max(values)
        picked.add(values.index(max(values)))
    assert picked == {0, 1}


def test_the_same_names_are_the_same_parts_and_other_names_are_not() -> None:
    first = ev.Parallel((("a", ev.Gaussian(2.0)), ("b", ev.Nothing())))
    second = ev.Parallel((("b", ev.Gaussian(2.0)), ("a", ev.Nothing())))
    other = ev.Parallel((("b", ev.Gaussian(2.0)), ("c", ev.Nothing())))
    once, twice = (
        accounting.epsilon(ev.Gaussian(2.0), 1e-5),
        accounting.epsilon(ev.Repeated(ev.Gaussian(2.0), 2), 1e-5),
    )
    assert accounting.epsilon(ev.Composed((first, second)), 1e-5) == once
    assert accounting.epsilon(ev.Composed((first, other)), 1e-5) == twice
    assert (
        accounting.epsilon(ev.Composed((first, first)), 1e-5)
        == accounting.epsilon(ev.Repeated(first, 2), 1e-5)
        == twice
    )
    for name in ("rdp", "zcdp"):
        assert accounting.epsilon(ev.Composed((first, second)), 1e-5, accountant=name) < twice


def test_a_replaced_unit_may_move_from_one_part_to_another() -> None:
    """It is then removed there and added here: two parts are touched, one in each direction."""
    parts = _parts(STEP, ev.MixtureOfGaussians(4.0, (0.0, 1.0), (0.5, 0.5)))
    with pytest.raises(
        Unsupported, match="replace-one"
    ):  # a unit that stays has no pair in the second part
        accounting.curve(parts, adjacency=REPLACE)
    found = worlds(_parts(STEP, ev.Gaussian(3.0)), REPLACE)
    assert [tuple((p.adjacency, p.swapped) for p in world) for world in found] == [
        ((REPLACE, False),),
        ((REPLACE, False),),
        ((ADD, False), (ADD, True)),
    ]
    for name in ("tight", "rdp"):
        event = _parts(
            ev.Repeated(STEP, 50), ev.Repeated(ev.PoissonSampled(0.06, ev.Gaussian(2.0)), 50)
        )
        whole = accounting.epsilon(event, 1e-5, adjacency=REPLACE, accountant=name)
        stay = max(
            accounting.epsilon(part, 1e-5, adjacency=REPLACE, accountant=name)
            for _, part in event.parts
        )
        move = accounting.epsilon(
            ev.Composed(tuple(part for _, part in event.parts)), 1e-5, accountant=name
        )
        assert whole >= stay
        assert whole >= move * 0.98  # the same two parts, both losing the unit


STATED = [
    ev.EpsilonDelta(0.1),
    ev.Zcdp(0.1),
    ev.BoundedRange(0.1),
    ev.RenyiCurve((2.0,), (0.1,)),
    ev.RandomizedResponse(0.5),
    ev.SampledWithoutReplacement(100, 10, ev.Gaussian(2.0)),
    ev.Shuffled(0.5, 100),
]


@pytest.mark.parametrize("stated", STATED, ids=lambda e: type(e).__name__)
def test_statements_about_replacement_do_not_cover_a_unit_that_moves(stated: ev.Event) -> None:
    event = _parts(ev.Gaussian(3.0), ev.Repeated(stated, 2))
    for name in ("tight", "rdp"):
        assert "may move" in str(accounting.accountant(name).why_not(event, REPLACE))
    assert accounting.accountant("zcdp").why_not(event, REPLACE) is not None
    assert (
        accounting.accountant("rdp").why_not(_parts(stated), REPLACE) is None
    )  # a single part is left by nobody


def test_a_sample_of_parts_is_a_sample_of_each() -> None:
    whole = ev.PoissonSampled(0.1, _parts(ev.Gaussian(2.0), ev.Laplace(3.0)))
    each = _parts(ev.PoissonSampled(0.1, ev.Gaussian(2.0)), ev.PoissonSampled(0.1, ev.Laplace(3.0)))
    for name in ("tight", "rdp"):
        assert accounting.epsilon(whole, 1e-5, accountant=name) == accounting.epsilon(
            each, 1e-5, accountant=name
        )
    with pytest.raises(Unsupported, match="Parallel"):
        accounting.curve(
            ev.SampledWithoutReplacement(100, 10, _parts(ev.Gaussian(2.0))), adjacency=REPLACE
        )


def test_parts_within_parts_and_too_many_of_them() -> None:
    nested = ev.Parallel(
        (("a", _parts(ev.Gaussian(3.0), ev.Gaussian(2.0))), ("b", ev.Gaussian(4.0)))
    )
    assert accounting.epsilon(nested, 1e-5) == accounting.epsilon(ev.Gaussian(2.0), 1e-5)
    many = _parts(*(ev.Gaussian(2.0 + k) for k in range(300)))
    assert accounting.epsilon(ev.Gaussian(2.0), 1e-5) < accounting.epsilon(
        many, 1e-5
    )  # by divergences, which is not exact
    assert accounting.epsilon(many, 1e-5) <= accounting.epsilon(many, 1e-5, accountant="rdp")
    same = _parts(*[ev.Gaussian(2.0)] * 300)
    assert accounting.epsilon(same, 1e-5) == accounting.epsilon(ev.Gaussian(2.0), 1e-5)


def test_a_group_may_lie_in_several_parts_and_is_refused() -> None:
    with pytest.raises(Unsupported, match="Parallel"):
        user_level.of_group(_parts(ev.Gaussian(2.0)), 2)
    assert user_level.of_group(ev.BoundedRange(0.2), 3) == ev.BoundedRange(0.2 * 3)


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (("a", ev.Nothing()), ("a", ev.Nothing())),
        (("", ev.Nothing()),),
        (("a\n", ev.Nothing()),),
        ("ab",),
        (("a" * 81, ev.Nothing()),),
    ],
)
def test_parts_without_proper_names_are_refused(parts: tuple[tuple[str, ev.Event], ...]) -> None:
    with pytest.raises(InvalidInput, match="parts"):
        ev.Parallel(parts)


@pytest.mark.parametrize(
    "part",
    [["a", 3], ["a"], ["a", {"kind": "gaussian", "noise_multiplier": 1.0}, 1], "ab", ["a", None]],
)
def test_a_file_with_parts_that_are_no_events_is_refused(part: object) -> None:
    with pytest.raises(InvalidInput):
        ev.decode({"kind": "parallel", "parts": [part]})
