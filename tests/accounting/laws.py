"""The laws of accounting for one random setting; in a file of its own, so that other processes can
check them too.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from random_settings import mixture, one_step, setting

from dpfy import accounting
from dpfy.accounting.flatten import leaves
from dpfy.core import events as ev

ROUND = 1e-9
"""What rounding may change; nothing else is forgiven."""


def check(seed: int) -> None:
    s = setting(seed)
    curve = accounting.curve(s.event(), adjacency=s.adjacency)
    upper = curve.epsilon(s.delta)
    assert upper >= 0, s
    assert math.isfinite(upper) or "black box" in s.kind, (
        s
    )  # a box that fails with probability delta has no epsilon below it
    event, delta = s.costlier()
    assert accounting.epsilon(event, delta, adjacency=s.adjacency) >= upper * (1 - ROUND) - 1e-12, s
    if seed % 4 in (1, 3):
        lower = curve.epsilon_lower(s.delta)
        assert lower is not None, s
        assert 0 <= lower <= upper, s
        if seed % 10 == 1:
            for name in ("rdp", "zcdp", "gdp"):
                if accounting.accountant(name).why_not(s.event(), s.adjacency) is None:
                    other = accounting.epsilon(
                        s.event(), s.delta, adjacency=s.adjacency, accountant=name
                    )
                    assert other >= lower * (1 - ROUND), (name, s)
    elif seed % 4 == 0:
        leaf = s.make(s.noise)
        once = accounting.epsilon(leaf, s.delta, adjacency=s.adjacency)
        assert once <= upper * (1 + ROUND) + 1e-12, s
        truth = one_step(leaf, s.adjacency, once)
        assert truth is None or math.isinf(once) or truth <= s.delta * (1 + 1e-7), s


PROFILED = 5e-5
"""How closely a profile is read at its points: a change that costs less than this may be lost
between them.
"""


def check_mixture(seed: int) -> None:
    s = mixture(seed)
    curve = accounting.curve(s.event(), adjacency=s.adjacency)
    upper, lower = curve.epsilon(s.delta), curve.epsilon_lower(s.delta)
    assert upper >= 0, s
    assert lower is None or 0 <= lower <= upper, s
    if s.event() != s.costlier()[0] or s.axis == "delta":
        event, delta = s.costlier()
        assert accounting.epsilon(event, delta, adjacency=s.adjacency) >= upper * (1 - PROFILED), s
    for part, count in leaves(s.make(s.noise)):
        alone = accounting.curve(ev.Repeated(part, count), adjacency=s.adjacency).epsilon_lower(
            s.delta
        )
        assert alone is None or alone <= upper, (part, s)
    if accounting.accountant("rdp").why_not(s.event(), s.adjacency) is None:
        other = accounting.epsilon(s.event(), s.delta, adjacency=s.adjacency, accountant="rdp")
        assert upper <= other * (1 + 4 * PROFILED), s
        assert lower is None or other >= lower * (1 - ROUND), s
    assert math.isinf(upper) or curve.delta(upper) <= s.delta * 1.01, s


LAWS = {"settings": (check, 100), "mixtures": (check_mixture, 8)}
"""Each law and how many random settings make a chunk."""


def check_chunk(law: str, chunk: int) -> None:
    """One chunk of settings; what does not hold is told with its seed."""
    holds, size = LAWS[law]
    for seed in range(chunk * size, (chunk + 1) * size):
        try:
            holds(seed)
        except (
            AssertionError
        ) as problem:  # a setting holds functions, which cannot be sent to another process
            raise AssertionError(f"{law}, seed {seed}: {problem}") from None
