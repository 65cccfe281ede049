"""The claim of one fit: every release of it, with its noise, fixed before a record is read.
Importing this imports no scikit-learn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from dpfy.core import check, events
from dpfy.core.claim import STATED, YES, Assumption, Claim, register
from dpfy.core.codec import Codec
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import EXAMPLE, Unit

FILE = "estimator.safetensors"
MOST_DOMAIN, MOST_RELEASES = 1000, 1 << 24
NOISES = {
    events.Gaussian: "Gaussian noise on a public grid, drawn exactly",
    events.Laplace: "Laplace noise on a public grid, drawn exactly",
    events.BoundedRange: "the exponential mechanism over public candidates, drawn exactly",
    events.ObjectivePerturbation: "a Gaussian linear term in the objective, drawn on a grid of "
    "2^-40 deviations",
}


@dataclass(frozen=True)
class ReleaseRound:
    """Releases of one kind: so many, each of them `event`, on what one unit changes by at most
    `bound`.

    The bound is the L2 norm for Gaussian noise and the L1 norm for Laplace noise, of what adding or
    removing a unit moves; where a unit is replaced, half of what that moves. For a choice it is the
    largest change of a score.
    """

    name: str
    event: events.Event
    bound: float
    releases: int = 1

    def __post_init__(self) -> None:
        check.one_line("round.name", self.name, 80)
        check.positive("round.bound", self.bound)
        check.integer("round.releases", self.releases, most=MOST_RELEASES)

    @property
    def scale(self) -> float:
        """The scale of the noise in the units of the sum; of a choice, how much better a score must
        be to be e times as likely.
        """
        if isinstance(self.event, events.Gaussian | events.Laplace | events.ObjectivePerturbation):
            return self.event.noise_multiplier * self.bound
        if isinstance(self.event, events.BoundedRange):
            return 2 * self.bound / self.event.epsilon
        return 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise on a sum, in its units."""
        return self.scale * (math.sqrt(2) if isinstance(self.event, events.Laplace) else 1.0)


def together(rounds: Sequence[ReleaseRound]) -> events.Event:
    """The charge of all rounds. Gaussian releases beside the minimum of a perturbed objective are
    part of its event, which is exact.
    """
    parts = tuple(events.Repeated(r.event, r.releases) for r in rounds)
    minima = [
        r.event
        for r in rounds
        if isinstance(r.event, events.ObjectivePerturbation) and r.releases == 1
    ]
    noises = [
        (r.event.noise_multiplier, r.releases)
        for r in rounds
        if isinstance(r.event, events.Gaussian)
    ]
    if len(minima) != 1 or len(minima) + len(noises) < len(rounds):
        return events.Composed(parts)
    squares = minima[0].beside ** 2 + sum(many / noise**2 for noise, many in noises)
    return replace(minima[0], beside=math.sqrt(squares) * (1 + 2.0**-50))


@dataclass(frozen=True)
class ProofCondition:
    """What a proof needs, and how the program saw to it; `stated` where only the caller can
    know.
    """

    what: str
    needed: str
    done: str
    stated: bool = False

    def __post_init__(self) -> None:
        for name in ("what", "needed", "done"):
            check.one_line(f"condition.{name}", getattr(self, name), 400)


@register
@dataclass(frozen=True)
class FitClaim(Claim):
    """One fit of one estimator: all its releases are one charge, whichever of them are made.

    `domain` is all that is public about columns and target: other bounds are another claim.
    `settings` are the settings of the estimator, as text. Rounds may depend on what earlier ones
    released; what each costs is fixed here.
    """

    estimator: str
    domain: str
    settings: tuple[tuple[str, str], ...]
    rounds: tuple[ReleaseRound, ...]
    conditions: tuple[ProofCondition, ...] = ()

    kind: ClassVar[str] = "fit"
    purpose: ClassVar[str] = "training"
    artefacts: ClassVar[tuple[str, ...]] = (FILE,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_line("estimator", self.estimator, 80)
        check.one_line("domain", self.domain, MOST_DOMAIN + 40)
        if (
            not isinstance(self.rounds, tuple)
            or not all(isinstance(r, ReleaseRound) for r in self.rounds)
            or not self.rounds
        ):
            raise InvalidInput("rounds", self.rounds, "must be at least one round")
        names = [r.name for r in self.rounds]
        if len(set(names)) < len(names):
            raise InvalidInput("rounds", names, "must have different names")
        if not isinstance(self.conditions, tuple) or not all(
            isinstance(c, ProofCondition) for c in self.conditions
        ):
            raise InvalidInput("conditions", self.conditions, "must be conditions")
        for key, value in self.settings:
            check.one_line("settings", key)
            check.one_line(f"settings.{key}", value, 2000)

    @property
    def name(self) -> str:
        """One fit in a folder."""
        return f"fit {self.estimator}"

    @property
    def releases(self) -> int:
        """Of all rounds."""
        return sum(r.releases for r in self.rounds)

    @property
    def event(self) -> events.Event:
        """All rounds, each as often as it is released."""
        return together(self.rounds)

    @property
    def caveats(self) -> tuple[str, ...]:
        """Where persons are protected: whose a record is is taken from its name."""
        if self.unit == EXAMPLE:
            return ()
        most = f"{self.unit.most_records:,}"
        return (f"all records of a person have one name, of which at most {most} are used",)

    def first_step(self, name: str) -> tuple[ReleaseRound, int]:
        """A round by its name, and the step of its first release."""
        at = 0
        for r in self.rounds:
            if r.name == name:
                return r, at
            at += r.releases
        raise InvalidInput(
            "round", name, f"was not reserved ({', '.join(r.name for r in self.rounds)})"
        )

    def assumptions(self, facts: Mapping[str, Any]) -> Sequence[Assumption]:
        """Contributions are bounded, the domain is public, and what else the proof of the solver
        needs.
        """
        one = "one record adds" if self.unit == EXAMPLE else "the records of one person add"
        return [
            Assumption(
                "contribution",
                f"what {one} to a release has at most the norm that the noise was made for",
                "records were moved into their public ranges and rounded to a grid, and sums were "
                "made without rounding",
                YES,
            ),
            *(
                Assumption(c.what, c.needed, c.done, STATED if c.stated else YES)
                for c in self.conditions
            ),
        ]

    def describe(self) -> dict[str, Any]:
        """The section of the report."""
        return {
            "title": f"A private fit of {self.estimator}",
            "estimator": self.estimator,
            "domain": self.domain,
            "settings": dict(self.settings),
            "rounds": [
                {
                    "name": r.name,
                    "releases": r.releases,
                    "noise": NOISES.get(type(r.event), "as its event says"),
                    "event": events.CODEC.encode(r.event),
                    "bound": r.bound,
                    "scale": r.scale,
                }
                for r in self.rounds
            ],
        }

    def to_json(self) -> dict[str, Any]:
        """Every field."""
        held: dict[str, Any] = _CODEC.encode(self)
        return held

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """The claim that `to_json` wrote, equal to it."""
        read = _CODEC.decode(data)
        if not isinstance(read, cls):
            raise InvalidInput("claim.kind", data, f"must be {cls.kind}")
        return read


_CODEC = Codec(
    "claim",
    {"fit": FitClaim, "unit": Unit, "round": ReleaseRound, "condition": ProofCondition}
    | events.CODEC.table,
)
