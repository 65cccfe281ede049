"""What an audit says: a lower bound with its confidence and assumptions, and how it stands to the
claim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from dpfy.core import check
from dpfy.core.codec import number

LOOK_FIRST = (
    "noise scale against clip norm, then the sampler against the charged rate, then the number of "
    "steps; "
    "`dpfy audit selftest` names the check that isolates each"
)


@dataclass(frozen=True)
class LowerBound:
    """A lower bound on epsilon at `delta`, above the truth with probability at most 1 -
    `confidence` under `assumptions`.
    """

    epsilon: float
    delta: float
    confidence: float
    method: str
    canaries: int
    assumptions: tuple[str, ...]
    detail: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check.inside_unit("confidence", self.confidence)
        if not math.isinf(self.epsilon):
            check.nonnegative("epsilon", self.epsilon)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "epsilon_lower": number(self.epsilon),
            "delta": self.delta,
            "confidence": self.confidence,
            "method": self.method,
            "canaries": self.canaries,
            "assumptions": list(self.assumptions),
            "detail": {k: number(v) for k, v in self.detail.items()},
        }


@dataclass(frozen=True)
class AuditVerdict:
    """A lower bound beside the epsilon that was claimed at the same delta.

    `violated` means: at the given confidence the claim is false. Not violated proves nothing
    beyond the bound.
    """

    bound: LowerBound
    claimed: float
    shows: str = ""
    does_not_show: str = ""

    @property
    def violated(self) -> bool:
        """Whether the measured leak is more than was claimed."""
        return self.bound.epsilon > self.claimed

    @property
    def sentence(self) -> str:
        """The result in words, with what to look at first where it is bad."""
        b = self.bound
        measured = f"at least {b.epsilon:.3f}" if math.isfinite(b.epsilon) else "unbounded"
        start = (
            f"epsilon is {measured} at delta {b.delta:g} with {b.confidence:.0%} confidence "
            f"({b.method}, {b.canaries} canaries)"
        )
        if self.violated:
            return (
                f"VIOLATED: {start}, above the claimed {self.claimed:.3f}. Look first at: "
                f"{LOOK_FIRST}."
            )
        return f"{start}; claimed {self.claimed:.3f}: no contradiction."

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        share = self.bound.epsilon / self.claimed if 0 < self.claimed < math.inf else None
        return self.bound.to_json() | {
            "epsilon_claimed": number(self.claimed),
            "share_of_claim": number(share),
            "violated": self.violated,
            "sentence": self.sentence,
            "shows": self.shows,
            "does_not_show": self.does_not_show,
        }
