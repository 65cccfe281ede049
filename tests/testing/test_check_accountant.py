"""The contract suite of accountants catches wrong ones, and all of ours pass it."""

from __future__ import annotations

import math

import pytest

from dpfy.accounting.gdp import Gdp
from dpfy.accounting.rdp import Rdp, ZcdpAccountant
from dpfy.accounting.table import TABLE, accountant
from dpfy.accounting.tight.accountant import Tight
from dpfy.core import events as ev
from dpfy.core.errors import Unsupported
from dpfy.core.unit import Adjacency
from dpfy.testing import ContractBroken, check_accountant, lower_bounds

SLOW = {"advanced", "basic", "pld"}
"""Each takes some ten seconds on its own settings."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in TABLE]
)
def test_ours_keep_the_contract(name):
    check_accountant(TABLE[name]())


@pytest.mark.parametrize("name", sorted(SLOW))
def test_slow_ones_keep_the_contract_where_they_are_quick(name):
    check_accountant(Narrow(TABLE[name](), (ev.Laplace, ev.EpsilonDelta)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tight", "rdp", "zcdp", "gdp", "monte-carlo"])
def test_ours_keep_the_contract_thoroughly(name):
    check_accountant(accountant(name), thorough=True)


class Wrapped:
    """An accountant with something wrong, for the wrong ones to inherit from."""

    def __init__(self, inner=None):
        self.inner = inner or Gdp()
        self.name = f"wrong {type(self).__name__}"

    def why_not(self, event, adjacency):
        return self.inner.why_not(event, adjacency)

    def curve(self, event, adjacency):
        return Changed(self, event, adjacency, self.inner.curve(event, adjacency))

    def change(self, epsilon, event, adjacency, delta):
        return epsilon

    def change_delta(self, value, event, adjacency, epsilon):
        return value

    def change_lower(self, lower):
        return lower


class Changed:
    def __init__(self, owner, event, adjacency, inner):
        self.owner, self.event, self.adjacency, self.inner = owner, event, adjacency, inner

    def epsilon(self, delta):
        return self.owner.change(self.inner.epsilon(delta), self.event, self.adjacency, delta)

    def delta(self, epsilon):
        found = self.inner.delta(epsilon)
        return self.owner.change_delta(found, self.event, self.adjacency, epsilon)

    def epsilon_lower(self, delta):
        lower = self.inner.epsilon_lower(delta)
        return lower if lower is None else self.owner.change_lower(lower)


class Narrow(Wrapped):
    """Answers for events of a few kinds alone."""

    def __init__(self, inner, kinds):
        super().__init__(inner)
        self.kinds = kinds

    def why_not(self, event, adjacency):
        if not all(isinstance(leaf, self.kinds) for leaf, _ in ev.flatten(event)):
            return "another kind of event; use the whole accountant"
        return super().why_not(event, adjacency)

    def curve(self, event, adjacency):
        if (reason := self.why_not(event, adjacency)) is not None:
            raise Unsupported("this event", reason)
        return super().curve(event, adjacency)


class RoundsToNearest(Wrapped):
    def change(self, epsilon, event, adjacency, delta):
        return round(epsilon, 4)


class ALittleBelow(Wrapped):
    def change(self, epsilon, event, adjacency, delta):
        return epsilon * (1 - 1e-7)


class DeltaBelow(Wrapped):
    def change_delta(self, value, event, adjacency, epsilon):
        return value * 0.999


class ForgetsAdjacency(Wrapped):
    def curve(self, event, adjacency):
        return super().curve(event, Adjacency.ADD_OR_REMOVE_ONE)


class OneRelease(Wrapped):
    """A release that is repeated is billed once."""

    def curve(self, event, adjacency):
        alone = [leaf for leaf, count in ev.flatten(event) if count]
        return super().curve(ev.Composed(tuple(alone)), adjacency)


class FallsWithSteps(Wrapped):
    """More than twelve releases cost less than twelve, but more than anybody reaches."""

    def change(self, epsilon, event, adjacency, delta):
        count = sum(count for _, count in ev.flatten(event))
        return epsilon * (4.0 if count == 2 else 1.01)


class FallsWithDelta(Wrapped):
    def change(self, epsilon, event, adjacency, delta):
        return epsilon * (3.0 if delta > 1e-6 else 1.0)


class RisesWithNoise(Wrapped):
    def change(self, epsilon, event, adjacency, delta):
        loud = any(getattr(leaf, "noise_multiplier", 0) == 20.0 for leaf, _ in ev.flatten(event))
        return epsilon + (1e3 if loud else 0.0)


class OrderMatters(Wrapped):
    def change(self, epsilon, event, adjacency, delta):
        first = event.events[0] if isinstance(event, ev.Composed) else None
        return epsilon * (1.5 if isinstance(first, ev.Repeated) else 1.0)


class NotANumber(Wrapped):
    def change(self, epsilon, event, adjacency, delta):
        return math.nan if isinstance(event, ev.Composed) else epsilon


class Random(Wrapped):
    calls = 0

    def change(self, epsilon, event, adjacency, delta):
        Random.calls += 1
        return epsilon * (1 + 1e-6 * Random.calls)


class LowerAboveUpper(Wrapped):
    def change_lower(self, lower):
        return lower * 1.1


class LowerAboveTruth(Wrapped):
    """A loose upper bound, and a lower bound that is no bound."""

    def change(self, epsilon, event, adjacency, delta):
        return 2 * epsilon

    def change_lower(self, lower):
        return lower * 1.01


class SaysNoAndAnswers(Wrapped):
    def why_not(self, event, adjacency):
        reason = super().why_not(event, adjacency)
        return reason or ("replace-one" if adjacency is Adjacency.REPLACE_ONE else None)


class SaysYesAndRefuses(Wrapped):
    def why_not(self, event, adjacency):
        return None


class TakesAnyDelta(Wrapped):
    def curve(self, event, adjacency):
        held = super().curve(event, adjacency)
        found = held.inner.epsilon
        held.inner = type(
            "Lenient",
            (),
            {
                "epsilon": lambda self, d: found(d) if 0 < d < 1 else 0.0,
                "delta": staticmethod(held.inner.delta),
                "epsilon_lower": staticmethod(held.inner.epsilon_lower),
            },
        )()
        return held


class NoProtectionIsFinite(Wrapped):
    def change(self, epsilon, event, adjacency, delta):
        return min(epsilon, 1e6)


class UnamplifiedDirection(Wrapped):
    """Sampled Gaussians are billed as if records could only be added."""

    def change(self, epsilon, event, adjacency, delta):
        sampled = any(isinstance(leaf, ev.PoissonSampled) for leaf, _ in ev.flatten(event))
        return epsilon * (0.6 if sampled else 1.0)


class TooMuchAmplification(Wrapped):
    """Sampling at a rate is billed as the rate times epsilon."""

    def change(self, epsilon, event, adjacency, delta):
        rates = [leaf.rate for leaf, _ in ev.flatten(event) if isinstance(leaf, ev.PoissonSampled)]
        return epsilon * (min(rates) if rates else 1.0)


LOWER = "what an attacker surely reaches"
WRONG = [
    (RoundsToNearest(), LOWER),
    (ALittleBelow(), LOWER),
    (DeltaBelow(), LOWER),
    (ForgetsAdjacency(), LOWER),
    (OneRelease(), LOWER),
    (FallsWithSteps(), "More releases"),
    (FallsWithDelta(), "smaller delta"),
    (RisesWithNoise(), "More noise"),
    (OrderMatters(), "any order"),
    (NotANumber(), "number"),
    (Random(), "same curve"),
    (LowerAboveUpper(), "lower bound"),
    (LowerAboveTruth(), "lower bound"),
    (SaysNoAndAnswers(), "why_not"),
    (SaysYesAndRefuses(), "why_not"),
    (TakesAnyDelta(), "not between 0 and 1"),
    (NoProtectionIsFinite(ZcdpAccountant()), "without protection"),
    (UnamplifiedDirection(Tight()), LOWER),
    (TooMuchAmplification(Rdp()), LOWER),
]


@pytest.mark.parametrize(("wrong", "property"), WRONG, ids=[type(w).__name__ for w, _ in WRONG])
def test_wrong_accountants_are_caught(wrong, property):
    with pytest.raises(ContractBroken, match=property) as caught:
        check_accountant(wrong)
    assert wrong.name in caught.value.setting


def test_the_unchanged_accountant_passes():
    check_accountant(Wrapped())


def test_your_own_events_are_held_to_the_certified_lower_bound():
    event = ev.Repeated(ev.SampledWithReplacement(200, 10, ev.Gaussian(3.0)), 5)
    replace_one = Adjacency.REPLACE_ONE
    lower = Tight().curve(event, replace_one).epsilon_lower(1e-5)

    class TooLittle(Wrapped):
        def change(self, epsilon, asked, adjacency, delta):
            return epsilon / 20 if asked == event else epsilon

    assert lower
    with pytest.raises(ContractBroken, match="tight accountant certifies"):
        check_accountant(TooLittle(Tight()), settings=[(event, replace_one)])


@pytest.mark.parametrize(("noise", "count"), [(4.0, 1), (4.0, 20), (0.8, 3)])
def test_the_reference_is_close_to_the_exact_curve(noise, count):
    """What an attacker reaches on the grid is a little less than what is exact, never more."""
    exact = lower_bounds.gaussian_shift(noise, [(1.0, 1.0)])
    composed = lower_bounds.composed([(exact, count)])
    for epsilon in (0.2, 1.0, 2.0):
        due = lower_bounds.gaussian_delta(math.sqrt(count) / noise, epsilon)
        assert due * 0.95 - 1e-9 <= composed.delta(epsilon) <= due
