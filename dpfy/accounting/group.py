"""Privacy of groups, and of users who own several examples. By the event: `of_group`; from any
curve: `from_curve`.
"""

from __future__ import annotations

import math

from dpfy.accounting.rows import grouped as of_group
from dpfy.accounting.rows.stated import walked
from dpfy.core import check
from dpfy.core.guarantee import Curve

__all__ = ["from_curve", "of_group", "textbook"]


def textbook(epsilon: float, delta: float, size: int) -> tuple[float, float]:
    """The textbook rule: a group of k is (k epsilon, k e^{k epsilon} delta)-private (Dwork & Roth
    2014, Theorem 2.2, loosened).
    """
    check.integer("size", size)
    return size * epsilon, min(1.0, size * math.exp(size * epsilon) * delta)


def from_curve(curve: Curve, epsilon: float, size: int) -> float:
    """The delta at `epsilon` of a group of `size`, from the curve of one member alone.

    With e = epsilon / size: delta(e) (e^{k e} - 1) / (e^e - 1), see `walked`. Never above the
    textbook rule, which bounds the sum by its largest term times k.
    """
    each = check.nonnegative("epsilon", epsilon) / check.integer("size", size)
    return walked(curve.delta(each), each, size)
