"""What may be published: numbers that the caller says are public, unless they are seen to come from the batch."""

from __future__ import annotations

import math
from numbers import Real

from torch import Tensor

from dpfy.core.errors import InvalidInput

CLOSE = 1e-5
"""Relative distance at which a number is taken for a loss of the batch."""


def check_number(name: str, value: object, losses: Tensor | None) -> None:
    """Refuse what is not a plain number, and the mean or sum of `losses`, the losses of the batch last seen.

    Guarantees: no more than that. A number that was computed from the data in another way cannot be told from a public one.
    """
    if not name.rpartition(" ")[2].isidentifier():
        raise InvalidInput("record", name, "names of values are words of letters, digits and underscores")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidInput(name, type(value).__name__, "must be a plain number that may be published, not a tensor or a text")
    number = float(value)
    if losses is None or not math.isfinite(number) or number == 0:
        return
    mean = float(losses.double().mean())
    if any(math.isclose(number, seen, rel_tol=CLOSE) for seen in (mean, mean * len(losses))):
        rule = "is the loss of the last batch, which is private: evaluate on public data, or keep it out of the run's files"
        raise InvalidInput(name, "a value computed from the data", rule)
