"""The contract of accounting, over random settings of every event and sampling in the table.

More steps, less delta and less noise never cost less; an upper bound is never below a lower one, nor below what the two distributions
of one step give when they are integrated directly; and no accountant is below the certified lower bound.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from random_settings import KINDS, mixture, one_step, setting

from dpfy import accounting
from dpfy.accounting.leaves import leaves
from dpfy.accounting.rows import TABLE
from dpfy.accounting.rows.row import no_pair
from dpfy.core import events as ev

CHUNK = 100
ROUND = 1e-9
"""What rounding may change; nothing else is forgiven."""


def _check(seed: int) -> None:
    s = setting(seed)
    curve = accounting.curve(s.event(), adjacency=s.adjacency)
    upper = curve.epsilon(s.delta)
    assert upper >= 0, s
    assert math.isfinite(upper) or "black box" in s.kind, s  # a box that fails with probability delta has no epsilon below it
    event, delta = s.costlier()
    assert accounting.epsilon(event, delta, adjacency=s.adjacency) >= upper * (1 - ROUND) - 1e-12, s
    if seed % 4 in (1, 3):
        lower = curve.epsilon_lower(s.delta)
        assert lower is not None, s
        assert 0 <= lower <= upper, s
        if seed % 10 == 1:
            for name in ("rdp", "zcdp", "gdp"):
                if accounting.accountant(name).why_not(s.event(), s.adjacency) is None:
                    other = accounting.epsilon(s.event(), s.delta, adjacency=s.adjacency, accountant=name)
                    assert other >= lower * (1 - ROUND), (name, s)
    elif seed % 4 == 0:
        leaf = s.make(s.noise)
        once = accounting.epsilon(leaf, s.delta, adjacency=s.adjacency)
        assert once <= upper * (1 + ROUND) + 1e-12, s
        truth = one_step(leaf, s.adjacency, once)
        assert truth is None or math.isinf(once) or truth <= s.delta * (1 + 1e-7), s


@pytest.mark.parametrize("chunk", range(20))
def test_random_settings_obey_the_laws(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        _check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(20, 220))
def test_many_random_settings_obey_the_laws(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        _check(seed)


PROFILED = 5e-5
"""How closely a profile is read at its points: a change that costs less than this may be lost between them."""


def _check_mixture(seed: int) -> None:
    s = mixture(seed)
    curve = accounting.curve(s.event(), adjacency=s.adjacency)
    upper, lower = curve.epsilon(s.delta), curve.epsilon_lower(s.delta)
    assert upper >= 0, s
    assert lower is None or 0 <= lower <= upper, s
    if s.event() != s.costlier()[0] or s.axis == "delta":
        event, delta = s.costlier()
        assert accounting.epsilon(event, delta, adjacency=s.adjacency) >= upper * (1 - PROFILED), s
    for part, count in leaves(s.make(s.noise)):
        alone = accounting.curve(ev.Repeated(part, count), adjacency=s.adjacency).epsilon_lower(s.delta)
        assert alone is None or alone <= upper, (part, s)
    if accounting.accountant("rdp").why_not(s.event(), s.adjacency) is None:
        other = accounting.epsilon(s.event(), s.delta, adjacency=s.adjacency, accountant="rdp")
        assert upper <= other * (1 + 2 * PROFILED), s
        assert lower is None or other >= lower * (1 - ROUND), s
    assert math.isinf(upper) or curve.delta(upper) <= s.delta * 1.01, s


@pytest.mark.parametrize("chunk", range(2))
def test_random_mixtures_obey_the_laws(chunk: int) -> None:
    for seed in range(chunk * 8, (chunk + 1) * 8):
        _check_mixture(seed)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(2, 42))
def test_many_random_mixtures_obey_the_laws(chunk: int) -> None:
    for seed in range(chunk * 8, (chunk + 1) * 8):
        _check_mixture(seed)


def test_every_event_with_a_pair_is_drawn() -> None:
    """A new event with a pair must come with settings here; the laws of every other one are in `test_rows.py`."""
    drawn = {type(leaf) for name in KINDS for leaf in _nodes(setting(0, name).make(1.0))}
    assert drawn == {kind for kind, row in TABLE.items() if row.pair is not no_pair}


def _nodes(event: ev.Event) -> list[ev.Event]:
    inner = getattr(event, "event", None)
    return [event, *(_nodes(inner) if inner is not None else [])]
