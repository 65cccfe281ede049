"""What the optimizer does with the private gradients: a lower-triangular matrix A, of which noise
must be small in A C^-1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpfy.core import check
from dpfy.core.errors import InvalidInput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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
