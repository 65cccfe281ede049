"""What mechanisms have in common: a permit is spent before random bits are had, and what a charge
assumes of neighbours is compared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from fractions import Fraction

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.core.values import Permit
from dpfy.mechanisms.exact import Bits
from dpfy.mechanisms.integers import SCALES


def source(event: events.Event, permit: Permit, randomness: Randomness | None, step: int) -> Bits:
    """The random bits of one release, for a permit that was given for `event` and has not been used
    for this step.

    They are those of the address (name of the permit, step) under a run's secret, or of a fresh one
    where none is given.
    """
    permit.spend(step, event)
    return Bits(Randomness.from_os() if randomness is None else randomness, permit.name, step)


@dataclass(frozen=True)
class Stated(ABC):
    """A mechanism whose charge states `epsilon` for neighbours of one kind, `adjacency`.

    The charge says nothing of other neighbours, so a permit of a ledger with another adjacency is
    refused.
    """

    epsilon: float
    adjacency: Adjacency = field(default=Adjacency.ADD_OR_REMOVE_ONE, kw_only=True)

    def __post_init__(self) -> None:
        check.epsilon("epsilon", self.epsilon)
        object.__setattr__(self, "adjacency", Adjacency.parse(self.adjacency))

    @property
    @abstractmethod
    def event(self) -> events.Event:
        """All that a release does."""

    @property
    def moves(self) -> int:
        """By how many contributions of one unit neighbours differ."""
        return 2 if self.adjacency is Adjacency.REPLACE_ONE else 1

    def _source(self, permit: Permit, randomness: Randomness | None, step: int) -> Bits:
        agree(self.adjacency, permit)
        return source(self.event, permit, randomness, step)


def drawable(name: str, value: object, scale: Fraction) -> None:
    """Refuse, before a permit is spent, noise of a scale that is not drawn."""
    if not SCALES[0] <= scale <= SCALES[1]:
        raise InvalidInput(
            name,
            value,
            f"gives noise of a scale of {float(scale):.3g} steps; it must lie between 2^-20 and "
            f"2^45",
        )


def agree(adjacency: Adjacency, permit: Permit) -> None:
    """Refuse a permit whose ledger hides another change of the data than the one that a charge was
    made for.
    """
    if permit.adjacency is not adjacency:
        rule = (
            f"is not that of the ledger, {permit.adjacency.value}: make the mechanism with it, so "
            f"that it adds the noise for it"
        )
        raise InvalidInput("adjacency", adjacency.value, rule)
