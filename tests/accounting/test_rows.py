"""The contract of the table of events: every row obeys the laws of accounting, by every accountant
that knows it.

More repetitions (1 to 1e6) and less delta (1e-2 to 1e-12) never cost less, and no upper bound lies
below the certified lower bound of an event that is dominated.
"""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from table_events import ADD, EVENTS, REPLACE, ZERO, dominated, name_of

from dpfy import accounting
from dpfy.accounting.dp_accounting_adapter import from_peer, to_peer
from dpfy.accounting.rules import TABLE, amplified, halve_noise, rule_of, unsampled, words
from dpfy.core import events as ev
from dpfy.core.errors import DpfyError, Unsupported
from dpfy.core.unit import Adjacency

ROUND = 1e-9
COUNTS = (1, 3, 40, 10**3, 10**6)
DELTAS = (1e-2, 1e-4, 1e-7, 1e-12)
FAST = ("tight", "rdp", "zcdp", "gdp")
SLOW = ("basic", "advanced", "pld", "monte-carlo")


def _adjacency(event: ev.Event, accountant: str) -> Adjacency | None:
    """The first adjacency under which the accountant knows the event."""
    return next(
        (
            a
            for a in (ADD, REPLACE, ZERO)
            if accounting.accountant(accountant).why_not(event, a) is None
        ),
        None,
    )


def _epsilon(event: ev.Event, delta: float, adjacency: Adjacency, accountant: str) -> float | None:
    """None where the accountant refuses this count or delta."""
    try:
        return accounting.epsilon(event, delta, adjacency=adjacency, accountant=accountant)
    except (Unsupported, MemoryError):
        return None


def _grows(values: list[float | None]) -> bool:
    found = [v for v in values if v is not None]
    return bool(found) and all(b >= a * (1 - ROUND) - 1e-12 for a, b in pairwise(found))


def _laws(event: ev.Event, accountant: str) -> None:
    adjacency = _adjacency(event, accountant)
    if adjacency is None:
        return
    by_count = [
        _epsilon(ev.Repeated(event, count), 1e-6, adjacency, accountant) for count in COUNTS
    ]
    assert _grows(by_count), by_count
    several = event if accountant == "monte-carlo" else ev.Repeated(event, 3)
    by_delta = [_epsilon(several, delta, adjacency, accountant) for delta in DELTAS]
    assert _grows(by_delta), by_delta
    assert all(v is None or v >= 0 for v in by_count + by_delta)


@pytest.mark.parametrize("event", EVENTS, ids=name_of)
def test_more_repetitions_and_less_delta_never_cost_less(event: ev.Event) -> None:
    for accountant in FAST:
        _laws(event, accountant)


@pytest.mark.slow
@pytest.mark.parametrize("accountant", SLOW)
@pytest.mark.parametrize("event", EVENTS, ids=name_of)
def test_the_same_by_slow_accountants(event: ev.Event, accountant: str) -> None:
    _laws(event, accountant)


PAIRS = dominated()


def _above(
    more: ev.Event, less: ev.Event, adjacency: Adjacency, count: int, accountants: tuple[str, ...]
) -> None:
    """Every upper bound on `more` lies above the certified lower bound on `less`."""
    if accounting.accountant("tight").why_not(less, adjacency) is not None:
        return
    lower = accounting.curve(ev.Repeated(less, count), adjacency=adjacency).epsilon_lower(1e-6)
    if lower is None:  # it may release nothing at all
        return
    for name in accountants:
        if accounting.accountant(name).why_not(ev.Repeated(more, count), adjacency) is None:
            upper = _epsilon(ev.Repeated(more, count), 1e-6, adjacency, name)
            assert upper is None or upper >= lower * (1 - ROUND), (name, upper, lower)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{name_of(p[0])}-above-{name_of(p[1])}")
def test_no_bound_is_below_the_lower_bound_of_what_it_dominates(
    pair: tuple[ev.Event, ev.Event, Adjacency],
) -> None:
    for count in (1, 50):
        _above(*pair, count, FAST)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{name_of(p[0])}-above-{name_of(p[1])}")
def test_the_same_by_slow_accountants_and_many_times(
    pair: tuple[ev.Event, ev.Event, Adjacency],
) -> None:
    for count in (1, 10, 2000, 10**5):
        _above(*pair, count, (*FAST, *SLOW))


def test_every_row_has_an_event_here_and_every_event_a_row() -> None:
    nodes = {type(node) for event in EVENTS for node in _nodes(event)}
    assert nodes == set(TABLE) == set(ev.CODEC.table.values()) == set(ev.Event.__args__)  # type: ignore[attr-defined]
    for kind, row in TABLE.items():
        assert row.kind is kind


def _nodes(event: ev.Event) -> list[ev.Event]:
    return [event, *(node for part in ev.inside(event) for node in _nodes(part))]


@pytest.mark.parametrize("event", EVENTS, ids=name_of)
def test_every_row_speaks_every_language_or_says_why_not(event: ev.Event) -> None:
    said = words(event)
    assert said
    assert "\n" not in said
    assert "a release of kind" not in said
    assert ev.decode(json.loads(json.dumps(ev.CODEC.encode(event)))) == event
    assert not amplified(unsampled(event))
    assert type(halve_noise(event)) is type(event)
    if all(rule_of(node).peer is not None for node in _nodes(event)):
        assert from_peer(to_peer(event)) == event
    else:
        with pytest.raises(Unsupported, match="dp-accounting"):
            to_peer(event)
    for adjacency in Adjacency:
        for name in accounting.TABLE:
            reason = accounting.accountant(name).why_not(event, adjacency)
            assert reason is None or ";" in reason or "proven for" in reason, reason
            if reason is not None:
                with pytest.raises(DpfyError):
                    accounting.curve(event, adjacency=adjacency, accountant=name)


@pytest.mark.parametrize("event", EVENTS, ids=name_of)
def test_a_pure_guarantee_is_that_of_the_curve_at_tiny_delta_or_refused(event: ev.Event) -> None:
    adjacency = _adjacency(event, "basic")
    if adjacency is None:
        return
    if not _pure(event):
        with pytest.raises(Unsupported, match="delta 0"):
            accounting.epsilon(event, 0.0, adjacency=adjacency, accountant="basic")
        return
    whole = accounting.epsilon(ev.Repeated(event, 3), 0.0, adjacency=adjacency, accountant="basic")
    one = accounting.epsilon(event, 0.0, adjacency=adjacency, accountant="basic")
    assert whole == pytest.approx(3 * one, rel=1e-12)
    if math.isfinite(whole):
        lower = accounting.curve(ev.Repeated(event, 3), adjacency=adjacency).epsilon_lower(1e-150)
        assert lower is not None
        assert lower <= whole * (1 + 1e-12)


def _pure(event: ev.Event) -> bool:
    """Whether everything in it has a pure guarantee (that of no protection is infinite)."""
    pure = (
        ev.Laplace,
        ev.DiscreteLaplace,
        ev.RandomizedResponse,
        ev.BoundedRange,
        ev.Shuffled,
        ev.RandomCheckIns,
        ev.NotPrivate,
        ev.MetricPrivacy,
        ev.Nothing,
    )
    parts = ev.inside(event)
    if parts:
        return not isinstance(event, ev.RepeatAndSelect) and all(map(_pure, parts))
    return isinstance(event, pure) or (isinstance(event, ev.EpsilonDelta) and event.delta == 0)
