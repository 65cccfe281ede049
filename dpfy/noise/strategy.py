"""How the noise of one step relates to the noise of the others. DP-SGD is the identity."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dpfy.core.errors import Unsupported
from dpfy.core.unit import Participation, Poisson, RandomAllocation, WithoutReplacement
from dpfy.noise import noise_buffers

if TYPE_CHECKING:
    from torch import Tensor

Grads = dict[str, "Tensor"]
State = dict[str, "Tensor"]
Draw = Callable[[int], Grads]
"""`draw(s)` is the independent standard Gaussian noise of step s; asking twice gives the same
numbers, in new memory.
"""


class Strategy(Protocol):
    """A lower-triangular matrix C, met as a stream: step t releases the gradient plus row t of C^-1
    Z.

    Frozen, public data; every number in it goes into the plan's JSON.
    """

    def sensitivity(self, participation: Participation, steps: int) -> float:
        """The largest L2 norm of C u over all contributions u of norm 1 per step that
        `participation` allows, rounded up.
        """

    def fresh(self, step: int) -> float:
        """About the weight of the draws of `step` in its noise at unit scale, public: it sets the
        lattice of the release.
        """

    def init(self, like: Grads) -> State:
        """The state before the first step: named tensors, fit for a checkpoint."""

    def next(self, step: int, draw: Draw, state: State) -> tuple[Grads, State]:
        """The noise of `step` at unit scale, and the state after it."""


@dataclass(frozen=True)
class Recurrence:
    """One step of a strategy as data: its noise is `gain` times

        y = (z_t + sum over i of again[i] z_(t-1-i)) / first + sum over r of weights[r] past[r]

    with z_s the draw of step s and past[r] a row of what is remembered. Afterwards row `keep` is y;
    or, where `decay` is given, every row r is decay[r] past[r] + y. Those who carry it out round
    weights and `first` toward zero and `gain` up, to the precision of the noise.
    """

    first: float = 1.0
    again: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    keep: int = 0
    decay: tuple[float, ...] = ()
    gain: float = 1.0

    @property
    def is_fresh(self) -> bool:
        """Whether the noise is the step's own draw, up to a factor."""
        return not self.again and not self.weights

    @property
    def fresh(self) -> float:
        """The weight of the step's own draw."""
        return self.gain / self.first


FRESH = Recurrence()


class Recurrent(ABC):
    """A strategy whose every step is a :class:`Recurrence`. Who adds the noise may carry that out
    where the sums are.
    """

    @abstractmethod
    def recurrence(self, step: int) -> Recurrence:
        """What `step` does."""

    def fresh(self, step: int) -> float:
        """The weight of the step's own draw."""
        return self.recurrence(step).fresh

    def next(self, step: int, draw: Draw, state: State) -> tuple[Grads, State]:
        """The noise of `step` at unit scale, by the portable route; the state is changed in
        place.
        """
        return noise_buffers.noise(self.recurrence(step), step, draw, state), state


@dataclass(frozen=True)
class Identity(Recurrent):
    """Fresh noise at every step: C is the identity, there is no state, and each step's sensitivity
    is one contribution.
    """

    def sensitivity(self, participation: Participation, steps: int) -> float:
        """1 where every step is sampled afresh: steps are composed by the accountant, each with
        sensitivity one.
        """
        if isinstance(participation, Poisson | WithoutReplacement | RandomAllocation):
            return 1.0
        raise Unsupported(
            f"independent noise with {type(participation).__name__} participation",
            "use Poisson sampling or random allocation, or a correlated strategy",
        )

    def init(self, like: Grads) -> State:
        """Nothing to remember."""
        return {}

    def recurrence(self, step: int) -> Recurrence:
        """The step's own draw."""
        return FRESH
