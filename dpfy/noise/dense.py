"""A strategy given entry by entry: the user's own lower-triangular matrix, or the optimum for a
short run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Participation
from dpfy.noise import noise_buffers
from dpfy.noise.strategy import Draw, Grads, State

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SIGNED = 2.0**-20
"""Relative margin that covers the single-precision rounding of a matrix with negative entries."""


@dataclass(frozen=True)
class Dense:
    """C row by row: row t holds the t + 1 entries up to the diagonal. Keeps all past outputs: for
    runs of about a thousand steps.

    Guarantees: the noise y of step t solves sum over j of C[t, j] y_j = z_t. The run has exactly as
    many steps as there are rows. For single precision, entries are rounded toward zero, which can
    only lower the sensitivity of a non-negative matrix; with negative entries the sensitivity is
    raised by a millionth to cover it.
    """

    rows: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        rows = tuple(tuple(float(v) for v in row) for row in self.rows)
        for t, row in enumerate(rows):
            if len(row) != t + 1 or not all(math.isfinite(v) for v in row) or row[-1] <= 0:
                raise InvalidInput(
                    f"dense.rows[{t}]",
                    row,
                    f"must be {t + 1} finite numbers, the last greater than 0",
                )
        if not rows:
            raise InvalidInput("dense.rows", self.rows, "must have at least one row")
        object.__setattr__(self, "rows", rows)

    def buffers(self, steps: int) -> int:
        """All past outputs."""
        return steps - 1

    def encoder(self, steps: int) -> NDArray[np.float64]:
        """C as a matrix."""
        import numpy as np

        if steps != len(self.rows):
            raise InvalidInput(
                "steps", steps, f"must be {len(self.rows)}, the size of the dense strategy"
            )
        matrix = np.zeros((steps, steps))
        for t, row in enumerate(self.rows):
            matrix[t, : t + 1] = row
        return matrix

    def noise_matrix(self, steps: int) -> NDArray[np.float64]:
        """C^-1 as a matrix."""
        import numpy as np
        from scipy.linalg import solve_triangular

        solved: NDArray[np.float64] = solve_triangular(
            self.encoder(steps), np.eye(steps), lower=True
        )
        return solved

    def sensitivity(self, participation: Participation, steps: int) -> float:
        """Exact; see :func:`dpfy.noise.sensitivity.dense` for the patterns that have a theorem."""
        from dpfy.noise import sensitivity

        exact = sensitivity.dense(self.encoder(steps), participation)
        return exact if all(v >= 0 for row in self.rows for v in row) else exact * (1 + SIGNED)

    def fresh(self, step: int) -> float:
        """One over the entry on the diagonal."""
        return 1 / self.rows[min(step, len(self.rows) - 1)][-1]

    def init(self, like: Grads) -> State:
        """Room for the first output; doubles as the run goes on."""
        return noise_buffers.stack(like, 1)

    def next(self, step: int, draw: Draw, state: State) -> tuple[Grads, State]:
        """Forward substitution with the past outputs."""
        if step >= len(self.rows):
            raise InvalidInput("step", step, f"the dense strategy has {len(self.rows)} steps")
        row = self.rows[step]
        weights = [-value / row[-1] for value in row[:-1]]
        fresh = draw(step)
        z = noise_buffers.flat(fresh)
        past = noise_buffers.held(state, z, noise_buffers.grown(step), step)
        y = z / noise_buffers.rounded(row[-1:], z)[0]
        if step:
            y = noise_buffers.plus_weighted(y, past[:step], weights)
        if step == len(past):
            past = noise_buffers.doubled(past)
        past[step].copy_(y)
        return noise_buffers.split(y, fresh), {noise_buffers.PAST: past}


def dense(matrix: Sequence[Sequence[float]] | NDArray[np.float64]) -> Dense:
    """The strategy of a square lower-triangular matrix."""
    rows = [[float(v) for v in row] for row in matrix]
    for t, row in enumerate(rows):
        if len(row) != len(rows) or any(row[t + 1 :]):
            raise InvalidInput("matrix", f"row {t}", "must be square and lower-triangular")
    return Dense(tuple(tuple(row[: t + 1]) for t, row in enumerate(rows)))
