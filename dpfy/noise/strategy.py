"""How the noise of one step relates to the noise of the others. DP-SGD is the identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dpfy.core.errors import Unsupported
from dpfy.core.participation import Participation, Poisson

if TYPE_CHECKING:
    from torch import Tensor

Grads = dict[str, "Tensor"]
State = dict[str, "Tensor"]
Draw = Callable[[int], Grads]
"""`draw(s)` is the independent standard Gaussian noise of step s; asking twice gives the same numbers, in new memory."""


class Strategy(Protocol):
    """A lower-triangular matrix C, met as a stream: step t releases the gradient plus row t of C^-1 Z.

    Frozen, public data; every number in it goes into the plan's JSON.
    """

    def sensitivity(self, participation: Participation, steps: int) -> float:
        """The largest L2 norm of C u over all contributions u of norm 1 per step that `participation` allows, rounded up."""

    def init(self, like: Grads) -> State:
        """The state before the first step: named tensors, fit for a checkpoint."""

    def next(self, step: int, draw: Draw, state: State) -> tuple[Grads, State]:
        """The noise of `step` at unit scale, and the state after it."""


@dataclass(frozen=True)
class Identity:
    """Fresh noise at every step: C is the identity, there is no state, and each step's sensitivity is one contribution."""

    def sensitivity(self, participation: Participation, steps: int) -> float:
        """1 under Poisson sampling: steps are composed by the accountant, each with sensitivity one."""
        if isinstance(participation, Poisson):
            return 1.0
        raise Unsupported(
            f"independent noise with {type(participation).__name__} participation",
            "use Poisson sampling, or a correlated strategy",
        )

    def init(self, like: Grads) -> State:
        """Nothing to remember."""
        return {}

    def next(self, step: int, draw: Draw, state: State) -> tuple[Grads, State]:
        """The step's own draw."""
        return draw(step), state
