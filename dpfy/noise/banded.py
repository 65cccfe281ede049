"""Banded strategies: each step's noise is corrected for the last few outputs. One band is
DP-SGD.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.participation import Participation
from dpfy.noise import noise_buffers, series
from dpfy.noise.strategy import Grads, Recurrence, Recurrent, State
from dpfy.noise.toeplitz import Toeplitz

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Banded(Toeplitz, Recurrent):
    """C is banded Toeplitz with these coefficients (Choquette-Choo et al. 2023; Kalinin & Lampert
    2024). Keeps bands - 1 past outputs.

    Guarantees: the noise y of step t solves sum over i of c_i y_(t-i) = z_t. In single precision
    the coefficients are rounded toward zero before use.
    """

    coefficient: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "coefficient", series.checked("banded.coefficient", self.coefficient)
        )

    @property
    def bands(self) -> int:
        """The number of coefficients."""
        return len(self.coefficient)

    def coefficients(self, steps: int) -> NDArray[np.float64]:
        """The coefficients, then zeros."""
        return series.padded(self.coefficient, steps)

    def noising(self, steps: int) -> NDArray[np.float64]:
        """Series of 1 / c(x)."""
        return series.inverse(self.coefficient, steps)

    def init(self, like: Grads) -> State:
        """A ring of bands - 1 past outputs; nothing for one band."""
        return noise_buffers.stack(like, self.bands - 1) if self.bands > 1 else {}

    def recurrence(self, step: int) -> Recurrence:
        """The step's draw less c_1 .. c_(p-1) times the last outputs, over c_0."""
        return _recurrence(self.coefficient, step % max(self.bands - 1, 1))


@lru_cache(maxsize=1024)
def _recurrence(coefficient: tuple[float, ...], place: int) -> Recurrence:
    """The step that goes to `place` of the ring. Row r holds the output of the last step that is r
    modulo the ring, so the one of ((step - 1 - r) modulo the ring) + 1 steps ago.
    """
    first, ring = coefficient[0], len(coefficient) - 1
    weights = tuple(-coefficient[(place - 1 - row) % ring + 1] / first for row in range(ring))
    return Recurrence(first=first, weights=weights, keep=place)


@dataclass(frozen=True)
class NormalisedBanded(Recurrent):
    """A banded Toeplitz matrix whose columns are scaled to norm one for a run of exactly `steps`
    steps: C D^-1.

    Guarantees: every column has norm one, so that no step is protected more than another; a step
    beyond `steps` is refused.
    """

    coefficient: tuple[float, ...]
    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "coefficient", series.checked("banded.coefficient", self.coefficient)
        )
        check.integer("banded.steps", self.steps)

    @property
    def base(self) -> Banded:
        """The strategy before the scaling."""
        return Banded(self.coefficient)

    def buffers(self, steps: int) -> int:
        """As the strategy before the scaling."""
        return self.base.buffers(steps)

    def norms(self) -> NDArray[np.float64]:
        """Column norms of the Toeplitz matrix: the scale of each step's noise."""
        import numpy as np

        return np.array(_norms(self.coefficient, self.steps))

    def encoder(self, steps: int) -> NDArray[np.float64]:
        """C D^-1 as a dense matrix: an oracle."""
        self._check(steps)
        return self.base.encoder(steps) / self.norms()[None, :]

    def noise_matrix(self, steps: int) -> NDArray[np.float64]:
        """D C^-1 as a dense matrix: an oracle."""
        self._check(steps)
        return self.norms()[:, None] * self.base.noise_matrix(steps)

    def sensitivity(self, participation: Participation, steps: int) -> float:
        """Exact: where two participations of the pattern never overlap, the square root of how many
        fit.
        """
        from dpfy.noise import sensitivity

        self._check(steps)
        return sensitivity.dense(self.encoder(steps), participation)

    def init(self, like: Grads) -> State:
        """As the strategy before the scaling."""
        return self.base.init(like)

    def recurrence(self, step: int) -> Recurrence:
        """The unscaled noise times the norm of its column."""
        if step >= self.steps:
            raise InvalidInput("step", step, f"the columns were normalised for {self.steps} steps")
        return replace(self.base.recurrence(step), gain=_norms(self.coefficient, self.steps)[step])

    def _check(self, steps: int) -> None:
        if steps != self.steps:
            raise Unsupported(
                f"a run of {steps} steps with columns normalised for {self.steps}",
                "make the strategy for this many steps",
            )


@lru_cache(maxsize=16)
def _norms(coefficient: tuple[float, ...], steps: int) -> tuple[float, ...]:
    import numpy as np

    norms = np.sqrt(np.cumsum(series.padded(coefficient, steps) ** 2)[::-1])
    return tuple(float(n) for n in norms)


def square_root_banded(bands: int) -> Banded:
    """BSR: the first coefficients of the square root (Kalinin & Lampert 2024). Nothing to
    optimise.
    """
    return Banded(tuple(float(c) for c in series.square_root(check.integer("bands", bands))))
