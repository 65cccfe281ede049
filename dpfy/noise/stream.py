"""The noise stream: the only place where a bounded sum becomes a private value."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpfy.core import check
from dpfy.core.errors import Unsupported
from dpfy.core.ledger import Permit
from dpfy.core.random import Randomness
from dpfy.core.values import Bounded, Private
from dpfy.noise import gaussian
from dpfy.noise.strategy import Grads, Identity, State, Strategy


@dataclass(frozen=True)
class NoiseStream:
    """Adds the noise of one step to the bounded sum of that step.

    `scale` is the noise multiplier times the strategy's sensitivity; the standard deviation is `scale` times the bound that the sum
    carries, so there is one owner of the clip norm. The noise of step s is a function of (secret, name, s) alone. The noisy sum is
    divided by `divisor`, which is public, while it is at hand. With `in_place` the released value takes the memory of the sum, which
    must not be used afterwards; otherwise the sum is left as it is.
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

    def release(self, total: Bounded[Grads], step: int, state: State, permit: Permit) -> tuple[Private[Grads], State]:
        """The noisy sum of `step`, divided, and the state for the next one.

        Guarantees: refuses a step that `permit` does not cover, and an unbounded sum unless the scale is zero (a run without
        privacy, billed as such). Every parameter gets noise at every step, also when the batch was empty. Noise is added in float32
        or wider, before any rounding to a narrower type.
        """
        permit.check(step)
        if self.scale and math.isinf(total.bound.l2):
            raise Unsupported("noise on an unbounded sum", "clip with a finite norm")
        dtype = gaussian.dtype_of(total.value)
        here = [self.in_place and value.dtype == dtype for value in total.value.values()]
        noisy = {n: v if mine else v.to(dtype, copy=True) for (n, v), mine in zip(total.value.items(), here, strict=True)}
        scale = self.scale * total.bound.l2
        if self.scale == 0:
            gaussian.divide_(list(noisy.values()), self.divisor)
        elif type(self.strategy) is Identity:  # nothing to correlate: added as it is drawn
            gaussian.add_(noisy, scale, self.randomness, self.name, step, self.divisor)
        else:
            unit, state = self.strategy.next(step, lambda s: gaussian.draw(noisy, self.randomness, self.name, s), state)
            gaussian.add_and_divide_(list(noisy.values()), [unit[name] for name in noisy], scale, self.divisor)
        return Private(noisy), state
