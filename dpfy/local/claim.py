"""What a collection of local reports promises each person who reports, with or without a
shuffler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from dpfy.core import check, events
from dpfy.core.claim import NEARLY, NO, STATED, TRUSTS, YES, Assumption, Claim, register
from dpfy.core.codec import Codec
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import Adjacency, Unit
from dpfy.local.frequencies import (
    HadamardResponse,
    KaryResponse,
    LocalHashing,
    Rappor,
    UnaryEncoding,
)
from dpfy.local.means import DuchiMean, LaplaceMean, PrivUnit
from dpfy.local.protocol import Protocol

FILE = "estimate.json"
PERSON = Unit("user", protects="user")
PROTOCOLS: dict[str, type[Protocol]] = {
    "k-ary-response": KaryResponse,
    "unary-encoding": UnaryEncoding,
    "rappor": Rappor,
    "local-hashing": LocalHashing,
    "hadamard-response": HadamardResponse,
    "laplace-mean": LaplaceMean,
    "duchi-mean": DuchiMean,
    "priv-unit": PrivUnit,
}
SIMULATED = (
    "Anyone who simulated the devices held every value and must be trusted with it; "
    "on devices of their own, people would trust nobody else."
)


@dataclass(frozen=True)
class DeviceClaim(Claim):
    """What is promised of a value that is randomised by itself: for replacing it, without a delta,
    of one contribution.
    """

    adjacency: Adjacency = field(default=Adjacency.REPLACE_ONE, kw_only=True)
    delta: float = field(default=0.0, kw_only=True)
    accountant: str = field(default="basic", kw_only=True)

    boundary: ClassVar[str] = "B3"


@register
@dataclass(frozen=True)
class LocalClaim(DeviceClaim):
    """One report from each person by `protocol`, in answer to `question`: pure epsilon for each of
    them.

    `simulated`: the reports were made in the process that collects them, which then held all
    values: the trust is central.
    """

    question: str
    protocol: Protocol
    simulated: bool = False
    unit: Unit = field(default=PERSON, kw_only=True)

    kind: ClassVar[str] = "local"
    purpose: ClassVar[str] = "statistics"
    artefacts: ClassVar[tuple[str, ...]] = (FILE,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_line("question", self.question, 160)
        if type(self.protocol) not in PROTOCOLS.values():
            raise InvalidInput("protocol", self.protocol, f"must be one of {', '.join(PROTOCOLS)}")
        if not isinstance(self.simulated, bool):
            raise InvalidInput("simulated", self.simulated, "must be true or false")
        if self.adjacency is Adjacency.ADD_OR_REMOVE_ONE:
            raise InvalidInput(
                "adjacency",
                self.adjacency.value,
                "must be replace-one or zero-out: that somebody reports is seen",
            )

    @property
    def name(self) -> str:
        """The question."""
        return f"{self.kind} {self.question}"

    @property
    def trust(self) -> str:
        """Nobody but one's own device, unless the devices were simulated."""
        return "central" if self.simulated else "local"

    @property
    def trusted(self) -> str:
        """Who must be trusted, in one sentence."""
        return SIMULATED if self.simulated else TRUSTS[self.trust]

    @property
    def event(self) -> events.Event:
        """What a person's one report costs."""
        return self.protocol.event

    def assumptions(self, facts: Mapping[str, Any]) -> list[Assumption]:
        """Who randomised what, and how exactly."""
        device = (
            "in one process that held all values"
            if self.simulated
            else "as the sender of each report says"
        )
        exact = (
            "drawn from numbers of 53 bits and rounded to a public grid"
            if isinstance(self.protocol, PrivUnit)
            else "drawn exactly"
        )
        return [
            Assumption(
                "device",
                "a value is randomised before it leaves its owner",
                device,
                NO if self.simulated else STATED,
            ),
            Assumption(
                "reports",
                "a person reports once",
                "every report was counted as another person's",
                YES if self.simulated else STATED,
            ),
            Assumption(
                "chances",
                "the chances of reports are those of the protocol",
                exact,
                YES if exact == "drawn exactly" else NEARLY,
            ),
        ]

    def describe(self) -> dict[str, Any]:
        """The section of the report."""
        name = {kind: name for name, kind in PROTOCOLS.items()}[type(self.protocol)]
        held: dict[str, Any] = {
            "title": f"Local reports: {self.question}",
            "question": self.question,
            "protocol": name,
        }
        held |= {"epsilon_of_one_report": self.protocol.epsilon}
        if isinstance(self.protocol, Rappor):
            held["epsilon_of_one_report"] = self.protocol.once
            held["epsilon_of_all_reports"] = self.protocol.epsilon
        return held

    def to_json(self) -> dict[str, Any]:
        """Every field."""
        held: dict[str, Any] = _codec(type(self)).encode(self)
        return held

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """The claim that `to_json` wrote, equal to it."""
        read = _codec(cls).decode(data)
        if not isinstance(read, cls):
            raise InvalidInput("claim.kind", data, f"must be {cls.kind}")
        return read


@register
@dataclass(frozen=True)
class ShuffledClaim(LocalClaim):
    """The same behind a `shuffler`, who is named: `records` reports in an order that tells nothing.

    Guarantees: amplification is claimed here and nowhere else, for a public number of reports that
    `collect` compares with what came.
    """

    shuffler: str = field(kw_only=True)
    records: int = field(kw_only=True)
    delta: float = field(kw_only=True)
    accountant: str = field(default="tight", kw_only=True)

    kind: ClassVar[str] = "shuffled"
    boundary: ClassVar[str] = "B4"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_line("shuffler", self.shuffler, 100)
        if isinstance(self.protocol, Rappor):
            raise Unsupported(
                "Rappor behind a shuffler",
                "reports of one kept row can be distinguished from others; use UnaryEncoding, once",
            )

    @property
    def trust(self) -> str:
        """The shuffler too, unless the devices were simulated."""
        return "central" if self.simulated else "shuffled"

    @property
    def trusted(self) -> str:
        """Who must be trusted, by name."""
        if self.simulated:
            return SIMULATED.replace(
                "nobody else", f"nobody else but the shuffler, {self.shuffler}"
            )
        return (
            f"Nobody must be trusted but one's own device, the shuffler, {self.shuffler}, to put "
            f"the reports in a random order and to show "
            "nobody whose each is, and the devices of others, to randomise theirs."
        )

    @property
    def event(self) -> events.Event:
        """All reports behind the shuffler, as one person sees them."""
        answers = self.protocol.buckets if isinstance(self.protocol, KaryResponse) else 0
        return events.Shuffled(self.protocol.epsilon, self.records, answers)

    @property
    def caveats(self) -> tuple[str, ...]:
        """What only the shuffler can keep."""
        return (
            f"the shuffler, {self.shuffler}, shows nobody whose each report is",
            f"{self.records:,} reports are real ones",
        )

    def assumptions(self, facts: Mapping[str, Any]) -> list[Assumption]:
        """The shuffle too."""
        shuffle = Assumption(
            "shuffle",
            "nobody sees who reported what before the shuffle",
            f"as {self.shuffler} says",
            STATED,
        )
        others = Assumption(
            "others",
            "the other reports are randomised too: they hide this one",
            "as their senders say",
            STATED,
        )
        return [*super().assumptions(facts), shuffle, others]


def _codec(cls: type[LocalClaim]) -> Codec:
    return Codec("claim", {cls.kind: cls, "unit": Unit, **PROTOCOLS})
