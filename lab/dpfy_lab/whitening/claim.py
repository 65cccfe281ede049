"""The claim of private moments: what a release of first and second moments of features promises.
Importing this imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dpfy.core.claim import YES, Assumption, GaussianClaim, register


@register
@dataclass(frozen=True)
class MomentsClaim(GaussianClaim):
    """One Gaussian release of sums to which each record adds a vector of bounded length, for
    centring and whitening features.
    """

    kind: ClassVar[str] = "moments"
    purpose: ClassVar[str] = "statistics"

    def assumptions(self, facts: object) -> list[Assumption]:
        """Every record has length one."""
        return [
            Assumption(
                "moments",
                "one record adds at most the bound",
                "every record was divided by its own length",
                YES,
            )
        ]

    def describe(self) -> dict[str, Any]:
        """What was released."""
        return {
            "title": "Moments of the features",
            "words": "Sums of the features and of their products, with noise; features are centred "
            "and whitened with them.",
            "noise_multiplier": self.noise_multiplier,
        }
