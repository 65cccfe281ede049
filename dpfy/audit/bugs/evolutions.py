"""Mistakes of private evolution: records that vote more than once, go around the noise, or are not
billed for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dpfy.audit.bench import Bug

REPLAYED, BILLED = "evolutions", "evolution bills"


def two_votes(real: Any) -> Any:
    """A record votes twice for the sample nearest to it."""

    def votes(voters: Any, labels: Any, places: Any) -> Any:
        return real.votes(
            np.concatenate([voters, voters]), np.concatenate([labels, labels]), places
        )

    return replace(real, votes=votes)


def votes_in_every_class(real: Any) -> Any:
    """A record votes among the samples of every class."""

    def votes(voters: Any, labels: Any, places: Any) -> Any:
        return sum(
            real.votes(voters, np.full_like(labels, label), places) for label in range(len(places))
        )

    return replace(real, votes=votes)


def records_among_the_samples(real: Any) -> Any:
    """The first samples are private records, which the generator varies."""

    def first(crowd: Any, secret: Any) -> Any:
        made = real.first(crowd, secret)
        held, size = np.resize(crowd[0], (made.claim.size, 2)), made.claim.size
        return replace(made, samples=tuple(held[:size] for _ in made.samples))

    return replace(real, first=first)


def reach_of_the_records(real: Any) -> Any:
    """Embeddings are scaled by the longest of the records."""

    def first(crowd: Any, secret: Any) -> Any:
        return replace(
            real.first(crowd, secret), reach=float(np.sqrt((crowd[0] ** 2).sum(axis=1)).max())
        )

    return replace(real, first=first)


def heard_by_their_counts(real: Any) -> Any:
    """Samples that nobody voted for are dropped by their exact counts."""

    def heard(noisy: Any, noise: float, counts: Any) -> Any:
        return np.where(counts > 0, noisy, 0.0)

    return replace(real, heard=heard)


def every_round_for_one(real: Any) -> Any:
    """Every round has the noise of a single one."""
    return replace(real, noise=lambda claim: claim.noise_multiplier)


BUGS = (
    Bug("evolution-two-votes", "a record votes twice in a round", REPLAYED, evolution=two_votes),
    Bug(
        "evolution-classes",
        "a record votes in every class",
        REPLAYED,
        evolution=votes_in_every_class,
    ),
    Bug(
        "evolution-records",
        "private records are among the first samples",
        REPLAYED,
        evolution=records_among_the_samples,
    ),
    Bug(
        "evolution-reach",
        "embeddings are scaled by the longest record",
        REPLAYED,
        evolution=reach_of_the_records,
    ),
    Bug(
        "evolution-heard",
        "which votes are heard is decided by exact counts",
        REPLAYED,
        evolution=heard_by_their_counts,
    ),
    Bug(
        "evolution-unbilled",
        "every round has the noise of a single one",
        BILLED,
        evolution=every_round_for_one,
    ),
)
