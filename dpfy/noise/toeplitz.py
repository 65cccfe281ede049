"""Strategies that treat all steps alike: C is lower-triangular Toeplitz, given by its first
column.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpfy.core.participation import Participation
from dpfy.noise import noise_buffers, series
from dpfy.noise.strategy import Draw, Grads, State

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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
