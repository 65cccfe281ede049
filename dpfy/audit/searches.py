"""Checks of searches for settings: what leaves one, and what its trials may know of each other.

The statistical ones have a false-alarm rate below 1e-6 each.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dpfy.audit.bench import Bench, Bug
from dpfy.audit.people import log_ratio

SPREAD = 5.0


def canary(bench: Bench, bug: Bug) -> str | None:
    """Searches that select the trial which memorises a canary tell no more of it than the whole
    search is billed for.
    """
    (epsilon, one), (_, other) = (bench.selected(bug, canary=there) for there in (True, False))
    if (found := log_ratio(one, other)) <= epsilon:
        return None
    return (
        f"what leaves the search tells of a canary with epsilon at least {found:.3f}, claimed "
        f"{epsilon:.3f}"
    )


def scores(bench: Bench, bug: Bug) -> str | None:
    """A score on private records has the noise that is billed: it is shown with the selected
    trial.
    """
    sigma, used, exact = bench.scores(bug)
    off = (used - exact) / sigma
    spread = math.sqrt(float(np.mean(off**2)))
    limit = SPREAD / math.sqrt(2 * off.size)
    return (
        None
        if abs(spread - 1) <= limit
        else f"scores have {spread:.3f} of the noise that is billed"
    )


def parts(bench: Bench, bug: Bug) -> str | None:
    """Nobody is in training and in validation, where that is what is billed."""
    trained, scored = bench.parts(bug)
    both = trained & scored
    return (
        f"{len(both)} of {len(scored)} validation records were trained on"
        if both or not scored
        else None
    )


def proposals(bench: Bench, bug: Bug) -> str | None:
    """With a random number of trials, settings are the same whatever the scores are."""
    good, bad = (bench.proposals(bug, score=score) for score in (1.0, 0.0))
    return (
        None
        if good == bad
        else "the settings of later trials follow from the scores of earlier ones"
    )


CHECKS: dict[str, Callable[[Bench, Bug], str | None]] = {
    "search canary": canary,
    "search scores": scores,
    "search parts": parts,
    "search proposals": proposals,
}
