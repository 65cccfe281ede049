"""Priors over a record's classes, and among how many of the likeliest a label is best randomised
(Ghazi et al. 2021, algorithm 2).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dpfy.core.errors import InvalidInput

Reals = NDArray[np.float64]


def uniform(records: int, outcomes: int) -> Reals:
    """No prior: every outcome is as likely as any other."""
    return np.full((records, outcomes), 1 / outcomes)


def ranked(prior: Reals, epsilon: float) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """For each row of `prior` its outcomes, the likeliest first, and the number k of them among
    which a label is randomised.

    k maximises the chance that the answer is the label, exp(epsilon) / (exp(epsilon) + k - 1) times
    the prior mass of the first k; the least k where several do. No epsilon-private answer has a
    larger chance (tested against linear programs).
    """
    held = np.asarray(prior, dtype=np.float64)
    if held.ndim != 2 or not np.isfinite(held).all() or (held < 0).any():
        raise InvalidInput(
            "prior", f"{held.ndim} axes", "must be a table of finite chances, none below 0"
        )
    order = np.argsort(-held, axis=1, kind="stable")
    mass = np.cumsum(np.take_along_axis(held, order, axis=1), axis=1)
    sizes = 1 + np.argmax(mass * kept(epsilon, held.shape[1]), axis=1)
    return order.astype(np.int16), sizes.astype(np.int16)


def kept(epsilon: float, outcomes: int) -> Reals:
    """The chance that randomized response among 1, 2, ... `outcomes` of them keeps a label."""
    shrunk = math.exp(-min(epsilon, 700.0))
    return np.asarray(1 / (1 + np.arange(outcomes) * shrunk))


def success(prior: Reals, epsilon: float) -> float:
    """The chance, under one row of a prior, that the answer is the label."""
    order, sizes = ranked(np.atleast_2d(prior), epsilon)
    held = np.ravel(prior)[order[0, : sizes[0]]]
    return float(held.sum() * kept(epsilon, len(np.ravel(prior)))[sizes[0] - 1])
