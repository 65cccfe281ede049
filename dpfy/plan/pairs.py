"""The table of proven (participation, strategy) pairs: what a run with them releases, as an event, and by which theorem.

A pair that is not here has no proof here: it is an error that names the nearest pair that has one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dpfy.core import events, participation
from dpfy.core.errors import Unsupported
from dpfy.noise import strategy


@dataclass(frozen=True)
class Pair:
    """One proven pair: the event of the whole run given the noise multiplier and the number of steps, and the proof."""

    event: Callable[[float, participation.Participation, int], events.Event]
    theorem: str


def _poisson_identity(noise_multiplier: float, pattern: participation.Participation, steps: int) -> events.Event:
    if not isinstance(pattern, participation.Poisson):
        raise TypeError(f"expected Poisson participation, got {pattern!r}")
    one = events.Gaussian(noise_multiplier)
    step = one if pattern.rate == 1 else events.PoissonSampled(pattern.rate, one)
    return events.Repeated(step, steps)


PAIRS: dict[tuple[type, type], Pair] = {
    (participation.Poisson, strategy.Identity): Pair(
        _poisson_identity,
        "Each step is a Poisson-subsampled Gaussian mechanism of sensitivity one clip norm; steps compose adaptively "
        "(Abadi et al. 2016; Mironov, Talwar & Zhang 2019).",
    ),
}


def find(pattern: participation.Participation, noise: strategy.Strategy) -> Pair:
    """The proof for this pair, or an error that names what is proven."""
    pair = PAIRS.get((type(pattern), type(noise)))
    if pair is None:
        near = [f"{p.__name__} with {s.__name__}" for p, s in PAIRS if p is type(pattern) or s is type(noise)]
        known = near or [f"{p.__name__} with {s.__name__}" for p, s in PAIRS]
        raise Unsupported(
            f"{type(pattern).__name__} participation with {type(noise).__name__} noise", f"proven: {', '.join(known)}"
        )
    return pair


def event(noise_multiplier: float, pattern: participation.Participation, noise: strategy.Strategy, steps: int) -> events.Event:
    """What a run of `steps` releases. Noise zero is a release without protection, never an infinite multiplier in disguise."""
    pair = find(pattern, noise)
    return events.NotPrivate() if noise_multiplier == 0 else pair.event(noise_multiplier, pattern, steps)
