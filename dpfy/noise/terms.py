"""The noise of one step as a sum over draws and over what was released before: what exact noise
asks of a strategy.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpfy.core.errors import Unsupported
from dpfy.noise.schedule import Schedule
from dpfy.noise.strategy import Identity, Recurrence, Recurrent, Strategy
from dpfy.noise.tree import Tree

Term = tuple[float, int]
"""A weight, and the address of the draw that it multiplies."""
WAY_OUT = (
    "use independent noise, band-mf, blt, a banded inverse or a tree with the estimator "
    '"completed"; or noise="float"'
)


@dataclass(frozen=True)
class NoiseTerms:
    """Noise at unit scale: the sum of `weight` times the draw at `address` over `draws`, plus,
    where `past` is given, its gain times the weighted rows that it remembers. `alone`: no step asks
    for the draw of another, so that a draw may be made in any one way.
    """

    draws: tuple[Term, ...]
    past: Recurrence | None = None
    alone: bool = False

    @property
    def size(self) -> float:
        """The sum of the sizes of all weights."""
        return sum(abs(w) for w, _ in self.draws)


def of(strategy: Strategy, step: int) -> NoiseTerms:
    """The terms of `step`; strategies whose noise cannot be written so are refused."""
    if isinstance(strategy, Recurrent):
        r = strategy.recurrence(step)
        again = tuple((r.fresh * weight, step - 1 - back) for back, weight in enumerate(r.again))
        return NoiseTerms(
            ((r.fresh, step), *again),
            r if r.weights else None,
            isinstance(strategy, Identity | Schedule),
        )
    require(strategy)
    assert isinstance(strategy, Tree)
    return NoiseTerms(
        tuple(sorted(((w, at) for at, w in strategy.nodes(step).items()), key=lambda term: term[1]))
    )


def require(strategy: Strategy) -> None:
    """Refuse strategies that exact noise does not know."""
    if not isinstance(strategy, Recurrent) and not (
        isinstance(strategy, Tree) and strategy.estimator == "completed"
    ):
        what = (
            f"{type(strategy).__name__} ({strategy.estimator})"
            if isinstance(strategy, Tree)
            else type(strategy).__name__
        )
        raise Unsupported(f"exact noise for the strategy {what}", WAY_OUT)
