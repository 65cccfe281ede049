"""The noise stream: the only place where a bounded sum becomes a private value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.ledger import Permit
from dpfy.core.random import Randomness
from dpfy.core.values import Bounded, Private
from dpfy.noise import gaussian, memory
from dpfy.noise.strategy import Grads, Recurrence, Recurrent, State, Strategy

Ends = Sequence[Tensor] | None
"""Where results go instead of the place of the sums."""


@dataclass(frozen=True)
class NoiseStream:
    """Adds the noise of one step to the bounded sum of that step.

    `scale` is the noise multiplier times the strategy's sensitivity; the standard deviation is `scale` times the bound that the sum
    carries, so there is one owner of the clip norm. The noise of step s is a function of (secret, name, s) alone. The noisy sum is
    divided by `divisor`, which is public, while it is at hand. With `in_place` the released value takes the memory of the sum, which
    must not be used afterwards, not even where the value went elsewhere; otherwise the sum is left as it is.
    """

    strategy: Strategy
    scale: float
    randomness: Randomness
    name: str = "noise"
    divisor: float = 1.0
    in_place: bool = False

    def __post_init__(self) -> None:
        check.nonnegative("noise scale", self.scale)
        check.positive("divisor", self.divisor)

    def init(self, like: Grads) -> State:
        """The strategy's state before the first step."""
        return self.strategy.init(like)

    def release(
        self, total: Bounded[Grads], step: int, state: State, permit: Permit, into: Grads | None = None
    ) -> tuple[Private[Grads], State]:
        """The noisy sum of `step`, divided, and the state for the next one.

        With `into`, tensors of the same names and shapes, the released values are rounded to their types and written there, on a GPU
        in the pass that adds the noise.

        Guarantees: refuses a step that `permit` does not cover, an `into` of other names or shapes, and an unbounded sum unless the
        scale is zero (a run without privacy, billed as such). Every parameter gets noise at every step, also when the batch was
        empty. Noise is added in float32 or wider, before any rounding to a narrower type.
        """
        permit.check(step)
        if self.scale and math.isinf(total.bound.l2):
            raise Unsupported("noise on an unbounded sum", "clip with a finite norm")
        dtype = gaussian.dtype_of(total.value)
        noisy = {n: v if self.in_place and v.dtype is dtype else v.to(dtype, copy=True) for n, v in total.value.items()}
        ends = None if into is None else _ends(into, noisy)
        if self.scale == 0:
            gaussian.divide_(list(noisy.values()), self.divisor, ends)
        else:
            state = self._add_(noisy, self.scale * total.bound.l2, step, state, ends)
        return Private(noisy if into is None else into), state

    def _add_(self, sums: Grads, scale: float, step: int, state: State, into: Ends) -> State:
        """Add the noise of `step` and divide: where the sums are if the step is a recurrence, else drawn first."""
        if isinstance(self.strategy, Recurrent) and self._added(self.strategy.recurrence(step), sums, scale, step, state, into):
            return state
        unit, state = self.strategy.next(step, lambda s: gaussian.draw(sums, self.randomness, self.name, s), state)
        gaussian.add_and_divide_(list(sums.values()), [unit[name] for name in sums], scale, self.divisor, into)
        return state

    def _added(self, recurrence: Recurrence, sums: Grads, scale: float, step: int, state: State, into: Ends) -> bool:
        """Make the noise where it is added, one pass for all; False, and nothing done, where that cannot be."""
        if recurrence.is_fresh:
            factor = recurrence.gain / recurrence.first
            gaussian.add_(sums, scale * factor, self.randomness, self.name, step, self.divisor, into)
            return True
        from dpfy.noise import chacha

        many = list(sums.values())
        if not chacha.usable(many):
            return False
        past = memory.held_beside(state, sums, len(recurrence.weights), step) if recurrence.weights else None
        if past is not None and not past.is_contiguous():
            return False
        keys = [self.randomness.key(self.name, step - back, chacha.KEY_BYTES) for back in range(1 + len(recurrence.again))]
        chacha.add_(many, scale, keys, self.divisor, recurrence, past, into)
        return True


def _ends(into: Grads, sums: Grads) -> list[Tensor]:
    """The tensors of `into` in the order of `sums`."""
    for name in into.keys() | sums.keys():
        if name not in into or name not in sums or into[name].shape != sums[name].shape:
            got = f"{list(into[name].shape)} for {name}" if name in into else f"nothing for {name}"
            raise InvalidInput("into", got, f"must be {list(sums[name].shape)}" if name in sums else "there is no such sum")
    return [into[name] for name in sums]
