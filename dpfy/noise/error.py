"""How much noise a strategy leaves in what the optimizer uses: the figure by which strategies are
compared.

With e_t the squared norm of row t of A C^-1: rmse = sqrt(mean e_t) times the sensitivity, max_error
= sqrt(max e_t) times the sensitivity, both for a noise multiplier of one and contributions of norm
one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dpfy.core.participation import Participation
from dpfy.noise import series
from dpfy.noise.banded import Banded
from dpfy.noise.strategy import Identity, Strategy
from dpfy.noise.toeplitz import Toeplitz
from dpfy.noise.tree import Tree
from dpfy.noise.workload import PREFIX_SUMS, Workload


@runtime_checkable
class Measured(Protocol):
    """A strategy that knows its own matrices."""

    def noise_matrix(self, steps: int) -> NDArray[np.float64]:
        """The noise of each step as a combination of independent draws."""

    def buffers(self, steps: int) -> int:
        """The most noise-sized tensors kept between steps."""


@dataclass(frozen=True)
class Errors:
    """Errors of a strategy at noise multiplier one and clip norm one."""

    sensitivity: float
    rmse: float
    max_error: float


def measured(strategy: Strategy) -> Measured:
    """The strategy with its matrices; the identity is one band."""
    if isinstance(strategy, Identity):
        return Banded((1.0,))
    if not isinstance(strategy, Measured):
        raise TypeError(f"{type(strategy).__name__} does not know its noise matrix")
    return strategy


def variances(
    strategy: Strategy, steps: int, workload: Workload = PREFIX_SUMS
) -> NDArray[np.float64]:
    """e_t: variance of row t of A C^-1 Z for unit draws."""
    known = measured(strategy)
    if isinstance(known, Toeplitz) and workload.is_toeplitz:
        noising = known.noising(steps)
        response = (
            np.cumsum(noising)
            if workload == PREFIX_SUMS
            else series.convolve(workload.coefficients(steps), noising, steps)
        )
        return np.cumsum(response**2)
    if isinstance(known, Tree) and workload == PREFIX_SUMS:
        return known.variances(steps)
    return (workload.apply(known.noise_matrix(steps)) ** 2).sum(axis=1)


def errors(
    strategy: Strategy, participation: Participation, steps: int, workload: Workload = PREFIX_SUMS
) -> Errors:
    """Sensitivity and errors of `strategy` over `steps` steps under `participation`."""
    e = variances(strategy, steps, workload)
    sensitivity = strategy.sensitivity(participation, steps)
    return Errors(
        sensitivity,
        sensitivity * math.sqrt(float(e.mean())),
        sensitivity * math.sqrt(float(e.max())),
    )


def buffers(strategy: Strategy, steps: int) -> int:
    """The most noise-sized tensors that `strategy` keeps between steps."""
    return measured(strategy).buffers(steps)
