"""The samplers by name, for plans in JSON."""

from __future__ import annotations

from dpfy.sampling.poisson import PoissonSampler
from dpfy.sampling.slots import BallsInBinsSampler, CyclicPoissonSampler, FixedOrderSampler, ReshuffledSampler, SeparatedSampler

SAMPLERS: dict[str, type] = {
    "poisson": PoissonSampler,
    "fixed-order": FixedOrderSampler,
    "reshuffled": ReshuffledSampler,
    "balls-in-bins": BallsInBinsSampler,
    "cyclic-poisson": CyclicPoissonSampler,
    "separated": SeparatedSampler,
}
