"""An evolution as the self-test of the audit sees it: its steps one by one, each of which a mistake
may replace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from dpfy.accounting.filters import squares
from dpfy.core.ledger_rules import rehearsal
from dpfy.core.randomness import Randomness
from dpfy.synthetic.evolution import run
from dpfy.synthetic.evolution.claim import Evolution
from dpfy.synthetic.evolution.run import Array, SamplePopulation, Whole, evolved, flat

CLAIM, SEED = Evolution(2, 12, 3, 1.5), 29
Crowd = tuple[Array, Whole]


class Dots:
    """A public generator: points in a square, and small steps from a point."""

    def random(self, count: int, label: int, rng: np.random.Generator) -> Array:
        """Anywhere."""
        return rng.uniform(-5, 5, (count, 2))

    def vary(self, samples: Array, label: int, rng: np.random.Generator) -> Array:
        """A small step from each."""
        found: Array = samples + rng.normal(0, 0.4, samples.shape)
        return found


def _first(crowd: Crowd, secret: Randomness) -> SamplePopulation:
    return SamplePopulation.first(CLAIM, Dots(), flat, secret)


@dataclass(frozen=True)
class EvolutionSteps:
    """The steps of an evolution. Only `voters` has a use for the records; that `first` is given
    them is for mistakes.
    """

    first: Callable[[Crowd, Randomness], SamplePopulation] = _first
    voters: Callable[[SamplePopulation, Array], Array] = SamplePopulation.vectors
    votes: Callable[[Array, Whole, Array], Whole] = run.votes_of
    noise: Callable[[Evolution], float] = run.noise_of_round
    heard: Callable[[Array, float, Whole], Array] = run.heard_of

    def samples(self, crowd: Crowd) -> Any:
        """All that is published."""
        secret = Randomness.for_tests(SEED)
        population = self.first(crowd, secret)
        permit = rehearsal(CLAIM.event, CLAIM.releases, CLAIM.name, CLAIM.adjacency)
        voters = self.voters(population, crowd[0])
        with mock.patch.multiple(
            run, votes_of=self.votes, noise_of_round=self.noise, heard_of=self.heard
        ):
            last, votes = evolved(population, voters, crowd[1], permit, secret)
        return [held.tolist() for held in last.samples], votes.tolist()


def _crowd(count: int, seed: int) -> Crowd:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    return np.where(labels[:, None] == 0, [3.0, 3.0], [-3.0, 1.0]) + rng.normal(
        0, 0.3, (count, 2)
    ), labels


def _with(crowd: Crowd, point: list[float], label: int) -> Crowd:
    return np.concatenate([crowd[0], [point]]), np.append(crowd[1], label)


def neighbours() -> Iterator[tuple[str, Crowd, Crowd, bool]]:
    """Two crowds each: with one record more, far away or in the middle; and two that have nothing
    in common (True).
    """
    some = _crowd(40, 0)
    yield "one record far away", some, _with(some, [1e6, -1e6], 1), False
    yield "one record in the middle", some, _with(some, [0.0, 0.0], 0), False
    yield "other records", some, _crowd(17, 1), True


def runs(
    change: Callable[[Any], Any],
) -> Iterator[tuple[str, Callable[[Crowd], Any], Crowd, Crowd, bool]]:
    """For the audit: an evolution with the steps that `change` makes of the real ones, and two
    crowds to run it on.
    """
    steps: EvolutionSteps = change(EvolutionSteps())
    for name, one, other, strangers in neighbours():
        yield name, steps.samples, one, other, strangers


def spent(change: Callable[[Any], Any]) -> tuple[float, float]:
    """What all rounds take of the sum of squares, by the noise that they have, and what the claim
    allows.
    """
    steps: EvolutionSteps = change(EvolutionSteps())
    return float(CLAIM.rounds * squares(steps.noise(CLAIM))), float(squares(CLAIM.noise_multiplier))
