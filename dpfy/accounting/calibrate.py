"""The least noise that reaches a target, found by bisection and always returned from the private side."""

from __future__ import annotations

from collections.abc import Callable

from dpfy.accounting import table
from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.events import Event
from dpfy.core.unit import Adjacency

LEAST, MOST = 1e-3, 1e9
TOLERANCE = 1e-5


def noise(
    make_event: Callable[[float], Event],
    epsilon: float,
    delta: float,
    *,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
    accountant: str = table.DEFAULT,
) -> float:
    """The least noise multiplier, to a relative 1e-5, for which ``make_event(noise)`` is (epsilon, delta)-private.

    Guarantees: the epsilon that `accountant` computes at the value returned is at most `epsilon`. An unreachable target raises
    `InvalidInput` and names the least epsilon that was reached.
    """
    target = check.positive("epsilon", epsilon)
    check.inside_unit("delta", delta)
    route = table.accountant(accountant)

    def reached(multiplier: float) -> float:
        return route.curve(make_event(multiplier), adjacency).epsilon(delta)

    return least(reached, target, start=1.0)


def least(reached: Callable[[float], float], target: float, *, start: float) -> float:
    """The least x, to a relative tolerance, with ``reached(x) <= target``, for a function that falls as x grows."""
    low, high = _bracket(reached, target, start)
    while high / low > 1 + TOLERANCE:
        middle = (low * high) ** 0.5
        if reached(middle) <= target:
            high = middle
        else:
            low = middle
    return high


def _bracket(reached: Callable[[float], float], target: float, start: float) -> tuple[float, float]:
    high = start
    while (value := reached(high)) > target:
        if high > MOST:
            raise InvalidInput(
                "epsilon",
                target,
                f"cannot be reached: noise {high:g} still gives epsilon {value:.4g}; ask for more epsilon or delta",
            )
        high *= 4
    low = high / 2
    while reached(low) <= target:
        if low < LEAST:
            raise Unsupported(
                f"a target as large as epsilon {target:g}", "it is reached by almost no noise; ask for a smaller epsilon"
            )
        low, high = low / 2, low
    return low, high
