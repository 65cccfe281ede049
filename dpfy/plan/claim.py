"""What a training run promises, and what its evaluation does, as their reservations state it before
any data is read.

Facts that change the charge are here and nowhere else: the whole plan, and whether batches are formed
outside of dpfy. Verification compares report and plan with this, field by field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dpfy import accounting
from dpfy.accounting.rules import amplified, unsampled
from dpfy.core import check, errors, events
from dpfy.core import unit as patterns
from dpfy.core.claim import (
    NEARLY,
    NO,
    STATED,
    YES,
    Assumption,
    Claim,
    GaussianClaim,
    register,
    stop_after,
)
from dpfy.core.codec import number
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.unit import Adjacency, Unit
from dpfy.noise.shares import Shares
from dpfy.plan import pairs
from dpfy.plan.recipe import EXACT, FLOAT, RECORD, Plan

MOST_WORDS = 200
PUBLIC, NOTHING, SEARCHED = (
    "declared public",
    "nothing by the caller",
    "searched for copies of records",
)
ADDED = {
    FLOAT: "noise is drawn and added in floating point",
    EXACT: "every released value is the lattice point of sum + noise as real numbers: floating "
    "point found it where its error could "
    "not matter, real arithmetic elsewhere, so that the bits have the law that is charged (the sum "
    "itself is a floating-point one)",
}
"""What was done about the bits of the noise."""
EX_POST = (
    "The guarantee is given after the fact (ex post): the chance that a loss exceeds the epsilon "
    "given where the run ended is counted in "
    "delta, over all points at which it could have ended. Before the run, the epsilon of all of "
    "its steps holds."
)
GROUPED = (
    " Records are drawn one by one, and all of a unit are hidden together: a step moves by as many "
    "clip norms as records of it were drawn, "
    "a mixture of Gaussians (Charles et al. 2024; Chua et al. 2024)."
)
NOT_CHECKED = "not checked by replay at all steps"
"""How a report begins to say that the isolation of examples is assumed and not shown."""

SIMULATED = "simulated"
"""How the words on a secure aggregation begin that was none."""
RELEASED = "every noisy step, and so every intermediate model and average; not the last model alone"


@dataclass(frozen=True)
class ForeignBatches:
    """Batches that are formed outside of dpfy: what is done, in words, and in how many steps one
    unit takes part at most, if known.
    """

    done: str
    most: int | None = None

    def __post_init__(self) -> None:
        if (
            not isinstance(self.done, str)
            or not self.done.strip()
            or not self.done.isprintable()
            or len(self.done) > MOST_WORDS
        ):
            raise InvalidInput(
                "batches.done",
                self.done,
                f"must say in 1 to {MOST_WORDS} printable characters how batches are formed",
            )
        if self.most is not None:
            check.integer("batches.most", self.most)


def _taught_by(teacher: Mapping[str, Any]) -> str:
    """Whose data the epsilon of a student covers, and what covers the teacher's."""
    own = "Epsilon covers the records that the student was trained on, and no others."
    if not teacher.get("protected"):
        return f"{own} The teacher has no privacy report with an epsilon: the teacher's data are not protected."
    return (
        f"{own} The teacher's data are covered by the teacher's own report (digest "
        f"{str(teacher.get('report'))[:16]}). "
        f"Anyone who is in both data sets is covered by both together."
    )


@register
@dataclass(frozen=True)
class TrainingClaim(Claim):
    """The claim of a training run: a plan, and how its batches are formed where dpfy does not form
    them.

    Guarantees: `event` is what the run must be charged for; batches formed elsewhere earn no
    amplification, and their bound on participation never makes the charge smaller than that of the
    batches that dpfy would draw.
    """

    plan: Plan
    batches: ForeignBatches | None = None
    unit: Unit = field(init=False, repr=False, compare=False)
    adjacency: Adjacency = field(init=False, repr=False, compare=False)
    records: int = field(init=False, repr=False, compare=False)
    delta: float = field(init=False, repr=False, compare=False)
    accountant: str = field(init=False, repr=False, compare=False)

    kind: ClassVar[str] = "training"
    name: ClassVar[str] = "training"
    purpose: ClassVar[str] = "training"
    boundary: ClassVar[str] = "B4"
    artefacts: ClassVar[tuple[str, ...]] = (
        "plan.json",
        "config.toml",
        "schema.toml",
        "metrics.jsonl",
        "model.safetensors",
    )

    def __post_init__(self) -> None:
        plan = self.plan
        for owner, names in (
            (plan.recipe, ("unit", "adjacency", "records")),
            (plan, ("delta", "accountant")),
        ):
            for name in names:
                object.__setattr__(self, name, getattr(owner, name))
        if self.batches is not None and plan.recipe.stopping is not None:
            raise InvalidInput(
                "batches.done",
                self.batches.done,
                "must be formed by dpfy where a run may end early",
            )
        if self.batches is None or self.batches.most is None:
            return
        stated = accounting.epsilon(
            self.event, plan.delta, adjacency=plan.recipe.adjacency, accountant=plan.accountant
        )
        if stated < plan.epsilon:
            rule = (
                f"would make epsilon {stated:.3g} of {plan.epsilon:.3g}: where units take part "
                f"that seldom, plan a sampler that says so"
            )
            raise InvalidInput("batches.most", self.batches.most, rule)

    @property
    def event(self) -> events.Event:
        """What is charged."""
        return (
            self.plan.event
            if self.batches is None
            else unsampled(self.plan.event, self.batches.most)
        )

    @property
    def releases(self) -> int:
        """One a step."""
        return self.plan.recipe.steps

    @property
    def stops(self) -> Mapping[int, events.Event]:
        """The points of a plan that may end early."""
        recipe = self.plan.recipe
        points = () if recipe.stopping is None else recipe.stopping.early
        return {point: recipe.event(self.plan.noise_multiplier, point) for point in points}

    @property
    def caveats(self) -> tuple[str, ...]:
        """That a guarantee is given after the fact, where it is."""
        stopping = self.plan.recipe.stopping
        if stopping is None:
            return ()
        points = len(stopping.points)
        return (
            f"the run could end at {points} points fixed in advance, and what ended it was seen in "
            f"released values alone",
        )

    def check_group(self, size: int) -> None:
        """See `Recipe.check_group`."""
        self.plan.recipe.check_group(size)

    def files(self) -> Mapping[str, bytes]:
        """The plan, to be read without the ledger."""
        return {
            "plan.json": (json.dumps(self.plan.to_json(), indent=1, sort_keys=True) + "\n").encode()
        }

    def assumptions(self, facts: Mapping[str, Any]) -> Sequence[Assumption]:
        """Every assumption of the accounting, what was done, and whether it holds."""
        return [
            self._sampling(),
            self._contribution(),
            self._arithmetic(),
            self._end(),
            *self._shared(facts),
            *_of_the_caller(facts),
        ]

    @property
    def trust(self) -> str:
        """Distributed where clients add the noise."""
        return "central" if self._shares is None else "distributed"

    @property
    def trusted(self) -> str:
        """Who must be trusted, in one sentence."""
        if self._shares is None:
            return super().trusted
        return (
            f"The secure aggregation must show only the sum of a round, and at least "
            f"{self._shares.least} honest clients of every "
            "round must add their share of the noise and keep it to themselves; the server is "
            "trusted with neither updates nor noise."
        )

    @property
    def _shares(self) -> Shares | None:
        strategy = self.plan.recipe.strategy
        return strategy if isinstance(strategy, Shares) else None

    def _shared(self, facts: Mapping[str, Any]) -> list[Assumption]:
        """What is assumed of clients and their protocol where the noise is theirs."""
        if self._shares is None:
            return []
        least, done = self._shares.least, facts.get("aggregation", SIMULATED)
        return [
            Assumption(
                "secure aggregation",
                "nobody sees anything of a round but the sum over all clients in it",
                done,
                NO if done.startswith(SIMULATED) else STATED,
            ),
            Assumption(
                "honest clients", f"at least {least} clients of every round added their share and "
                                  f"showed nobody",
                f"a round with fewer than {least} answers was refused, and nothing of it was "
                f"released", STATED,
            ),
        ]  # fmt: skip

    def _contribution(self) -> Assumption:
        recipe = self.plan.recipe
        clip, unit = recipe.clip.bound.l2, recipe.unit
        if recipe.draw == RECORD:
            assumed = (
                f"one record adds at most the clip norm {clip:g} to a step, and one {unit.name} "
                f"owns at most {unit.most_records}"
            )
            done = (
                f"every record's gradient was clipped; of each {unit.name} at most "
                f"{unit.most_records} records were kept, chosen once"
            )
            return Assumption("contribution", assumed, done, YES)
        assumed = f"one unit adds at most the clip norm {clip:g} to a step"
        return Assumption("contribution", assumed, "every unit's gradient was clipped", YES)

    def _end(self) -> Assumption:
        stopping = self.plan.recipe.stopping
        if stopping is None:
            assumed = "the number of steps was fixed before the data was read"
            return Assumption("steps", assumed, "reserved in the ledger before the first step", YES)
        points = ", ".join(map(str, stopping.points))
        return Assumption(
            "steps",
            "the run ends at one of some points fixed before the data was read, for reasons that "
            "are in what was released, or public",
            f"it is charged as ending after {points} steps, whichever comes next; what ended it is "
            f"the caller's own rule",
            STATED,
        )

    def _arithmetic(self) -> Assumption:
        if self._shares is not None:
            done = "whole numbers of the given law, drawn exactly, added to whole numbers"
            return Assumption(
                "arithmetic", "shares of noise are whole numbers, drawn exactly", done, YES
            )
        exact = self.plan.recipe.noise == EXACT
        return Assumption(
            "arithmetic",
            "noise is a real number drawn exactly",
            ADDED[self.plan.recipe.noise],
            YES if exact else NEARLY,
        )

    def _sampling(self) -> Assumption:
        planned = self.plan.recipe.sampler.participation.words
        if self.batches is not None:
            return Assumption("sampling", planned, self.batches.done, NO)
        if amplified(self.plan.event):
            return Assumption(
                "sampling",
                f"{planned}, kept secret",
                f"{planned}; drawn by dpfy from the run's own secret",
                YES,
            )
        return Assumption(
            "sampling",
            f"nothing secret about who takes part when; {planned}",
            f"{planned}; formed by dpfy",
            YES,
        )

    def warnings(self, facts: Mapping[str, Any]) -> Sequence[str]:
        """What a reader must know about the sampling of this run, and about its end."""
        found = []
        if self.batches is not None:
            found.append(
                f"Batches were not drawn as the accounting would need for amplification "
                f"({self.batches.done}). The given epsilon is "
                "the one without amplification."
            )
        elif not isinstance(pattern := self.plan.recipe.sampler.participation, patterns.Poisson):
            known = (
                "The accounting is made for this pattern."
                if amplified(self.plan.event)
                else "No amplification is claimed."
            )
            found.append(f"Batches were not Poisson samples ({pattern.words}). {known}")
        if (done := facts.get("steps_done", self.releases)) < self.releases:
            billed = stop_after(self.stops, done)
            how = f"{billed} of them are charged" if billed else "all of them are charged"
            found.append(f"The run ended after {done} of {self.releases} steps; {how}.")
        if self.stops:
            found.append(EX_POST)
        if str(checked := facts.get("components", {}).get("checked", "")).startswith(NOT_CHECKED):
            found.append(
                f"Whether examples mix was {checked}. The guarantee assumes that they do not."
            )
        if isinstance(teacher := facts.get("teacher"), Mapping):
            found.append(_taught_by(teacher))
        return found

    def describe(self) -> dict[str, Any]:
        """What was done to the data."""
        recipe, plan = self.plan.recipe, self.plan
        encoded = plan.to_json()["recipe"]
        theorem = pairs.find(recipe.sampler.participation, recipe.strategy).theorem + (
            GROUPED if recipe.draw == RECORD else ""
        )
        return {
            "title": "Training",
            "released": RELEASED,
            "theorem": theorem,
            "sampling_note": self._note(),
            "mechanism": {
                "noise_multiplier": plan.noise_multiplier,
                "stddev": plan.stddev,
                "clip_norm": number(recipe.clip.bound.l2),
                "expected_batch": recipe.expected_batch,
                "records": recipe.records,
                "steps": recipe.steps,
                "epochs": recipe.steps * recipe.expected_batch / recipe.records,
                "sampling": encoded["sampler"],
                "sampling_words": recipe.sampler.participation.words,
                "strategy": encoded["strategy"]["kind"],
                **({"noise": ADDED[recipe.noise]} if recipe.noise != FLOAT else {}),
                **(
                    {}
                    if self._shares is None
                    else {"noise": self._shares.words(plan.noise_multiplier)}
                ),
                **({} if recipe.stopping is None else {"stopping": list(recipe.stopping.points)}),
                "noise_on_average": plan.stddev / recipe.expected_batch,
                "theorem": theorem,
            },
        }

    def _note(self) -> dict[str, Any]:
        """Batches formed elsewhere: what it takes to compute the guarantee again from the report
        alone.
        """
        if self.batches is None:
            return {"absent": "batches were formed by dpfy, as the plan says"}
        return {"done": self.batches.done} | (
            {"most": self.batches.most} if self.batches.most else {}
        )

    def to_json(self) -> dict[str, Any]:
        """The claim as JSON; `from_json` gives an equal one."""
        batches = (
            None if self.batches is None else {"done": self.batches.done, "most": self.batches.most}
        )
        return {"plan": self.plan.to_json(), "batches": batches}

    @classmethod
    def from_json(cls, data: Any) -> TrainingClaim:
        """The claim that `to_json` wrote."""
        check.known_keys("claim", data, ("plan", "batches"))
        batches = data["batches"]
        return cls(
            Plan.from_json(data["plan"]),
            None if batches is None else ForeignBatches(batches["done"], batches["most"]),
        )


def _of_the_caller(facts: Mapping[str, Any]) -> list[Assumption]:
    """What no library can see in somebody else's program: assumed because the caller states it, by
    running the program.
    """
    optimizer = facts.get("optimizer", {})
    began = (
        "began with a state that the caller declared public"
        if optimizer.get("initial_state") == PUBLIC
        else "began empty"
    )
    weights = {
        SEARCHED: "; initial weights and buffers were searched for exact copies of records and for "
        "exact statistics of all of them",
        PUBLIC: "; the caller declared initial weights and buffers public, and they were not "
        "searched for records",
    }.get(optimizer.get("initial_weights", ""), "")
    rows = [
        Assumption(
            "the caller's code",
            "nothing computed from the data reaches the model, or anything that is published, but "
            "through the noise",
            "torch's counters of writes to weights, frozen weights, buffers and the optimizer's "
            "state were compared at every step, their "
            "contents at the first four steps, at the last and at about one in thirty-two of the "
            "others; a change found there that the "
            "run had not made would have ended it; optimizer settings followed a schedule known "
            "when the run began; what the program "
            "prints, stores or decides by looking at the data is not watched",
            STATED,
        ),
        Assumption(
            "the beginning",
            "initial weights and settings were chosen without the data",
            f"they were given by the caller; the optimizer {began}{weights}",
            STATED,
        ),
    ]
    if optimizer.get("projection", "none") != "none":
        assumed = (
            "the rule that changes the weights after each step reads the weights and nothing else"
        )
        rows.append(
            Assumption("projection", assumed, "the rule is the caller's own function", STATED)
        )
    if isinstance(statistics := facts.get("model", {}).get("statistics"), list):
        assumed = "the statistics that layers normalise by are public, or were released with noise"
        rows.append(
            Assumption(
                "normalisation", assumed, f"declared by the caller: {'; '.join(statistics)}", STATED
            )
        )
    if (recorded := facts.get("recorded", NOTHING)) != NOTHING:
        assumed = f"the numbers that the caller recorded may be published: {recorded}"
        done = "they stand in metrics.jsonl; losses of the batch are refused where recognised"
        rows.append(Assumption("recorded", assumed, done, STATED))
    return rows


def counted_once(unit: Unit) -> str:
    """How a unit with several records counts in an evaluation, as a sentence; nothing for others."""
    if unit.most_records == 1:
        return ""
    return f" One {unit.name} counts once, with the mean over their held-out records."


@register
@dataclass(frozen=True)
class EvaluationClaim(GaussianClaim):
    """The claim of a charged evaluation on private held-out records: counts of right and wrong
    answers, or bounded losses, with noise.
    """

    kind: ClassVar[str] = "evaluation"
    purpose: ClassVar[str] = "evaluation"
    given_as: ClassVar[str] = "evaluation noise_multiplier"

    def describe(self) -> dict[str, Any]:
        """What was measured, and how."""
        return {
            "title": "Evaluation on private records",
            "words": "Counts of right and wrong answers of the released model, and of each class "
            "taken for each class, or sums of its "
            "losses up to a given bound, with noise." + counted_once(self.unit),
            "noise_multiplier": self.noise_multiplier,
        }


def read_plan(file: str, data: Any) -> Plan:
    """The plan in JSON that a file holds; `Corrupt` where it is none."""
    try:
        return Plan.from_json(data)
    except errors.UNREADABLE as problem:
        raise Corrupt(file, f"is not a plan ({errors.why(problem)})") from None
