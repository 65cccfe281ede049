"""A way to release labels and to learn from the answers, as one value; and the claim it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpfy.accounting import calibrate
from dpfy.core import check, events
from dpfy.core.check import interval
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Adjacency
from dpfy.labels.claim import (
    ALIBI,
    BINS,
    CLUSTERS,
    GAUSSIAN,
    LP_MST,
    METHODS,
    PATE_FM,
    PROJECTION,
    RR,
    LabelClaim,
    LabelResponses,
    LabelSums,
)
from dpfy.labels.evidence import BACKWARD, CORRECTIONS, POSTERIOR

STEPS = 256
"""Of the grid on which numbers are read."""
READS: Mapping[str, tuple[str, ...]] = {
    RR: ("correction", "rounds"),
    LP_MST: ("stages", "correction", "rounds"),
    ALIBI: ("correction", "rounds"),
    BINS: ("stages", "span"),
    CLUSTERS: ("clusters",),
    PROJECTION: (),
    PATE_FM: ("teachers", "asked", "rounds"),
}
"""Which fields each method reads. A field set for a method that ignores it is an error."""
AUTO = "auto"


@dataclass(frozen=True)
class LabelMethod:
    """How labels are released, and how answers are read.

    `stages`: parts of the records that are asked one after the other, the later ones with a prior
    from the earlier. `correction`: what is made of noisy labels (`dpfy.labels.evidence`); auto is
    unbiased targets for randomized response and Bayes' rule for others. `rounds`: how often the
    model is learnt, each time with the prior of the one before (iterative ALIBI). `clusters`: of
    the features. `span`: the public least and largest number, for labels that are numbers.
    `teachers` share the labels, and vote on `asked` records; what is not stated follows from public
    numbers.
    """

    name: str = PROJECTION
    stages: int | None = None
    correction: str = AUTO
    rounds: int = 1
    clusters: int = 256
    span: tuple[float, float] | None = None
    teachers: int | None = None
    asked: int | None = None

    def __post_init__(self) -> None:
        check.one_of("method", self.name, METHODS)
        if self.stages is not None:
            check.integer("stages", self.stages)
        for name, least in (("teachers", 2), ("asked", 1)):
            if getattr(self, name) is not None:
                check.integer(name, getattr(self, name), least=least, most=1 << 20)
        check.one_of("correction", self.correction, (AUTO, *CORRECTIONS))
        check.integer("rounds", self.rounds, most=100)
        check.integer("clusters", self.clusters, most=1 << 16)
        for name, field in self.__dataclass_fields__.items():
            if name not in ("name", *READS[self.name]) and getattr(self, name) != field.default:
                known = ", ".join(READS[self.name]) or "no other field"
                raise InvalidInput(
                    name, getattr(self, name), f"{self.name} does not read it (it reads: {known})"
                )
        if self.name == BINS:
            if self.span is None:
                raise InvalidInput(
                    "span",
                    None,
                    "must be given for rr-on-bins: the public least and largest label, as (low, "
                    "high)",
                )
            object.__setattr__(self, "span", interval("span", self.span))

    @classmethod
    def of(cls, given: LabelMethod | str) -> LabelMethod:
        """A method, or one by its name."""
        return (
            given if isinstance(given, LabelMethod) else cls(check.one_of("method", given, METHODS))
        )

    @property
    def parts(self) -> int:
        """How many stages: two, where nothing is said and there can be more than one."""
        return self.stages or (2 if self.name in (LP_MST, BINS) else 1)

    @property
    def corrected(self) -> str:
        """The correction that is meant."""
        if self.correction != AUTO:
            return self.correction
        return BACKWARD if self.name == RR and self.rounds == 1 else POSTERIOR

    def claim(self, records: int, classes: int, epsilon: float, delta: float) -> LabelClaim:
        """What is promised for labels of so many records: pure epsilon, but for Gaussian sums,
        which take delta.
        """
        check.epsilon("epsilon", epsilon)
        outcomes = STEPS if self.name == BINS else classes
        for name in ("teachers", "asked"):
            if (getattr(self, name) or 0) > records:
                raise InvalidInput(
                    name, getattr(self, name), f"must be at most the number of records ({records})"
                )
        if self.name in GAUSSIAN:
            check.delta("delta", delta)
            noise = calibrate.noise(
                events.Gaussian, epsilon, delta, adjacency=Adjacency.REPLACE_ONE
            )
            return LabelSums(
                self.name,
                outcomes,
                noise_multiplier=noise,
                delta=delta,
                accountant="tight",
                records=records,
            )
        kind = LabelSums if self.name == CLUSTERS else LabelResponses
        return kind(self.name, outcomes, self.parts, epsilon=epsilon, records=records)

    def told(self) -> dict[str, Any]:
        """Its settings, for the card: those that it reads."""
        found: dict[str, Any] = {name: getattr(self, name) for name in READS[self.name]}
        found |= {"correction": self.corrected} if "correction" in found else {}
        found |= {"span": list(self.span)} if self.span is not None else {}
        return {key: value for key, value in found.items() if key != "stages"}
