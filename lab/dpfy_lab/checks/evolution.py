"""Checks of private evolution, by record and replay: nothing but noisy votes tells two sets of
records apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.accounting.filters import least_noise, squares
from dpfy.core.unit import Adjacency
from dpfy.runs.run import Run
from dpfy.synthetic import evolution as run
from dpfy_lab.checks.published import in_folder
from dpfy_lab.checks.replayed import faults
from dpfy_lab.selftest.mistake import Found, check
from dpfy_lab.selftest.patch import patching

Array = NDArray[np.float64]
Crowd = tuple[Array, NDArray[np.int64]]
EPSILON, DELTA, SEED = 3.0, 1e-5, 29
OPTIONS: dict[str, Any] = {"classes": 2, "size": 12, "rounds": 3}


class Dots:
    """A public generator: points in a square, and small steps from a point."""

    def random(self, count: int, label: int, rng: np.random.Generator) -> Array:
        """Anywhere."""
        return rng.uniform(-5, 5, (count, 2))

    def vary(self, samples: Array, label: int, rng: np.random.Generator) -> Array:
        """A small step from each."""
        found: Array = samples + rng.normal(0, 0.4, samples.shape)
        return found


def evolved(crowd: Crowd) -> dict[str, bytes]:
    """All that is published of an evolution towards these records."""

    def make(place: Run) -> object:
        return run.evolve(crowd, Dots(), epsilon=EPSILON, delta=DELTA, run=place, **OPTIONS)

    return in_folder(make, SEED)


def _crowd(count: int, seed: int) -> Crowd:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    middles = np.where(labels[:, None] == 0, [3.0, 3.0], [-3.0, 1.0])
    return middles + rng.normal(0, 0.3, (count, 2)), labels


def _with(crowd: Crowd, point: list[float], label: int) -> Crowd:
    return np.concatenate([crowd[0], [point]]), np.append(crowd[1], label)


def pairs() -> Iterator[tuple[str, Crowd, Crowd, bool]]:
    """Two crowds each: with one record more, far away or in the middle, and with other records."""
    some = _crowd(40, 0)
    yield "one record far away", some, _with(some, [1e6, -1e6], 1), False
    yield "one record in the middle", some, _with(some, [0.0, 0.0], 0), False
    yield "other records", some, _crowd(17, 1), True


@check("evolutions")
def REPLAYED() -> Found:
    """With the same noisy votes the same samples are published, whatever the records are."""
    return faults(evolved, pairs())


@check("evolution charges")
def BILLED() -> Found:
    """All rounds together are within the claim, by the noise that each of them had."""
    spent = []

    def release(real: Any, self: Any, *given: Any) -> Any:
        spent.append(squares(self.noise_multiplier))
        return real(self, *given)

    with patching() as patch:
        patch.around("dpfy.mechanisms.additive.Additive.release", release)
        evolved(next(pairs())[1])
    claimed = squares(least_noise(EPSILON, DELTA, 0, 0.0, Adjacency.ADD_OR_REMOVE_ONE))
    share = float(sum(spent) / claimed)
    return None if share <= 1 else f"votes take {share:.2f} times what is claimed"


CHECKS = (REPLAYED, BILLED)
