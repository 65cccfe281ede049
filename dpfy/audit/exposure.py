"""Extraction from language models: the secret sharer's exposure, and the epsilon that repeated low
ranks certify.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from dpfy.audit import intervals
from dpfy.audit.verdict import LowerBound
from dpfy.core import check
from dpfy.core.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def ranks(losses: ArrayLike, chosen: ArrayLike) -> NDArray[np.int64]:
    """The rank (1 is best) of each chosen secret's loss among its candidates; [secrets,
    candidates]. Ties count against the attacker.
    """
    values, picks = np.asarray(losses, dtype=np.float64), np.asarray(chosen, dtype=np.int64)
    if values.ndim != 2 or len(picks) != len(values):
        raise InvalidInput(
            "losses", values.shape, "must be [secrets, candidates], one chosen candidate a secret"
        )
    own = values[np.arange(len(values)), picks]
    return np.asarray((values <= own[:, None]).sum(1))


def exposure(rank: ArrayLike, candidates: int) -> NDArray[np.float64]:
    """log2 of candidates over rank (Carlini et al. 2019): 0 or 1 is no memory, log2(candidates) is
    full extraction.
    """
    return np.asarray(
        math.log2(check.integer("candidates", candidates))
        - np.log2(np.asarray(rank, dtype=np.float64))
    )


def from_ranks(
    rank: ArrayLike, candidates: int, *, most: int = 1, delta: float, confidence: float = 0.95
) -> LowerBound:
    """A lower bound on epsilon for replace-one: a secret drawn uniformly has rank at most k with
    probability at most e^eps k/n + delta.

    `most` (k) must be fixed in advance. Secrets in one run share it, so each must be its own unit
    and the ranks independent.
    """
    found = np.asarray(rank)
    hits = int((found <= check.integer("most", most)).sum())
    limit = (
        intervals.lower(hits, len(found), 1 - check.inside_unit("confidence", confidence)) - delta
    )
    base = most / check.integer("candidates", candidates)
    epsilon = max(0.0, math.log(limit / base)) if limit > 0 else 0.0
    assumptions = (
        "each secret was drawn uniformly from its candidates, after the candidates were fixed",
        "ranks of different secrets are independent",
        "neighbours differ in one secret replaced by another (replace-one)",
    )
    detail = {
        "hits": float(hits),
        "most": float(most),
        "mean_exposure": float(exposure(found, candidates).mean()),
    }
    return LowerBound(epsilon, delta, confidence, "exposure", len(found), assumptions, detail)
