"""Devices that check in when they can: nobody draws them, and what is promised about them is
enforced as they come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpfy.core import check, participation
from dpfy.core.errors import Unsupported

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class CheckInSampler:
    """Units come by themselves, in any order, `cohort` of them a step on average: each rests for
    `separation` - 1 steps after it took part, and takes part at most `most` times.

    Guarantees: :class:`dpfy.core.participation.Separated`, as long as whoever admits units keeps to
    it (:class:`dpfy.federated.PrivateRounds` does). No randomness is claimed, and who comes may
    depend on who else does: the guarantee is for the contribution of one unit (zero-out).
    """

    cohort: float
    separation: int
    most: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "cohort", check.positive("sampling.cohort", self.cohort))
        check.integer("sampling.separation", self.separation)
        check.integer("sampling.most", self.most)

    @property
    def participation(self) -> participation.Separated:
        """At least `separation` apart, at most `most`."""
        return participation.Separated(self.separation, self.most)

    def expected_batch(self, records: int) -> float:
        """The stated cohort: a public number, however many come."""
        return self.cohort

    def address(self, step: int) -> int:
        """None is used."""
        return 0

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Refused: there is nothing to draw."""
        raise Unsupported(
            "drawing units that check in by themselves",
            "use dpfy.federated.PrivateRounds, and tell it who is there",
        )
