"""What a release of labels promises: each label answers one question, once; features are public.
Importing this imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dpfy.core import check, events
from dpfy.core.claim import STATED, YES, Assumption, Claim, register
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Adjacency, Unit
from dpfy.mechanisms.response import RandomizedResponseMechanism

LABEL = Unit("label", protects="label")
"""The unit: the label of one record. What else the record holds is public."""
ANSWERS, MODEL, SCHEMA = "answers.safetensors", "model.safetensors", "schema.toml"
MOST_OUTCOMES, MOST_STAGES = 4096, 20

RR, LP_MST, ALIBI, BINS, CLUSTERS, PROJECTION = (
    "rr",
    "lp-mst",
    "alibi",
    "rr-on-bins",
    "clusters",
    "projection",
)
PATE_FM = "pate-fm"
GAUSSIAN = (PROJECTION, PATE_FM)
"""Methods whose noise is Gaussian: (epsilon, delta)."""
METHODS = {
    RR: "every label is replaced by a uniform one with a public chance (Warner 1965)",
    LP_MST: "labels are randomised among the likeliest classes of a model that the stages before "
    "have trained (Ghazi et al. 2021)",
    ALIBI: "Laplace noise on one-hot labels, made distributions by Bayes' rule (Malek Esmaeili et "
    "al. 2021)",
    BINS: "numbers are put into bins that suit their distribution, and the bins are randomised "
    "(Ghazi et al. 2022)",
    CLUSTERS: "labels are counted in clusters of the public features, with integer Laplace noise "
    "(after Esfandiari et al. 2022)",
    PROJECTION: "labels are summed along public directions, with Gaussian noise; all else is done "
    "with the public features",
    PATE_FM: "teachers with disjoint parts of the labels and all features vote, with Gaussian "
    "noise (after Malek Esmaeili et al. 2021)",
}
"""How labels are released, in words."""
EXPOSED = (
    "Features are not protected: a model may hold those of single records (as a kernel's "
    "landmarks); publishing it publishes them."
)


@dataclass(frozen=True)
class LabelClaim(Claim):
    """Labels of `records` records, released by `method`: pure `epsilon`, or for Gaussian noise the
    `noise_multiplier` in its place.

    `outcomes` is the public number of classes, or of the steps of the grid on which numbers are
    read. The records are parted, by their number alone, into `stages` parts, and each label takes
    part in the one question that is asked of its part.
    """

    method: str
    outcomes: int
    stages: int = 1
    epsilon: float | None = None
    noise_multiplier: float | None = None
    unit: Unit = field(default=LABEL, kw_only=True)
    adjacency: Adjacency = field(default=Adjacency.REPLACE_ONE, kw_only=True)
    delta: float = field(default=0.0, kw_only=True)
    accountant: str = field(default="basic", kw_only=True)

    purpose: ClassVar[str] = "training"
    artefacts: ClassVar[tuple[str, ...]] = (ANSWERS, MODEL, SCHEMA)
    methods: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of("method", self.method, self.methods)
        check.integer("outcomes", self.outcomes, least=2, most=MOST_OUTCOMES)
        check.integer("stages", self.stages, most=MOST_STAGES)
        if self.stages > 1 and self.method not in (LP_MST, BINS):
            raise InvalidInput(
                "stages",
                self.stages,
                f"must be 1 for {self.method}: all labels answer the same question",
            )
        if self.records is None:
            raise InvalidInput(
                "records", None, "must be given: that a record has a label is public"
            )
        if self.unit.protects != "label" or self.adjacency is not Adjacency.REPLACE_ONE:
            raise InvalidInput(
                "adjacency",
                self.adjacency.value,
                "must be replace-one, of labels: that a record has one is public",
            )
        gaussian = self.method in GAUSSIAN
        if gaussian != (self.epsilon is None) or gaussian == (self.noise_multiplier is None):
            rule = "takes noise_multiplier alone" if gaussian else "takes epsilon alone"
            raise InvalidInput("epsilon", self.epsilon, f"{self.method} {rule}")
        if gaussian == (self.delta == 0):
            rule = (
                "must be above 0 for Gaussian noise"
                if gaussian
                else "must be 0: the guarantee is pure"
            )
            raise InvalidInput("delta", self.delta, rule)
        _ = self.event

    @property
    def name(self) -> str:
        """One release of labels in a folder."""
        return "labels"

    @property
    def releases(self) -> int:
        """One question for each stage."""
        return self.stages

    @property
    def event(self) -> events.Event:
        """The whole charge for one label.

        In stages a label takes part in one of them: what was asked before does not depend on it,
        and what is asked after depends on it through its answer alone. So all stages together cost
        what one does.
        """
        if self.noise_multiplier is not None:
            return events.Gaussian(
                check.noise_multiplier(
                    "noise_multiplier", check.positive("noise_multiplier", self.noise_multiplier)
                )
            )
        epsilon = check.epsilon("epsilon", self.epsilon)
        if self.method == RR:
            return RandomizedResponseMechanism.of(epsilon, self.outcomes).event
        return (
            events.Laplace(laplace_multiplier(epsilon))
            if self.method == ALIBI
            else events.EpsilonDelta(epsilon)
        )

    @property
    def trusted(self) -> str:
        """Who must be trusted, in one sentence."""
        return (
            "Anyone who holds the labels must be trusted, to keep them and to release them as described; "
            "nobody who sees what is released."
        )

    def assumptions(self, facts: Mapping[str, Any]) -> Sequence[Assumption]:
        """What is public, and what a label can change."""
        taken = (
            "a label is taken out of its place when its question is asked, and cannot be taken "
            "again"
        )
        follows = (
            "questions are made by code that is given public features and earlier answers alone"
        )
        return [
            Assumption("labels", "a label takes part in one question", taken, YES),
            Assumption(
                "questions",
                "what is asked does not depend on labels that were not released",
                follows,
                YES,
            ),
            Assumption(
                "features",
                "what is known of a record beside its label is public",
                "as the user says",
                STATED,
            ),
            Assumption(
                "chances",
                "noise and chances are those of the charge",
                "drawn exactly, from integers and fractions",
                YES,
            ),
        ]

    def warnings(self, facts: Mapping[str, Any]) -> Sequence[str]:
        """What is not protected."""
        return (EXPOSED,)

    def describe(self) -> dict[str, Any]:
        """The section of the report."""
        amount = (
            {"epsilon": self.epsilon}
            if self.noise_multiplier is None
            else {"noise_multiplier": self.noise_multiplier}
        )
        words = METHODS[self.method]
        stages = (
            f" The records are parted into {self.stages}; each part is asked once."
            if self.stages > 1
            else ""
        )
        return {
            "title": "Labels",
            "words": f"{words[0].upper()}{words[1:]}.{stages} Training saw what was released, and "
            f"never the labels.",
            "method": self.method,
            "outcomes": self.outcomes,
            "stages": self.stages,
            **amount,
        }


def laplace_multiplier(epsilon: float) -> float:
    """Laplace noise for a pure epsilon, in bounds of one label, of which replacing it moves two:
    rounded up.
    """
    return math.nextafter(2 / epsilon, math.inf)


@register
@dataclass(frozen=True)
class LabelResponses(LabelClaim):
    """An answer for every single label, which may be seen by itself."""

    kind: ClassVar[str] = "label-responses"
    boundary: ClassVar[str] = "B3"
    methods: ClassVar[tuple[str, ...]] = (RR, LP_MST, ALIBI, BINS)


@register
@dataclass(frozen=True)
class LabelSums(LabelClaim):
    """Sums over many labels, or votes: noise is on the sums, and a single label has no answer of
    its own.
    """

    kind: ClassVar[str] = "label-sums"
    boundary: ClassVar[str] = "B4"
    methods: ClassVar[tuple[str, ...]] = (CLUSTERS, *GAUSSIAN)
