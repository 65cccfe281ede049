"""What hyperparameter tuning costs, by every route with a proof: composition, and a random number
of trials.

The guide (Ponomareva et al. 2023, appendix C.3) prints a third figure, for choosing among a fixed
number of runs with the exponential mechanism. It is no bound: every run has already spent its
epsilon on the same records. :func:`printed` gives it, apart from the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dpfy.accounting import rdp
from dpfy.accounting.calibrate import least
from dpfy.accounting.moments import Array
from dpfy.accounting.tight.accountant import Tight, TightCurve
from dpfy.core import check
from dpfy.core.events import Event, OneOf, Repeated, gamma_for
from dpfy.core.guarantee import Curve
from dpfy.core.unit import Adjacency

NEARLY = 0.999
"""A delta that is known is an upper bound: so much of it is taken for the delta itself where orders
are left out.
"""


@dataclass(frozen=True)
class Route:
    """One way to pay for tuning: its epsilon at the asked delta, and what one gives up with it."""

    name: str
    epsilon: float
    note: str


@dataclass(frozen=True)
class PrintedFigure:
    """A figure that a paper prints for a route, and that is not a bound: it has no epsilon that
    could be sorted with those of routes.
    """

    name: str
    figure: float
    note: str = "printed in the guide, not a guarantee"

    def to_json(self) -> dict[str, str | float]:
        """As a row beside the table of routes."""
        return {"route": self.name, "printed": self.figure, "note": self.note}


def trials_pmf(shape: float, gamma: float, trials: int) -> float:
    """The probability of exactly `trials` under the truncated negative binomial distribution."""
    check.integer("trials", trials)
    if shape == 0:
        return (1 - gamma) ** trials / (trials * math.log(1 / gamma))
    log_gammas = math.lgamma(trials + shape) - math.lgamma(trials + 1) - math.lgamma(1 + shape)
    return (
        shape
        * math.exp(log_gammas + trials * math.log1p(-gamma))
        / math.expm1(-shape * math.log(gamma))
    )


def selected(
    orders: Array,
    values: Array,
    mean: float,
    shape: float,
    delta_of: Callable[[float], float] | None = None,
) -> Array:
    """Rényi divergences of releasing the best of a random number of runs, given those of one run.

    Papernot & Steinke 2022: Theorem 2 for the truncated negative binomial, any shape > -1, with the
    best pair of orders; Theorem 6 for Poisson (shape infinity), where `delta_of(epsilon)` is the
    privacy curve of one run (by default the one that the divergences imply) at epsilon-hat = log(1
    + 1/(order - 1)).
    """
    if math.isinf(shape):
        curve = delta_of if delta_of is not None else (lambda e: rdp.to_delta(orders, values, e))
        hats = np.array([curve(math.log1p(1 / (a - 1))) for a in orders])
        return _with_none(orders, values + mean * hats + math.log(mean) / (orders - 1), mean)
    best = float(np.min((1 - 1 / orders) * values + math.log(1 / gamma_for(shape, mean)) / orders))
    return np.asarray(values + (1 + shape) * best + math.log(mean) / (orders - 1))


def _with_none(orders: Array, some: Array, mean: float) -> Array:
    """The divergences of a Poisson number of runs, given the part of them that outcomes of at least
    one run have.

    A Poisson number may be 0, and then nothing comes out: a further outcome, of probability e^-mean
    in both worlds. The moment of all outcomes is the sum of both; the theorem's own formula leaves
    it out and is below zero where the mean is below 1.
    """
    return np.asarray(np.logaddexp(-mean, (orders - 1) * some) / (orders - 1))


def selected_at(orders: Array, values: Array, mean: float, shape: float, hat: float) -> Array:
    """`selected` with the second order of Theorem 2 fixed to `hat`, which must be one of the
    orders.
    """
    at = int(np.argmin(np.abs(orders - hat)))
    cost = (1 - 1 / orders[at]) * values[at] + math.log(1 / gamma_for(shape, mean)) / orders[at]
    return np.asarray(values + (1 + shape) * cost + math.log(mean) / (orders - 1))


def slope(mean: float, shape: float, miss: Array) -> Array:
    """The derivative of E z^K at z = 1 - miss, K the number of trials: what an outcome's density is
    multiplied by when it is the best of K, with `miss` the chance of a better one.

    A Poisson number is given by shape infinity; a binomial one of n by shape -n.
    """
    if math.isinf(shape):
        return np.asarray(mean * np.exp(-mean * miss))
    if shape <= -1:
        return np.asarray(mean * (1 + mean / shape * miss) ** (-shape - 1))
    gamma = gamma_for(shape, mean)
    scale = (1 - gamma) / math.log(1 / gamma)
    if shape:
        scale = shape * (1 - gamma) / math.expm1(-shape * math.log(gamma))
    return np.asarray(scale * (gamma + (1 - gamma) * miss) ** (-shape - 1))


class SelectedProfile:
    """delta of releasing the best of K runs, from points of the profile of one run.

    Runs are ordered by their outcome, ties by a coin of each run. In one world an outcome has the
    density p and v is the chance of a better one, in the other q and w. The best of K has the
    density s(v) p against s(w) q, s being `slope`, which falls. One run being (h, d)-private for
    all of its points, w <= r(v) = the least of e^h v + d and of 1 - e^-h (1 - v - d). So delta is at
    most the integral of (s(v) p - e^epsilon s(r(v)) q)+, and that at most the integral of the
    largest of these over all v, at the ratio p / q of the outcome: a convex function of the ratio
    with finitely many kinks, once v is put into cells. It is a sum of hockey-sticks of one run
    (compare Koskela, Redberg & Wang 2024, who use one h for all outcomes).

    Where K may be 0, nothing comes out, with one probability in both worlds.
    """

    CELLS = np.concatenate([[0.0], np.geomspace(1e-13, 1.0, 1000)])
    ROUNDED = 1e-9

    def __init__(self, epsilons: Array, deltas: Array, mean: float, shape: float) -> None:
        self._grown, self._deltas = np.exp(epsilons), deltas
        grown, known = self._grown[:, None], deltas[:, None]
        v = self.CELLS[1:]
        worst = np.minimum(grown * v + known, 1 - (1 - v - known) / grown).min(axis=0)
        worst += 1e-15  # more than the subtraction loses
        up = slope(mean, shape, self.CELLS[:-1]) * (1 + self.ROUNDED)
        down = slope(mean, shape, np.clip(worst, 0, 1)) * (1 - self.ROUNDED)
        self._kinks, self._weights = _largest_line(up, down)

    def __call__(self, epsilons: Array) -> Array:
        """Upper bounds on delta at many epsilons."""
        found = [self._at(math.exp(e)) for e in np.minimum(epsilons, 600.0)]
        return np.minimum(1.0, np.array(found) * (1 + self.ROUNDED))

    def _at(self, grown: float) -> float:
        ratios = grown * self._kinks
        low = ratios < 1  # there the other direction
        chords = np.interp(np.where(low, 1 / ratios, ratios), self._grown, self._deltas)
        sticks = np.where(low, 1 - ratios + ratios * chords, chords)
        return float(self._weights @ sticks)

    def epsilon(self, delta: float) -> float:
        """The least epsilon at which the bound is at most `delta`."""
        low, high = 0.0, 1.0
        while self(np.array([high]))[0] > delta:
            low, high = high, 2 * high
            if high > 600:
                return math.inf
        while high - low > 1e-7 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self(np.array([middle]))[0] > delta else (low, middle)
        return high


def _largest_line(slopes: Array, drops: Array) -> tuple[Array, Array]:
    """Kinks of the largest of slope * x - drop and 0 on x > 0, and by how much it turns there."""
    slopes, drops = np.append(slopes, 0.0), np.append(drops, 0.0)
    hull: list[int] = []
    for j in np.lexsort((drops, slopes)):
        if hull and slopes[hull[-1]] == slopes[j]:
            continue
        while len(hull) > 1:
            i, k = hull[-2:]
            if (drops[j] - drops[i]) * (slopes[k] - slopes[i]) > (drops[k] - drops[i]) * (
                slopes[j] - slopes[i]
            ):
                break
            hull.pop()
        hull.append(int(j))
    turns = np.diff(slopes[hull])
    return np.diff(drops[hull]) / turns, turns


NODES = 160
"""Points of the profile of one run."""


@lru_cache(maxsize=16)
def one_run(event: Event, adjacency: Adjacency, delta: float) -> tuple[Array, Array]:
    """Points of the tight profile of one run, up to where its delta is about `delta`. A run that is
    one of several kinds has at no epsilon more than the largest delta of its kinds.
    """
    if isinstance(event, OneOf):
        kinds = [one_run(kind, adjacency, delta) for kind in event.events]
        nodes = np.linspace(0.0, max(float(found[-1]) for found, _ in kinds), NODES)
        # Chords in e^epsilon lie above a convex profile, and its last value above what follows.
        worst = [np.interp(np.exp(nodes), np.exp(at), deltas) for at, deltas in kinds]
        return nodes, np.max(worst, axis=0)
    curve = Tight().curve(event, adjacency)
    end = curve.quick(delta) if isinstance(curve, TightCurve) else curve.epsilon(delta)
    if not 0 < end < 600:
        return np.zeros(1), np.array([curve.delta(0.0)])
    nodes = np.linspace(0.0, end, NODES)
    if isinstance(curve, TightCurve):
        return nodes, curve.deltas(nodes)
    return nodes, np.array([min(1.0, curve.delta(float(e))) for e in nodes])


def random_trials(
    event: Event,
    mean: float,
    shape: float,
    delta: float,
    *,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
    tight: bool = False,
) -> float:
    """The epsilon of releasing the best of a random number of runs of `event`; `tight` uses the
    exact curve of one run, and the Rényi divergences where they are better.
    """
    orders = np.asarray(rdp.ORDERS)
    adjacency = Adjacency.parse(adjacency)
    values = rdp.divergences(event, adjacency)
    check.inside_unit("delta", delta)
    if tight:
        rest = 10.0 ** math.floor(math.log10(delta / max(mean, 1e3)) - 2)
        found = SelectedProfile(*one_run(event, adjacency, rest), mean, shape).epsilon(delta)
        if math.isinf(shape):
            curve = Tight().curve(event, adjacency)
            found = min(found, _poisson_tight(orders, values, mean, delta, curve))
        return min(found, rdp.to_epsilon(orders, selected(orders, values, mean, shape), delta))
    return rdp.to_epsilon(orders, selected(orders, values, mean, shape), delta)


def _poisson_tight(orders: Array, values: Array, mean: float, delta: float, curve: Curve) -> float:
    """Theorem 6 with the exact curve, asked only at orders that can still win. Any order gives a
    bound, so leaving some out is sound.

    The delta of one run adds at least what it is at a larger epsilon, and epsilon-hat falls as the
    order grows.
    """

    def reached(k: int, hat: float) -> float:
        order, some = (
            orders[k : k + 1],
            values[k : k + 1] + mean * hat + math.log(mean) / (orders[k : k + 1] - 1),
        )
        return rdp.to_epsilon(order, _with_none(order, some, mean), delta)

    best, asked = math.inf, [(0.0, 0.0)]
    for k in np.argsort([reached(k, 0.0) for k in range(len(orders))]):
        known = max(found for order, found in asked if order <= orders[k])
        if reached(k, known * NEARLY) >= best:
            continue
        asked.append((float(orders[k]), curve.delta(math.log1p(1 / (orders[k] - 1)))))
        best = min(best, reached(k, asked[-1][1]))
    return best


def exponential(trials: int, failure: float, within: float) -> float:
    """The epsilon of the choice alone among `trials` models by the exponential mechanism (Abadi et
    al. 2016, appendix D).

    What the models themselves cost is not in it: they must be composed with the choice. The chosen
    model is within `within` correct answers of the best with probability 1 - `failure`; solves
    within = 4/e' ln(trials / (failure e')) and returns 8 e'.
    """
    check.integer("trials", trials)
    check.inside_unit("failure", failure)
    check.positive("within", within)

    def needed(e: float) -> float:
        return 4 / e * math.log(max(trials / failure / e, 1 + 1e-12))

    return 8 * least(needed, within, start=1e-2)


def routes(
    event: Event, trials: int, delta: float, *, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE
) -> list[Route]:
    """Every proven route's price for trying `trials` settings of `event` on average, cheapest
    first.

    Guarantees: every epsilon is an upper bound for the release that its route makes.
    """
    everything, adjacency = Repeated(event, trials), Adjacency.parse(adjacency)
    tight, renyi = Tight(), rdp.Rdp()
    mean = float(trials)
    price = {
        "compose, rdp": (
            renyi.curve(everything, adjacency).epsilon(delta),
            "every run may be released",
        ),
        "compose, tight": (
            tight.curve(everything, adjacency).epsilon(delta),
            "every run may be released",
        ),
        "random trials, logarithmic (eta 0), rdp": (
            random_trials(event, mean, 0.0, delta, adjacency=adjacency),
            "often few trials",
        ),
        "random trials, geometric (eta 1), rdp": (
            random_trials(event, mean, 1.0, delta, adjacency=adjacency),
            "sometimes few trials",
        ),
        "random trials, logarithmic (eta 0), tight": (
            random_trials(event, mean, 0.0, delta, adjacency=adjacency, tight=True),
            "often few trials",
        ),
        "random trials, geometric (eta 1), tight": (
            random_trials(event, mean, 1.0, delta, adjacency=adjacency, tight=True),
            "sometimes few trials",
        ),
        "random trials, Poisson, rdp": (
            random_trials(event, mean, math.inf, delta, adjacency=adjacency),
            "close to the mean",
        ),
        "random trials, Poisson, tight": (
            random_trials(event, mean, math.inf, delta, adjacency=adjacency, tight=True),
            "close to the mean",
        ),
    }
    return sorted(
        (Route(name, epsilon, note) for name, (epsilon, note) in price.items()),
        key=lambda route: route.epsilon,
    )


def cheapest(
    event: Event, trials: int, delta: float, *, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE
) -> Route:
    """The cheapest route with a proof."""
    return routes(event, trials, delta, adjacency=adjacency)[0]


def printed(
    event: Event,
    trials: int,
    delta: float,
    *,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
    validation: int = 10_000,
    accuracy: float = 0.01,
    failure: float = 0.01,
) -> PrintedFigure:
    """The guide's figure for the exponential mechanism over a fixed number of runs: the larger of
    one run and the choice.

    It is not a bound. Ten runs, each a randomised response of epsilon 1, have a true loss of 10
    when all of them give the same answer, and this figure is below 3. It is shown because readers
    of the guide look for it; never compare it with a bound.
    """
    single = Tight().curve(event, Adjacency.parse(adjacency)).epsilon(delta)
    return PrintedFigure(
        "exponential mechanism (appendix C.3)",
        max(single, exponential(trials, failure, accuracy * validation)),
    )
