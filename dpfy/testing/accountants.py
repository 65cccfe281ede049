"""The contract of an accountant: its bounds hold, and more exposure never costs less."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from dpfy.accounting.table import accountant as built_in
from dpfy.core import events as ev
from dpfy.core.errors import DpfyError, InvalidInput, Unsupported
from dpfy.core.events import Event
from dpfy.core.guarantee import Accountant, Curve
from dpfy.core.unit import Adjacency
from dpfy.testing import lower_bounds as bounds
from dpfy.testing.contract import require, typed_refusals

ADD, REPLACE, ZERO = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE, Adjacency.ZERO_OUT

ANSWERS = (
    "`curve` answers exactly where `why_not` is None, and refuses with `Unsupported` elsewhere."
)
SOME = "The accountant answers for at least one event."
NUMBERS = "epsilon is a number of at least 0, and delta one between 0 and 1."
FALLING = (
    "A smaller delta never has a smaller epsilon, and a smaller epsilon never a smaller delta."
)
INVERSE = "delta at the epsilon of a delta is that delta or less."
LOWER = "The bound is not below what an attacker surely reaches."
CERTIFIED = "epsilon is not below the lower bound that the tight accountant certifies."
OWN_LOWER = "A lower bound is not above the upper bound."
STATELESS = "The same event always has the same curve."
COMPOSED = "Repetition is composition, in any order."
MORE_STEPS = "More releases never cost less."
MORE_NOISE = "More noise never costs more."
MORE_RATE = "A higher sampling rate never costs less."
NEIGHBOURS = "Replacing a record never costs less than adding or removing one."
EXTREMES = "Nothing costs next to nothing, and a release without protection costs everything."
BAD_DELTA = "A delta that is not between 0 and 1 is refused."
ROUNDING = 1e-9
"""What rounding may change, relatively."""
GRID = 5e-4
"""What the grids and samples of an accountant may change between events that cost the same."""


def check_accountant(
    accountant: Accountant,
    *,
    settings: Sequence[tuple[Event, Adjacency]] = (),
    deltas: Sequence[float] = (1e-5, 1e-8),
    thorough: bool = False,
) -> None:
    """Check that an accountant keeps its contract (:class:`dpfy.core.guarantee.Accountant`).

    Args:
        accountant: The accountant to check.
        settings: Your own events and adjacencies, beside those of the suite. Events that the
            accountant refuses (`why_not`) are skipped, all but one.
        deltas: Where epsilon is read.
        thorough: More events, more steps, and noise on a finer grid.

    Raises:
        ContractBroken: a property does not hold.

    Guarantees:
        An accountant that passes keeps, in the settings tried:

        - epsilon is not below the exact one, where there is a closed form, nor below what an
          attacker surely reaches, computed here without any code of an accountant, nor below what
          the tight accountant certifies;
        - delta at a given epsilon likewise;
        - `epsilon_lower` is not above `epsilon`, nor above the exact epsilon;
        - epsilon falls with delta and with noise, and rises with releases and sampling rate;
        - repetition is composition, and the order of releases does not matter;
        - replacing a record costs at least as much as adding or removing one;
        - `why_not` and `curve` agree, numbers are never NaN, and the same event always has the same
          curve;
        - `NotPrivate` has an infinite epsilon, and a delta outside of (0, 1) is refused.

    Example:
        >>> from dpfy.accounting.gdp import Gdp
        >>> from dpfy.testing import check_accountant
        >>> check_accountant(Gdp())
    """
    answered = 0
    known = [*_known(thorough), *((event, adjacency, None) for event, adjacency in settings)]
    if thorough or accountant.why_not(ev.Gaussian(1.0), ADD) is not None:
        known += _special(thorough)
    for event, adjacency, lowest in known:
        setting = _Setting(accountant, event, adjacency, tuple(deltas), thorough)
        if (curve := setting.curve()) is None:
            continue
        answered += 1
        setting.check_numbers(curve)
        setting.check_bounds(curve, lowest)
        if thorough or answered % 4 == 1:
            setting.check_stateless(curve)
    require(answered > 0, SOME, accountant.name, "all events of the suite are refused")
    for family, axis, members in _families(thorough):
        _check_rising(accountant, family, axis, members, max(deltas))
    _check_composed(accountant, max(deltas))
    _check_neighbours(accountant, max(deltas))
    _check_extremes(accountant, max(deltas))


Lowest = Callable[[float], float]
"""A lower bound on delta at an epsilon."""


@dataclass(frozen=True)
class _Setting:
    """One event under one adjacency."""

    accountant: Accountant
    event: Event
    adjacency: Adjacency
    deltas: tuple[float, ...]
    thorough: bool

    @property
    def read_at(self) -> tuple[float, ...]:
        """The epsilons at which delta is read, which can take an accountant long."""
        return (0.1, 0.5, 1.0, 2.0, 5.0) if self.thorough else (0.5, 2.0)

    def __str__(self) -> str:
        return f"{self.accountant.name}: {self.event!r} under {self.adjacency.value}"

    def curve(self) -> Curve | None:
        """The curve, or None where the accountant refuses the event."""
        with typed_refusals(ANSWERS, str(self)):
            reason = self.accountant.why_not(self.event, self.adjacency)
        if reason is not None:
            one_line = isinstance(reason, str) and bool(reason) and "\n" not in reason
            require(one_line, "`why_not` gives one line.", str(self), repr(reason))
            try:
                self.accountant.curve(self.event, self.adjacency)
            except Unsupported:
                return None
            require(False, ANSWERS, str(self), f"`why_not` said {reason!r}, and `curve` answered")
        try:
            return self.accountant.curve(self.event, self.adjacency)
        except Exception as error:
            require(False, ANSWERS, str(self), f"`why_not` is None, and `curve` raised {error!r}")
        return None

    def epsilons(self, curve: Curve) -> list[tuple[float, float]]:
        """(delta, epsilon) at falling deltas; those that cannot be certified are left out."""
        found = []
        for delta in sorted(self.deltas, reverse=True):
            try:
                found.append((delta, curve.epsilon(delta)))
            except Unsupported:
                continue
        return found

    def check_numbers(self, curve: Curve) -> None:
        """Signs, order, and delta and epsilon as each other's inverse."""
        epsilons = self.epsilons(curve)
        for delta, epsilon in epsilons:
            require(epsilon >= 0, NUMBERS, f"{self}, delta {delta:g}", f"epsilon {epsilon!r}")
        for (high, less), (low, more) in itertools.pairwise(epsilons):
            require(
                more >= less * (1 - ROUNDING),
                FALLING,
                str(self),
                f"epsilon {less:.9g} at delta {high:g}, and {more:.9g} at {low:g}",
            )
        deltas = [(e, curve.delta(e)) for e in self.read_at]
        for epsilon, delta in deltas:
            require(0 <= delta <= 1, NUMBERS, f"{self}, epsilon {epsilon}", f"delta {delta!r}")
        for (small, more), (large, less) in itertools.pairwise(deltas):
            require(
                less <= more * (1 + GRID) + 1e-12,
                FALLING,
                str(self),
                f"delta {more:.6g} at epsilon {small}, and {less:.6g} at {large}",
            )

    def check_bounds(self, curve: Curve, lowest: Lowest | None) -> None:
        """Not below what is surely lost."""
        for delta, epsilon in self.epsilons(curve):
            where = f"{self}, delta {delta:g}"
            if lowest is not None and math.isfinite(epsilon):
                surely = lowest(epsilon)
                require(
                    surely <= delta * (1 + ROUNDING),
                    LOWER,
                    where,
                    f"at the given epsilon {epsilon:.9g} an attacker reaches delta {surely:.9g}",
                )
            certified = None
            if lowest is None:
                certified = _certified(self.event, self.adjacency, delta)
            require(
                certified is None or epsilon >= certified * (1 - ROUNDING),
                CERTIFIED,
                where,
                f"epsilon {epsilon:.9g}, and at least {certified} is certified",
            )
            lower = curve.epsilon_lower(delta)
            if lower is not None:
                require(
                    0 <= lower <= epsilon,
                    OWN_LOWER,
                    where,
                    f"a lower bound of {lower!r} and an upper one of {epsilon!r}",
                )
                self._check_own_lower(where, delta, lower)
        if lowest is not None:
            for epsilon in self.read_at:
                stated, surely = curve.delta(epsilon), lowest(epsilon)
                require(
                    stated >= surely * (1 - ROUNDING) - bounds.ARITHMETIC,
                    LOWER,
                    f"{self}, epsilon {epsilon}",
                    f"delta {stated:.9g}, and an attacker reaches {surely:.9g}",
                )

    def _check_own_lower(self, where: str, delta: float, lower: float) -> None:
        """A lower bound above the exact epsilon is none."""
        mean = _gaussian_mean(self.event, self.adjacency)
        if mean is not None and lower > 1e-6:
            exact = bounds.gaussian_delta(mean, lower * (1 - 1e-7))
            require(
                exact >= delta * (1 - ROUNDING),
                OWN_LOWER,
                where,
                f"the lower bound {lower:.9g} is above the exact epsilon",
            )

    def check_stateless(self, curve: Curve) -> None:
        """A second curve, asked in another order."""
        first = dict(self.epsilons(curve))
        again = self.accountant.curve(self.event, self.adjacency)
        for delta in sorted(first):
            second = again.epsilon(delta)
            require(
                second == first[delta]
                or math.isclose(second, first[delta], rel_tol=ROUNDING, abs_tol=1e-12),
                STATELESS,
                f"{self}, delta {delta:g}",
                f"{first[delta]!r}, then {second!r}",
            )


def _certified(event: Event, adjacency: Adjacency, delta: float) -> float | None:
    """The lower bound of the tight accountant, where it has one."""
    tight = built_in("tight")
    if tight.why_not(event, adjacency) is not None:
        return None
    try:
        return tight.curve(event, adjacency).epsilon_lower(delta)
    except DpfyError:
        return None


def _gaussian_mean(event: Event, adjacency: Adjacency) -> float | None:
    """By how many standard deviations a record moves Gaussian releases; None for other events."""
    squares = 0.0
    for leaf, count in ev.flatten(event):
        if not isinstance(leaf, ev.Gaussian):
            return None
        squares += count / leaf.noise_multiplier**2
    return math.sqrt(squares) * (2 if adjacency is REPLACE else 1)


def _known(thorough: bool) -> Iterator[tuple[Event, Adjacency, Lowest | None]]:
    """Events whose exact delta, or a good lower bound on it, is known."""
    noises = [(0.7, 1), (3.0, 1), (4.0, 20), (30.0, 300)]
    noises += [(1.0, 1), (11.0, 40), (200.0, 10_000)] if thorough else []
    for noise, count in noises:
        for adjacency in (ADD, REPLACE, ZERO):
            event: Event = ev.Repeated(ev.Gaussian(noise), count)
            mean = _gaussian_mean(event, adjacency)
            assert mean is not None
            yield event, adjacency, partial(bounds.gaussian_delta, mean)
    mixed = ev.Composed((ev.Gaussian(2.0), ev.Repeated(ev.Gaussian(5.0), 7), ev.Gaussian(3.0)))
    whole = _gaussian_mean(mixed, ADD)
    assert whole is not None
    yield mixed, ADD, partial(bounds.gaussian_delta, whole)
    for event, adjacency, releases in _attacked(thorough):
        yield event, adjacency, _reached(releases)
    yield ev.Repeated(ev.Zcdp(0.01), 3), ADD, None
    if thorough:
        yield (
            ev.Repeated(ev.MixtureOfGaussians(4.0, (0.0, 1.0, 2.0), (0.7, 0.2, 0.1)), 5),
            ADD,
            None,
        )


def _reached(releases: Sequence[tuple[bounds.Outcomes, int]]) -> Lowest:
    """The larger delta of both directions."""
    both = (
        bounds.composed(releases),
        bounds.composed([(outcomes.swapped, count) for outcomes, count in releases]),
    )
    return lambda epsilon: max(direction.delta(epsilon) for direction in both)


Attacked = tuple[Event, Adjacency, list[tuple[bounds.Outcomes, int]]]


def _attacked(thorough: bool) -> Iterator[Attacked]:
    """Events with the outcomes that an attacker looks at."""
    counts = (1, 12, 60) if thorough else (12,)
    for count in counts:
        for rate, noise in ((0.05, 2.0), (0.3, 1.0)) if thorough else ((0.05, 2.0),):
            sampled = ev.Repeated(ev.PoissonSampled(rate, ev.Gaussian(noise)), count)
            present = bounds.gaussian_shift(noise, [(1 - rate, 0.0), (rate, 1.0)])
            yield sampled, ADD, [(present, count)]
            replaced = bounds.sampled_gaussians(rate, noise, -1.0)
            yield sampled, REPLACE, [(replaced, count)]
        subset = ev.SampledWithoutReplacement(200, 10, ev.Gaussian(3.0))
        yield (
            ev.Repeated(subset, count),
            REPLACE,
            [(bounds.sampled_gaussians(0.05, 3.0, -1.0), count)],
        )
        yield ev.Repeated(ev.Laplace(4.0), count), ADD, [(bounds.laplace_shift(4.0), count)]
        yield (
            ev.Repeated(ev.PoissonSampled(0.2, ev.Laplace(2.0)), count),
            ADD,
            [(bounds.laplace_shift(2.0, 0.2), count)],
        )
        yield (
            ev.Repeated(ev.EpsilonDelta(0.1, 1e-9), count),
            ADD,
            [(bounds.black_box(0.1, 1e-9), count)],
        )
        right, wrong = 0.2 + 0.8 / 3, 0.8 / 3
        yield (
            ev.Repeated(ev.RandomizedResponse(0.8, 3), count),
            REPLACE,
            [(bounds.two_answers(right, wrong), count)],
        )
        tail = 1 / (1 + math.exp(-0.3))
        yield (
            ev.Repeated(ev.DiscreteLaplace(0.3), count),
            ADD,
            [(bounds.two_answers(tail, 1 - tail), count)],
        )


def _special(thorough: bool) -> Iterator[tuple[Event, Adjacency, Lowest | None]]:
    """An event for accountants that know no Gaussian; others may take long over it."""
    gram = tuple(tuple(1.0 if i == j else 0.2 for j in range(4)) for i in range(4))
    first = bounds.gaussian_shift(1.5, [(0.25, 1.0), (0.75, 0.2)])
    yield ev.BallsInBins(1.5, gram), ADD, _reached([(first, 1)])
    if thorough:
        yield ev.BallsInBins(6.0, gram), ADD, None


Member = tuple[str, Event]


def _families(thorough: bool) -> Iterator[tuple[str, str, list[Member]]]:
    """Events in the order in which epsilon must not fall, and why."""
    counts = (1, 2, 5, 13, 40, 100) if thorough else (1, 2, 13)
    noises = (20.0, 6.0, 5.9, 2.0, 1.0, 0.7, 0.4) if thorough else (20.0, 5.9, 1.0)
    rates = (0.001, 0.01, 0.011, 0.1, 0.5, 1.0) if thorough else (0.001, 0.1, 1.0)
    leaves: dict[str, Callable[[float], Event]] = {
        "Gaussian": ev.Gaussian,
        "sampled Gaussian": lambda noise: ev.PoissonSampled(0.05, ev.Gaussian(noise)),
        "Laplace": ev.Laplace,
        "discrete Laplace": lambda noise: ev.DiscreteLaplace(1 / noise),
        "zCDP": lambda noise: ev.Zcdp(1 / (2 * noise**2)),
        "black box": lambda noise: ev.EpsilonDelta(1 / noise, 1e-10),
    }
    if not thorough:
        del leaves["discrete Laplace"], leaves["zCDP"]
    for name, leaf in leaves.items():
        yield name, MORE_STEPS, [(f"{n} times", ev.Repeated(leaf(4.0), n)) for n in counts]
        yield name, MORE_NOISE, [(f"noise {z}", ev.Repeated(leaf(z), 5)) for z in noises]
    yield (
        "sampled Gaussian",
        MORE_RATE,
        [(f"rate {q}", ev.Repeated(ev.PoissonSampled(q, ev.Gaussian(2.0)), 20)) for q in rates],
    )


def _check_rising(
    accountant: Accountant, family: str, axis: str, members: Sequence[Member], delta: float
) -> None:
    """Epsilon along one axis."""
    before: tuple[str, float] | None = None
    for name, event in members:
        if accountant.why_not(event, ADD) is not None:
            continue
        epsilon = accountant.curve(event, ADD).epsilon(delta)
        require(
            before is None or epsilon >= before[1] * (1 - ROUNDING) - 1e-12,
            axis,
            f"{accountant.name}: {family}, {name}, delta {delta:g}",
            f"epsilon {epsilon:.9g}, less than {before}",
        )
        before = name, epsilon


def _check_composed(accountant: Accountant, delta: float) -> None:
    """The same releases, written in three ways."""
    pairs: list[tuple[Event, Event]] = [
        (ev.Gaussian(4.0), ev.Gaussian(7.0)),
        (ev.PoissonSampled(0.05, ev.Gaussian(2.0)), ev.Gaussian(7.0)),
        (ev.Laplace(8.0), ev.DiscreteLaplace(0.2)),
        (ev.Zcdp(0.01), ev.Zcdp(0.003)),
        (ev.EpsilonDelta(0.1, 1e-10), ev.EpsilonDelta(0.2)),
    ]
    for one, other in pairs:
        ways = [
            ev.Composed((ev.Repeated(one, 4), other)),
            ev.Composed((other, ev.Repeated(ev.Repeated(one, 2), 2))),
            ev.Composed((one, ev.Composed((one, other)), one, one)),
        ]
        if any(accountant.why_not(way, ADD) is not None for way in ways):
            continue
        found = [accountant.curve(way, ADD).epsilon(delta) for way in ways]
        for way, epsilon in zip(ways[1:], found[1:], strict=True):
            require(
                math.isclose(epsilon, found[0], rel_tol=1e-6, abs_tol=1e-9),
                COMPOSED,
                f"{accountant.name}: {way!r}",
                f"epsilon {epsilon:.9g}, and {found[0]:.9g} in another order",
            )
        alone = accountant.curve(ev.Repeated(one, 4), ADD).epsilon(delta)
        require(
            found[0] >= alone * (1 - GRID),
            MORE_STEPS,
            f"{accountant.name}: {ways[0]!r}",
            f"epsilon {found[0]:.9g}, and {alone:.9g} without {other!r}",
        )


def _check_neighbours(accountant: Accountant, delta: float) -> None:
    """A replaced record is one removed and one added."""
    for event in (
        ev.Repeated(ev.Gaussian(4.0), 3),
        ev.Repeated(ev.PoissonSampled(0.05, ev.Gaussian(2.0)), 20),
        ev.Laplace(4.0),
    ):
        if all(accountant.why_not(event, a) is None for a in (ADD, REPLACE)):
            one, two = (accountant.curve(event, a).epsilon(delta) for a in (ADD, REPLACE))
            require(
                two >= one * (1 - ROUNDING),
                NEIGHBOURS,
                f"{accountant.name}: {event!r}",
                f"epsilon {two:.9g}, and {one:.9g} for adding or removing",
            )


def _check_extremes(accountant: Accountant, delta: float) -> None:
    """Nothing at all, no protection, and deltas that are none."""
    known: Curve | None = None
    event: Event
    for event, least, most in ((ev.Nothing(), 0.0, 0.01), (ev.NotPrivate(), math.inf, math.inf)):
        if accountant.why_not(event, ADD) is None:
            known = accountant.curve(event, ADD)
            epsilon = known.epsilon(delta)
            require(
                least <= epsilon <= most, EXTREMES, f"{accountant.name}: {event!r}", f"{epsilon!r}"
            )
    for event in (ev.Gaussian(4.0), ev.Laplace(4.0)):
        if accountant.why_not(event, ADD) is None:
            known = accountant.curve(event, ADD)
            for bad in (-1e-5, 1.0, 2.0, math.nan):
                try:
                    epsilon = known.epsilon(bad)
                except (InvalidInput, Unsupported):
                    continue
                where = f"{accountant.name}: {event!r}, delta {bad}"
                require(False, BAD_DELTA, where, f"epsilon {epsilon!r}")
