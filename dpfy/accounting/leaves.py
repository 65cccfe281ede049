"""The leaves of an event, within the limits of floating point: every accountant reads events through here."""

from __future__ import annotations

from dpfy.core import check
from dpfy.core import events as ev
from dpfy.core.errors import InvalidInput
from dpfy.core.events import Event, flatten

MOST_COUNT = 10**15
"""Releases of one kind, records and the like."""
LEAST_NOISE, MOST_NOISE = check.NOISE
"""Noise per sensitivity: less means an epsilon of tens of millions, more one that no number here can tell from zero."""
LEAST_DELTA = 1e-200
"""Deltas below this are refused: their parts underflow."""


def leaves(event: Event) -> list[tuple[Event, int]]:
    """`event` as (leaf, count). Guarantees: every count, noise and size can be computed with; others raise `InvalidInput`."""
    found = flatten(event)
    for leaf, count in found:
        if count > MOST_COUNT:
            raise InvalidInput("steps", count, f"must be at most {MOST_COUNT:.0e} in all")
        _within(leaf)
    return found


def delta_within(delta: float) -> float:
    """`delta`, refused where its parts would underflow."""
    if delta < LEAST_DELTA:
        raise InvalidInput("delta", delta, f"must be at least {LEAST_DELTA:g}")
    return delta


def _within(leaf: Event) -> None:
    """Refuse numbers that overflow or underflow when they are squared or divided by."""
    for field in ("noise_multiplier", "noise_parameter", "sigma", "standard_deviation"):
        value = getattr(leaf, field, None)
        if value is not None and not isinstance(leaf, ev.RandomizedResponse) and not LEAST_NOISE <= value <= MOST_NOISE:
            raise InvalidInput(field, value, f"must lie between {LEAST_NOISE:g} and {MOST_NOISE:g}")
    if isinstance(leaf, ev.RandomizedResponse) and 0 < leaf.noise_parameter < 1e-15:
        raise InvalidInput("noise_parameter", leaf.noise_parameter, "must be 0 or at least 1e-15")
    if isinstance(leaf, ev.GaussianMixture) and max(leaf.sensitivities) / leaf.standard_deviation > 1 / LEAST_NOISE:
        raise InvalidInput("sensitivities", max(leaf.sensitivities), f"must be at most {1 / LEAST_NOISE:g} times the noise")
    if isinstance(leaf, (ev.EpsilonDelta, ev.Zcdp)):
        for value in vars(leaf).values():
            if value > MOST_NOISE:
                raise InvalidInput(type(leaf).__name__, value, f"must be at most {MOST_NOISE:g}")
    for field in ("source_size", "sample_size", "most", "buckets", "sensitivity"):
        value = getattr(leaf, field, None)
        if value is not None and value > MOST_COUNT:
            raise InvalidInput(field, value, f"must be at most {MOST_COUNT:.0e}")
    if isinstance(leaf, (ev.PoissonSampled, ev.SampledWithoutReplacement, ev.SampledWithReplacement, ev.RepeatAndSelect)):
        leaves(leaf.event)
