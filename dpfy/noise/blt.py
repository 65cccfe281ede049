"""Buffered linear Toeplitz noise: near-optimal correlation with a handful of buffers, whatever the
length of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.noise import noise_buffers
from dpfy.noise.strategy import Grads, Recurrence, Recurrent, State
from dpfy.noise.toeplitz import Toeplitz

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Blt(Toeplitz, Recurrent):
    """C has the coefficients c_0 = 1, c_i = sum over j of omega_j theta_j^(i-1) (Dvijotham et al.
    2024; McMahan et al. 2024).

    Guarantees: one buffer for each theta, for any number of steps. theta in [0, 1) and omega >= 0
    make C non-negative; in single precision both are rounded toward zero, which makes every entry
    of C smaller.
    """

    theta: tuple[float, ...]
    omega: tuple[float, ...]

    def __post_init__(self) -> None:
        theta = tuple(check.nonnegative("blt.theta", t) for t in self.theta)
        omega = tuple(check.nonnegative("blt.omega", w) for w in self.omega)
        if not theta or len(theta) != len(omega) or max(theta) >= 1:
            raise InvalidInput(
                "blt.theta", self.theta, "must be numbers in [0, 1), one for each omega"
            )
        object.__setattr__(self, "theta", theta)
        object.__setattr__(self, "omega", omega)

    def coefficients(self, steps: int) -> NDArray[np.float64]:
        """1, then the sum of the decaying exponentials."""
        import numpy as np

        powers = np.asarray(self.theta)[:, None] ** np.arange(max(0, steps - 1))[None, :]
        return np.concatenate([[1.0], np.asarray(self.omega) @ powers])[:steps]

    def noising(self, steps: int) -> NDArray[np.float64]:
        """The response of the recurrence itself to a unit draw at step 0."""
        import numpy as np

        theta, omega = np.asarray(self.theta), np.asarray(self.omega)
        buffers = np.zeros(len(theta))
        response = np.zeros(steps)
        for t in range(steps):
            response[t] = (t == 0) - omega @ buffers
            buffers = theta * buffers + response[t]
        return response

    def forever(self) -> float:
        """Norm of the infinite first column: a single-participation sensitivity that holds for a
        run of any length.
        """
        from dpfy.noise.sensitivity import up

        pairs = [
            (w * v, t * s)
            for w, t in zip(self.omega, self.theta)
            for v, s in zip(self.omega, self.theta)
        ]
        return up((1 + sum(w / (1 - t) for w, t in pairs)) ** 0.5)

    def buffers(self, steps: int) -> int:
        """One for each theta."""
        return len(self.theta)

    def init(self, like: Grads) -> State:
        """Empty buffers."""
        return noise_buffers.stack(like, len(self.theta))

    def recurrence(self, step: int) -> Recurrence:
        """The step's draw less omega times the buffers; the buffers decay by theta and take up the
        output.
        """
        return _recurrence(self.theta, self.omega)


@lru_cache(maxsize=64)
def _recurrence(theta: tuple[float, ...], omega: tuple[float, ...]) -> Recurrence:
    return Recurrence(weights=tuple(-w for w in omega), decay=theta)
