"""The samplers by name, for plans in JSON."""

from __future__ import annotations

from dpfy.sampling.check_in import CheckInSampler
from dpfy.sampling.fixed_size import WithoutReplacementSampler
from dpfy.sampling.poisson import PoissonSampler
from dpfy.sampling.scheduled import (
    BallsInBinsSampler,
    CyclicPoissonSampler,
    FixedOrderSampler,
    ReshuffledSampler,
    SeparatedSampler,
)

SAMPLERS: dict[str, type] = {
    "poisson": PoissonSampler,
    "without-replacement": WithoutReplacementSampler,
    "fixed-order": FixedOrderSampler,
    "reshuffled": ReshuffledSampler,
    "balls-in-bins": BallsInBinsSampler,
    "cyclic-poisson": CyclicPoissonSampler,
    "separated": SeparatedSampler,
    "check-in": CheckInSampler,
}
