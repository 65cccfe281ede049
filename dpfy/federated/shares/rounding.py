"""Real vectors to whole ones: rounded up or down by chance, again and again until the result is no
longer than is billed.

What makes the bill right is the last comparison alone, on integers: a vector that is longer than
`squared` allows never leaves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpfy.mechanisms.bits import Bits

TRIES = 64
"""After so many results that are too long the vector is rounded towards zero, which makes it no
longer.
"""


def rounded(values: NDArray[np.float64], squared: int, bits: Bits) -> NDArray[np.int64]:
    """A whole vector near `values`, whose squared length is at most `squared`.

    Guarantees: the length, whatever the values; what is not finite, or cannot be made short enough,
    becomes zero.
    """
    with np.errstate(all="ignore"):
        if not np.dot(values, values) <= squared * (
            1 + 1e-9
        ):  # not if not a number; from here on nothing leaves 64 bits
            return np.zeros(len(values), np.int64)
    below = np.floor(values)
    share = values - below
    for _ in range(TRIES):
        coins = (bits.words(len(values)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        whole = (below + (coins < share)).astype(np.int64)
        if length(whole) <= squared:
            return whole
    whole = np.trunc(values).astype(np.int64)
    return whole if length(whole) <= squared else np.zeros(len(values), np.int64)


def length(whole: NDArray[np.int64]) -> int:
    """The squared length of a whole vector, exactly."""
    return int(np.dot(whole, whole))
