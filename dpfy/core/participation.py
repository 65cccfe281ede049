"""How often, and with which randomness, one unit may take part in training. Samplers promise it; accounting and noise read it.

Every pattern is frozen data. A sampler that cannot keep the promise must not hand out the pattern.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpfy.core import check


@dataclass(frozen=True)
class Poisson:
    """At every step each unit takes part independently with probability `rate`; rate 1 is full batch."""

    rate: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", check.rate("participation.rate", self.rate))


Participation = Poisson
"""The union of all patterns; grows with the samplers."""
