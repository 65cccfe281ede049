"""Strategies whose inverse is banded: past draws are asked for again instead of being kept, so
there is no state at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.noise import series
from dpfy.noise.strategy import Grads, Recurrence, Recurrent, State
from dpfy.noise.toeplitz import Toeplitz

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class InverseBanded(Toeplitz, Recurrent):
    """C^-1 is banded Toeplitz with these coefficients, the first 1 and the others at most 0
    (Kalinin et al. 2025).

    Guarantees: the noise of step t is sum over i of d_i z_(t-i), the z drawn again from their
    addresses. Coefficients d_i <= 0 make C non-negative, and rounding them toward zero for single
    precision makes every entry of C smaller.
    """

    noising_coefficient: tuple[float, ...]

    def __post_init__(self) -> None:
        values = series.checked("inverse.noising_coefficient", self.noising_coefficient)
        if values[0] != 1 or any(d > 0 for d in values[1:]):
            raise InvalidInput(
                "inverse.noising_coefficient",
                values,
                "must start with 1 and go on with numbers of at most 0",
            )
        object.__setattr__(self, "noising_coefficient", values)

    @property
    def bands(self) -> int:
        """The number of coefficients of the inverse."""
        return len(self.noising_coefficient)

    def coefficients(self, steps: int) -> NDArray[np.float64]:
        """Series of 1 / d(x)."""
        return series.inverse(self.noising_coefficient, steps)

    def noising(self, steps: int) -> NDArray[np.float64]:
        """The coefficients, then zeros."""
        return series.padded(self.noising_coefficient, steps)

    def buffers(self, steps: int) -> int:
        """None: noise is regenerated."""
        return 0

    def init(self, like: Grads) -> State:
        """Nothing to remember."""
        return {}

    def recurrence(self, step: int) -> Recurrence:
        """The step's own draw and the last bands - 1 draws, weighted."""
        return Recurrence(again=self.noising_coefficient[1 : step + 1])


def inverse_square_root_banded(bands: int) -> InverseBanded:
    """BISR: the first coefficients of the inverse square root (Kalinin et al. 2025). Nothing to
    optimise.
    """
    return InverseBanded(
        tuple(float(d) for d in series.inverse_square_root(check.integer("bands", bands)))
    )


def cancelling(fraction: float) -> InverseBanded:
    """Two bands: each step takes back `fraction` of the draw before it, so C has the coefficients
    fraction^i.
    """
    if not 0 <= check.real("fraction", fraction) < 1:
        raise InvalidInput("fraction", fraction, "must lie in [0, 1)")
    return InverseBanded((1.0, -float(fraction)))
