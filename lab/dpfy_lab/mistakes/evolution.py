"""Mistakes of private evolution: records that vote more than once, go around the noise, or are not
billed for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dpfy_lab.checks.evolution import BILLED, REPLAYED
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch

RUN = "dpfy.synthetic.evolution"


@mistake("evolution-two-votes", "a record votes twice in a round", REPLAYED, f"{RUN}.count_votes")
def _(real: Any, voters: Any, labels: Any, places: Any) -> Any:
    return real(np.concatenate([voters, voters]), np.concatenate([labels, labels]), places)


@mistake("evolution-classes", "a record votes in every class", REPLAYED, f"{RUN}.count_votes")
def _(real: Any, voters: Any, labels: Any, places: Any) -> Any:
    return sum(real(voters, np.full_like(labels, label), places) for label in range(len(places)))


def first_from_the_records(change: Callable[[Any, Any], Any]) -> Callable[[Patch], None]:
    """First samples that `change` makes of the real ones and of the private records."""

    def apply(patch: Patch) -> None:
        held: list[Any] = []

        def read(real: Any, records: Any, classes: int) -> Any:
            found = real(records, classes)
            held[:] = [found[0]]
            return found

        def first(real: Any, *given: Any) -> Any:
            return change(real(*given), held[0])

        patch.around(f"{RUN}._read", read)
        patch.around(f"{RUN}.SamplePopulation.first", first)

    return apply


@first_from_the_records
def records_first(made: Any, records: Any) -> Any:
    """Private records, which the generator varies."""
    samples = np.resize(records, (made.claim.size, 2))
    return replace(made, samples=tuple(samples for _ in made.samples))


@first_from_the_records
def reach_of_the_records(made: Any, records: Any) -> Any:
    """Embeddings are scaled by the longest of the records."""
    return replace(made, reach=float(np.sqrt((records**2).sum(axis=1)).max()))


mistake("evolution-records", "private records are among the first samples", REPLAYED)(records_first)
mistake("evolution-reach", "embeddings are scaled by the longest record", REPLAYED)(
    reach_of_the_records
)


@mistake(
    "evolution-heard",
    "which votes are heard is decided by exact counts",
    REPLAYED,
    f"{RUN}.threshold_votes",
)
def _(real: Any, noisy: Any, noise: float, counts: Any) -> Any:
    return np.where(counts > 0, noisy, 0.0)


@mistake(
    "evolution-unbilled",
    "every round has the noise of a single one",
    BILLED,
    f"{RUN}.noise_of_round",
)
def _(real: Any, claim: Any) -> float:
    return float(claim.noise_multiplier)
