"""What a model learnt by heart: verbatim copies and near duplicates among its texts, and the
exposure of secrets that were planted.

All of it reads the private texts without noise, and is as private as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from dpfy.audit import bounds
from dpfy.audit.verdict import LowerBound
from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.synthetic.evaluate import NOT_PRIVATE
from dpfy.synthetic.text.tokens import ByteTokens, Tokens, losses_of, rows_of

SHINGLE = 5
"""Characters of the pieces by which texts are compared as a whole."""
NEAR = 0.6
"""Texts that share this part of their pieces (Jaccard) are near duplicates."""


@dataclass(frozen=True)
class Copies:
    """What synthetic texts share with others. `private` says in words what may be done with these
    figures.

    `copied` is the share of synthetic texts that hold a stretch of `run` characters of a training
    text; `longest` the longest such stretch, in characters; `near` the share of near duplicates of
    a training text, and `nearest` the largest likeness. `elsewhere` is `copied` for texts that the
    model never saw: what language does by itself.
    """

    private: str
    run: int
    copied: float
    longest: int
    near: float
    nearest: float
    elsewhere: float | None

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return dict(self.__dict__)


def copies(
    synthetic: Sequence[str],
    training: Sequence[str],
    *,
    holdout: Sequence[str] | None = None,
    run: int = 40,
) -> Copies:
    """How much of the training texts stands in the synthetic ones, letter by letter or nearly so.

    `holdout` are texts of the same kind that the model was not trained on. What comes back is NOT
    private.
    """
    check.integer("run", run, least=2)
    index = _index(training)
    likeness = [_likeness(text, index) for text in synthetic]
    return Copies(
        NOT_PRIVATE,
        run,
        _copied(synthetic, training, run),
        _longest(synthetic, training),
        float(np.mean([value >= NEAR for value in likeness])) if likeness else 0.0,
        max(likeness, default=0.0),
        None if holdout is None else _copied(synthetic, holdout, run),
    )


def _stretches(texts: Iterable[str], run: int) -> set[str]:
    return {text[start : start + run] for text in texts for start in range(len(text) - run + 1)}


def _copied(synthetic: Sequence[str], others: Sequence[str], run: int) -> float:
    """The share of synthetic texts with a stretch of so many characters of the others."""
    known = _stretches(others, run)
    return (
        float(np.mean([not known.isdisjoint(_stretches([text], run)) for text in synthetic]))
        if synthetic
        else 0.0
    )


def _longest(synthetic: Sequence[str], training: Sequence[str]) -> int:
    """The longest stretch that any synthetic text shares with a training text: by halving, since
    parts of copies are copies.
    """
    low, high = 0, max((len(text) for text in synthetic), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if _stretches(synthetic, middle).isdisjoint(_stretches(training, middle)):
            high = middle - 1
        else:
            low = middle
    return low


def _index(training: Sequence[str]) -> tuple[dict[str, list[int]], list[int]]:
    """Which training texts hold a piece, and how many pieces each has."""
    places: dict[str, list[int]] = defaultdict(list)
    sizes = []
    for number, text in enumerate(training):
        pieces = _stretches([text], SHINGLE)
        sizes.append(len(pieces))
        for piece in pieces:
            places[piece].append(number)
    return places, sizes


def _likeness(text: str, index: tuple[dict[str, list[int]], list[int]]) -> float:
    """The largest share of pieces that a text and one training text have in common, of all that
    either has.
    """
    places, sizes = index
    own = _stretches([text], SHINGLE)
    shared: dict[int, int] = defaultdict(int)
    for piece in own:
        for number in places.get(piece, ()):
            shared[number] += 1
    return max(
        (count / (len(own) + sizes[number] - count) for number, count in shared.items()),
        default=0.0,
    )


@dataclass(frozen=True)
class Canaries:
    """Secrets to be planted among training texts, each drawn from `candidates` that were all as
    likely; `chosen` says which.
    """

    candidates: tuple[tuple[str, ...], ...]
    chosen: tuple[int, ...]

    @classmethod
    def made(cls, count: int, seed: int, candidates: int = 100) -> Canaries:
        """So many secrets: the number of somebody whose name is made up, out of so many numbers."""
        check.integer("count", count, most=10_000)
        check.integer("candidates", candidates, least=2, most=10_000)
        rng = np.random.default_rng(check.integer("seed", seed, least=0))
        width = len(str(candidates - 1))
        names = [
            "".join(
                rng.choice(list("bdfgklmnprstvz")) + rng.choice(list("aeiou")) for _ in range(4)
            )
            for _ in range(count)
        ]
        held = tuple(
            tuple(f"the number of {name} is {k:0{width}d}" for k in range(candidates))
            for name in names
        )
        return cls(held, tuple(rng.integers(0, candidates, count).tolist()))

    @property
    def texts(self) -> list[str]:
        """What is planted: one text for each secret."""
        return [options[k] for options, k in zip(self.candidates, self.chosen, strict=True)]

    @torch.no_grad()
    def found(
        self, model: nn.Module, *, length: int, delta: float, tokens: Tokens | None = None
    ) -> LowerBound:
        """A lower bound on epsilon from how often a model that was trained with the secrets ranks
        one of them first.

        NOT private: it reads the secrets. `detail` holds the mean exposure, in bits (Carlini et al.
        2019).
        """
        known, losses = tokens or ByteTokens(), []
        if (longest := max(len(known.encode(text)) for text in self.texts)) > length:
            raise InvalidInput(
                "length", length, f"must be at least {longest} tokens, to hold every secret whole"
            )
        device, was = next(model.parameters()).device, model.training
        model.eval()
        for options in self.candidates:
            rows = rows_of(options, known, length).to(device)
            losses.append(
                torch.cat([losses_of(model, part, known.end).cpu() for part in rows.split(256)])
                .double()
                .numpy()
            )
        model.train(was)
        ranks = bounds.ranks(np.stack(losses), self.chosen)
        return bounds.from_ranks(ranks, len(self.candidates[0]), delta=delta)
