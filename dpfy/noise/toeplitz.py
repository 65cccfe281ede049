"""Strategies that treat all steps alike: C is lower-triangular Toeplitz, given by its first
column.

Banded strategies: each step's noise is corrected for the last few outputs. One band is
DP-SGD.

Buffered linear Toeplitz noise: near-optimal correlation with a handful of buffers, whatever the
length of the run.

Strategies whose inverse is banded: past draws are asked for again instead of being kept, so
there is no state at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpfy.core.unit import Participation
from dpfy.noise import noise_buffers, series
from dpfy.noise.strategy import Draw, Grads, State

if TYPE_CHECKING:
    import numpy as np
if TYPE_CHECKING:
    from numpy.typing import NDArray
from dataclasses import replace
from functools import lru_cache

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.noise.strategy import Recurrence, Recurrent


class Toeplitz(ABC):
    """What all Toeplitz strategies share: sensitivity and errors follow from two series, c(x) and 1
    / c(x).
    """

    @abstractmethod
    def coefficients(self, steps: int) -> NDArray[np.float64]:
        """First column of C."""

    @abstractmethod
    def noising(self, steps: int) -> NDArray[np.float64]:
        """First column of C^-1."""

    def buffers(self, steps: int) -> int:
        """The most noise-sized tensors that are kept between steps."""
        return max(0, min(series.width(self.coefficients(steps)), steps) - 1)

    def sensitivity(self, participation: Participation, steps: int) -> float:
        """Exact; see :func:`dpfy.noise.sensitivity.toeplitz` for the patterns that have a
        theorem.
        """
        from dpfy.noise import sensitivity

        return sensitivity.toeplitz(self.coefficients(steps), participation, steps)

    def encoder(self, steps: int) -> NDArray[np.float64]:
        """C as a dense matrix: an oracle."""
        return series.dense(self.coefficients(steps))

    def noise_matrix(self, steps: int) -> NDArray[np.float64]:
        """C^-1 as a dense matrix: an oracle."""
        return series.dense(self.noising(steps))


@dataclass(frozen=True)
class SquareRoot(Toeplitz):
    """The square root of the prefix-sum matrix: near-optimal for one pass, without any
    optimisation. Keeps all past noise.

    Fichtenberger, Henzinger & Upadhyay 2023. The noise of step t is sum over i of d_i z_(t-i), d
    the series of sqrt(1 - x); in single precision the d_i are rounded toward zero, which makes
    every entry of C smaller and so errs to the private side.
    """

    def coefficients(self, steps: int) -> NDArray[np.float64]:
        """1, 1/2, 3/8, 5/16, ..."""
        return series.square_root(steps)

    def noising(self, steps: int) -> NDArray[np.float64]:
        """1, -1/2, -1/8, -1/16, ..."""
        return series.inverse_square_root(steps)

    def fresh(self, step: int) -> float:
        """1: the draw itself."""
        return 1.0

    def init(self, like: Grads) -> State:
        """Room for the first draw; doubles as the run goes on."""
        return noise_buffers.stack(like, 1)

    def next(self, step: int, draw: Draw, state: State) -> tuple[Grads, State]:
        """The step's own draw, less a little of each earlier one."""
        fresh = draw(step)
        z = noise_buffers.flat(fresh)
        past = noise_buffers.held(state, z, noise_buffers.grown(step), step)
        weights = [float(d) for d in self.noising(step + 1)[:0:-1]]
        noise = noise_buffers.plus_weighted(z, past[:step], weights) if step else z
        if step == len(past):
            past = noise_buffers.doubled(past)
        past[step].copy_(z)
        return noise_buffers.split(noise, fresh), {noise_buffers.PAST: past}


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
        return _buffer_recurrence(self.theta, self.omega)


@lru_cache(maxsize=64)
def _buffer_recurrence(theta: tuple[float, ...], omega: tuple[float, ...]) -> Recurrence:
    return Recurrence(weights=tuple(-w for w in omega), decay=theta)


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
