"""What the optimizer does with the private gradients: a lower-triangular matrix A, of which noise
must be small in A C^-1.

How much noise a strategy leaves in what the optimizer uses: the figure by which strategies are
compared.

With e_t the squared norm of row t of A C^-1: rmse = sqrt(mean e_t) times the sensitivity, max_error
= sqrt(max e_t) times the sensitivity, both for a noise multiplier of one and contributions of norm
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpfy.core import check
from dpfy.core.errors import InvalidInput

if TYPE_CHECKING:
    import numpy as np
if TYPE_CHECKING:
    from numpy.typing import NDArray
import math
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dpfy.core.unit import Participation
from dpfy.noise import series
from dpfy.noise.strategy import Identity, Strategy
from dpfy.noise.toeplitz import Banded, Toeplitz
from dpfy.noise.tree import Tree


@dataclass(frozen=True)
class Workload:
    """Row t is the weight of each gradient in the model after step t, up to sign: A[t, j] = sum
    over i in j..t of rate_i momentum^(i-j).

    No momentum and no rates is prefix sums. `rates` is a learning-rate schedule, one number a step.
    """

    momentum: float = 0.0
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= check.real("workload.momentum", self.momentum) < 1:
            raise InvalidInput("workload.momentum", self.momentum, "must lie in [0, 1)")
        object.__setattr__(
            self, "rates", tuple(check.nonnegative("workload.rates", r) for r in self.rates)
        )

    @property
    def is_toeplitz(self) -> bool:
        """Whether all steps are treated alike: no schedule."""
        return not self.rates

    def coefficients(self, steps: int) -> NDArray[np.float64]:
        """First column of A."""
        import numpy as np

        velocity = float(self.momentum) ** np.arange(steps)
        return np.cumsum(velocity * self._rates(steps))

    def apply(self, matrix: NDArray[np.float64]) -> NDArray[np.float64]:
        """A times `matrix`, by the recurrence the optimizer runs."""
        import numpy as np
        from scipy.signal import lfilter

        velocity = (
            lfilter([1.0], [1.0, -self.momentum], matrix, axis=0) if self.momentum else matrix
        )
        return np.cumsum(velocity * self._rates(len(matrix))[:, None], axis=0)

    def matrix(self, steps: int) -> NDArray[np.float64]:
        """A itself."""
        import numpy as np

        return self.apply(np.eye(steps))

    def _rates(self, steps: int) -> NDArray[np.float64]:
        import numpy as np

        if not self.rates:
            return np.ones(steps)
        if len(self.rates) < steps:
            raise InvalidInput(
                "workload.rates",
                f"{len(self.rates)} rates",
                f"must have one for each of the {steps} steps",
            )
        return np.asarray(self.rates[:steps], dtype=np.float64)


PREFIX_SUMS = Workload()


@runtime_checkable
class MatrixStrategy(Protocol):
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


def measured(strategy: Strategy) -> MatrixStrategy:
    """The strategy with its matrices; the identity is one band."""
    if isinstance(strategy, Identity):
        return Banded((1.0,))
    if not isinstance(strategy, MatrixStrategy):
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
