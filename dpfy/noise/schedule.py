"""Independent noise whose size changes from phase to phase of a run: a diagonal matrix. DP-SGD is
the schedule of one phase.

The noise of one step as a sum over draws and over what was released before: what exact noise
asks of a strategy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import Participation, Poisson, WithoutReplacement
from dpfy.noise.strategy import Grads, Identity, Recurrence, Recurrent, State, Strategy
from dpfy.noise.tree import Tree

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Schedule(Recurrent):
    """Fresh noise at every step, `factors[k]` times as large in phase k, which lasts `lengths[k]`
    steps. Fixed before the run.

    The least factor is 1, so that the plan's noise multiplier is what every step has at least;
    calibration scales the whole schedule.

    Guarantees: the noise of a step is its own draw times the factor of its phase, and
    :meth:`phases` counts the same steps at the same factors: what is charged is what is added. A
    step beyond the last phase is refused.
    """

    lengths: tuple[int, ...]
    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "lengths", tuple(check.integer("phase length", n) for n in self.lengths)
        )
        object.__setattr__(
            self, "factors", tuple(check.positive("noise factor", f) for f in self.factors)
        )
        if not self.lengths or len(self.lengths) != len(self.factors):
            raise InvalidInput(
                "noise factors",
                self.factors,
                f"must be as many as the phases ({len(self.lengths)}), at least one",
            )
        if min(self.factors) != 1:
            raise InvalidInput(
                "noise factors",
                self.factors,
                "must have 1 as the least (`given_phases` divides by the least)",
            )

    @property
    def steps(self) -> int:
        """The steps of all phases together."""
        return sum(self.lengths)

    def factor(self, step: int) -> float:
        """The factor of `step`."""
        self._covers(step + 1)
        return self.factors[bisect_right(list(accumulate(self.lengths)), step)]

    def phases(self, steps: int) -> list[tuple[int, float]]:
        """(steps, factor) of each phase that the first `steps` steps touch."""
        self._covers(steps)
        starts = accumulate(self.lengths, initial=0)
        cut = [
            (min(n, steps - start), f)
            for start, n, f in zip(starts, self.lengths, self.factors, strict=False)
        ]
        return [(n, f) for n, f in cut if n > 0]

    def sensitivity(self, participation: Participation, steps: int) -> float:
        """1 where every step is sampled afresh: steps are composed by the accountant, each at its
        own noise.
        """
        self._covers(steps)
        if isinstance(participation, Poisson | WithoutReplacement):
            return 1.0
        raise Unsupported(
            f"a noise schedule with {type(participation).__name__} participation",
            "use Poisson sampling, or a constant noise multiplier",
        )

    def init(self, like: Grads) -> State:
        """Nothing to remember."""
        return {}

    def recurrence(self, step: int) -> Recurrence:
        """The step's own draw times the factor of its phase."""
        return Recurrence(gain=self.factor(step))

    def noise_matrix(self, steps: int) -> NDArray[np.float64]:
        """The factors on a diagonal."""
        import numpy as np

        return np.diag([self.factor(step) for step in range(steps)])

    def buffers(self, steps: int) -> int:
        """None."""
        return 0

    def _covers(self, steps: int) -> None:
        if steps > self.steps:
            raise InvalidInput(
                "steps", steps, f"must be at most the {self.steps} steps of the noise schedule"
            )


def equal_phases(steps: int, relative: Sequence[float]) -> Schedule:
    """As many phases as there are values, as long as each other up to a step, with noise in these
    proportions.
    """
    count = len(relative)
    if not 1 <= count <= check.integer("steps", steps):
        raise InvalidInput(
            "noise factors",
            tuple(relative),
            f"must be at least one and at most the steps ({steps})",
        )
    edges = [k * steps // count for k in range(count + 1)]
    return given_phases(tuple(b - a for a, b in pairwise(edges)), relative)


def given_phases(lengths: Sequence[int], relative: Sequence[float]) -> Schedule:
    """Phases of these lengths with noise in these proportions."""
    values = [check.positive("noise factor", f) for f in relative]
    return Schedule(tuple(lengths), tuple(f / min(values) for f in values))


Term = tuple[float, int]
"""A weight, and the address of the draw that it multiplies."""
WAY_OUT = (
    "use independent noise, band-mf, blt, a banded inverse or a tree with the estimator "
    '"completed"; or noise="float"'
)


@dataclass(frozen=True)
class NoiseTerms:
    """Noise at unit scale: the sum of `weight` times the draw at `address` over `draws`, plus,
    where `past` is given, its gain times the weighted rows that it remembers. `alone`: no step asks
    for the draw of another, so that a draw may be made in any one way.
    """

    draws: tuple[Term, ...]
    past: Recurrence | None = None
    alone: bool = False

    @property
    def size(self) -> float:
        """The sum of the sizes of all weights."""
        return sum(abs(w) for w, _ in self.draws)


def of(strategy: Strategy, step: int) -> NoiseTerms:
    """The terms of `step`; strategies whose noise cannot be written so are refused."""
    if isinstance(strategy, Recurrent):
        r = strategy.recurrence(step)
        again = tuple((r.fresh * weight, step - 1 - back) for back, weight in enumerate(r.again))
        return NoiseTerms(
            ((r.fresh, step), *again),
            r if r.weights else None,
            isinstance(strategy, Identity | Schedule),
        )
    require(strategy)
    assert isinstance(strategy, Tree)
    return NoiseTerms(
        tuple(sorted(((w, at) for at, w in strategy.nodes(step).items()), key=lambda term: term[1]))
    )


def require(strategy: Strategy) -> None:
    """Refuse strategies that exact noise does not know."""
    if not isinstance(strategy, Recurrent) and not (
        isinstance(strategy, Tree) and strategy.estimator == "completed"
    ):
        what = (
            f"{type(strategy).__name__} ({strategy.estimator})"
            if isinstance(strategy, Tree)
            else type(strategy).__name__
        )
        raise Unsupported(f"exact noise for the strategy {what}", WAY_OUT)
