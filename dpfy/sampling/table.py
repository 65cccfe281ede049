"""The samplers by name, for plans in JSON."""

from __future__ import annotations

from dpfy.sampling.poisson import PoissonSampler

SAMPLERS: dict[str, type] = {"poisson": PoissonSampler}
