"""Power series: the first column of a lower-triangular Toeplitz matrix, its inverse and its square
root, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from dpfy.core.errors import InvalidInput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]


def padded(coefficients: Sequence[float] | Vector, steps: int) -> Vector:
    """The first `steps` coefficients, zeros after the last one given."""
    import numpy as np

    series = np.zeros(steps)
    series[: min(steps, len(coefficients))] = np.asarray(coefficients, dtype=np.float64)[:steps]
    return series


def inverse(coefficients: Sequence[float] | Vector, steps: int) -> Vector:
    """The first `steps` coefficients of 1 / c(x): first column of the inverse Toeplitz matrix."""
    import numpy as np
    from scipy.signal import lfilter

    impulse = np.zeros(steps)
    impulse[0] = 1.0
    result: Vector = lfilter([1.0], np.asarray(coefficients, dtype=np.float64)[:steps], impulse)
    return result


def convolve(a: Vector, b: Vector, steps: int) -> Vector:
    """The first `steps` coefficients of a(x) b(x)."""
    from scipy.signal import fftconvolve

    product: Vector = fftconvolve(a[:steps], b[:steps])[:steps]
    return product


def square_root(steps: int) -> Vector:
    """Coefficients of 1 / sqrt(1 - x), the square root of the prefix-sum matrix: 1, 1/2, 3/8, 5/16,
    ...
    """
    import numpy as np

    i = np.arange(1, steps, dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod((2 * i - 1) / (2 * i))])


def inverse_square_root(steps: int) -> Vector:
    """Coefficients of sqrt(1 - x): 1, -1/2, -1/8, -1/16, ..."""
    import numpy as np

    i = np.arange(1, steps, dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod((2 * i - 3) / (2 * i))])


def dense(coefficients: Vector) -> NDArray[np.float64]:
    """The lower-triangular Toeplitz matrix with this first column: an oracle, quadratic in
    memory.
    """
    import numpy as np
    from scipy.linalg import toeplitz

    full: NDArray[np.float64] = toeplitz(coefficients, np.zeros(len(coefficients)))
    return full


def width(coefficients: Sequence[float] | Vector) -> int:
    """Bands: one more than the place of the last coefficient that is not zero."""
    import numpy as np

    nonzero = np.flatnonzero(np.asarray(coefficients))
    return int(nonzero[-1]) + 1 if len(nonzero) else 0


def checked(name: str, coefficients: Sequence[float]) -> tuple[float, ...]:
    """Finite floats, at least one, the first one positive."""
    values = tuple(float(c) for c in coefficients)
    if not values or not all(math.isfinite(c) for c in values) or values[0] <= 0:
        raise InvalidInput(name, coefficients, "must be finite numbers, the first greater than 0")
    return values


@lru_cache(maxsize=65536)
def single(value: float) -> float:
    """`value` rounded toward zero to single precision.

    Strategies with non-negative entries that run in single precision use these: every entry of the
    matrix that ran is at most the entry whose sensitivity was charged.
    """
    import numpy as np

    near = np.float32(value)
    return float(np.nextafter(near, np.float32(0)) if abs(float(near)) > abs(value) else near)


@lru_cache(maxsize=65536)
def single_up(value: float) -> float:
    """`value` rounded up to single precision: for what multiplies noise."""
    import numpy as np

    near = np.float32(value)
    return float(np.nextafter(near, np.float32(np.inf)) if float(near) < value else near)
