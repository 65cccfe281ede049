"""What a search promises, as its reservation states it before any data is read: everything that it
costs, and the run that it keeps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dpfy.core import check, events
from dpfy.core.claim import STATED, YES, Assumption, Claim, register
from dpfy.core.codec import Codec
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Adjacency, Unit
from dpfy.plan.claim import TrainingClaim
from dpfy.plan.recipe import Plan
from dpfy.tuning.routes import (
    HELD_OUT,
    LAWS,
    NOISY_MAX,
    PUBLIC,
    SUBSET,
    TRAINED_ON,
    CalibratedSearch,
    SearchRoute,
)
from dpfy.tuning.space import Space

TUNING = "tuning"
SEARCH, ASKED, TRIALS = "search.json", "search.toml", "trials.jsonl"
FILES = (SEARCH, ASKED, "config.toml", "schema.toml", "metrics.jsonl", TRIALS, "model.safetensors")
PAYMENT = Codec("payment", {"payment": SearchRoute})
SCORED = {
    PUBLIC: "on public records, exactly",
    HELD_OUT: "on private records that were held out of training, with noise of their own",
    TRAINED_ON: "on the training records, with noise, paid for beside training",
}
LARGE_FACTOR = 2.0
"""How many times the noise of a run without a search a trial may have before a reader is warned."""


@register
@dataclass(frozen=True)
class Tuning(Claim):
    """The claim of a search and of the run that it selects: one event for both. `space` is what was
    searched, in words by name.

    `seed` is the public seed of settings that are no secret.
    """

    paid: CalibratedSearch
    space: Mapping[str, str] = field(hash=False)
    engine: str = "random"
    seed: int | None = None
    unit: Unit = field(init=False, repr=False, compare=False)
    adjacency: Adjacency = field(init=False, repr=False, compare=False)
    records: int = field(init=False, repr=False, compare=False)
    delta: float = field(init=False, repr=False, compare=False)
    accountant: str = field(init=False, repr=False, compare=False)

    kind: ClassVar[str] = TUNING
    name: ClassVar[str] = TUNING
    purpose: ClassVar[str] = "tuning"
    artefacts: ClassVar[tuple[str, ...]] = FILES

    def __post_init__(self) -> None:
        plans = (*self.paid.alone, *self.paid.plans)
        for owner, names in (
            (plans[0].recipe, ("unit", "adjacency", "records")),
            (plans[0], ("delta", "accountant")),
        ):
            for name in names:
                object.__setattr__(self, name, getattr(owner, name))
        for plan in plans:
            for what in ("unit", "adjacency"):
                if getattr(plan.recipe, what) != getattr(plans[0].recipe, what):
                    raise InvalidInput(
                        f"search {what}",
                        getattr(plan.recipe, what),
                        "must be the same in all trials: they have one report",
                    )
        if self.paid.payment.adjacency is not self.adjacency:
            raise InvalidInput(
                "payment.adjacency",
                self.paid.payment.adjacency.value,
                f"must be that of the trials ({self.adjacency.value})",
            )

    @property
    def payment(self) -> SearchRoute:
        """How the search is paid for."""
        return self.paid.payment

    @property
    def event(self) -> events.Event:
        """All that trials, scores and the run that is kept release."""
        return self.paid.event

    def trained(self, facts: Mapping[str, Any]) -> events.Event:
        """What the run that is released would cost by itself, had its settings been known; that of
        any kind, before it is known which.
        """
        if "selected_kind" in facts:
            return self._selected(facts).event
        return events.one_of(plan.event for plan in self.paid.alone)

    def _selected(self, facts: Mapping[str, Any]) -> Plan:
        place = check.integer(
            "selected_kind", facts.get("selected_kind", 0), least=0, most=len(self.paid.alone) - 1
        )
        return self.paid.alone[place]

    def check_group(self, size: int) -> None:
        """See `Recipe.check_group`."""
        for plan in (*self.paid.plans, *self.paid.finals):
            plan.recipe.check_group(size)

    def files(self) -> Mapping[str, bytes]:
        """The search, to be read without the ledger."""
        return {SEARCH: (json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n").encode()}

    def describe(self) -> dict[str, Any]:
        """What was searched, and how it was paid for."""
        payment = self.payment
        law = law_of(payment)
        return {
            "title": "The search for settings",
            "words": told_words(payment),
            "search": {
                "route": payment.route,
                "trials": payment.trials,
                **({"law": law} if payment.random else {}),
                "score": SCORED[payment.score],
                "engine": self.engine,
                "shown": payment.shows,
                "space": dict(self.space),
                "axes": Space.read(self.space).axes() if self.space else [],
                "kinds": [_kind(plan) for plan in self.paid.plans],
            },
        }

    def assumptions(self, facts: Mapping[str, Any]) -> Sequence[Assumption]:
        """What the charge assumes of the search, then what it assumes of the run that is released."""
        return [
            *assumed(self.payment, self.unit),
            *TrainingClaim(self._selected(facts)).assumptions(facts),
        ]

    def warnings(self, facts: Mapping[str, Any]) -> Sequence[str]:
        """Whether the search may have cost more than it gave."""
        bill = facts.get("bill", {})
        found = list(TrainingClaim(self._selected(facts)).warnings(facts))
        if isinstance(ratio := bill.get("noise_ratio"), float) and ratio >= LARGE_FACTOR:
            found.append(
                f"The search multiplied the noise of the released run by {ratio:.3g}: it was worth "
                f"it only if the settings it found gain "
                f"more than {ratio:.3g} times as many records would."
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """The claim as JSON; `from_json` gives an equal one."""
        paid = self.paid
        return {
            "payment": PAYMENT.encode(paid.payment),
            "plans": [plan.to_json() for plan in paid.plans],
            "finals": [plan.to_json() for plan in paid.finals],
            "score": None if paid.score is None else events.CODEC.encode(paid.score),
            "counts": list(paid.counts),
            "space": dict(self.space),
            "engine": self.engine,
            "seed": self.seed,
        }

    @classmethod
    def from_json(cls, data: Any) -> Tuning:
        """The claim that `to_json` wrote."""
        check.known_keys(
            "claim",
            data,
            ("payment", "plans", "finals", "score", "counts", "space", "engine", "seed"),
        )
        plans, finals = (
            tuple(Plan.from_json(one) for one in data[key]) for key in ("plans", "finals")
        )
        if not plans:
            raise InvalidInput("claim.plans", [], "must hold at least one plan")
        payment = PAYMENT.decode(data["payment"])
        if not isinstance(payment, SearchRoute):
            raise InvalidInput("claim.payment", data["payment"], "must be a payment")
        score = None if data["score"] is None else events.decode(data["score"])
        counts = tuple(check.integer("claim.counts", n, least=0) for n in data["counts"])
        space = {
            check.one_line("claim.space", str(k)): check.one_line("claim.space", v, 4000)
            for k, v in dict(data["space"]).items()
        }
        seed = None if data["seed"] is None else check.integer("claim.seed", data["seed"], least=0)
        return cls(
            CalibratedSearch(payment, plans, finals, score, counts),
            space,
            check.one_line("claim.engine", data["engine"]),
            seed,
        )


def law_of(payment: SearchRoute) -> str:
    """The law of the number of trials, in words."""
    shapes = (name for name, shape in LAWS.items() if shape == payment.shape)
    return next(shapes, f"shape {payment.shape:g}")


def told_words(payment: SearchRoute) -> str:
    """How a search was paid for, in words."""
    law = law_of(payment)
    number = (
        f"a random number of trials, {payment.trials:g} on average ({law})"
        if payment.random
        else f"{payment.trials:g} trials"
    )
    scored = f"scored {SCORED[payment.score]}"
    if payment.route == SUBSET:
        return (
            f"On a random sample of the records (each with probability {payment.sample:g}) "
            f"{number} were made, {scored}; the settings "
            "of the best one, scaled, trained the model on all records. Sample, number of "
            "trials and the others are known to nobody."
        )
    if payment.random:
        return (
            f"Settings were drawn at random for {number}, each trained with the noise below, "
            f"{scored}, and the best one is released. "
            "How many there were, and everything about the others, is known to nobody: that is "
            "what makes it cheap."
        )
    if payment.route == NOISY_MAX:
        return (
            f"All of {number} are charged; the best one was drawn by the exponential mechanism, "
            f"{scored}."
        )
    return f"All of {number} are charged, {scored}, and may be shown; the best one is released."


def assumed(payment: SearchRoute, unit: Unit) -> list[Assumption]:
    """What the charge assumes of a search: of its settings, its trials and its scores."""
    return [*_settings_and_trials(payment), _scores(payment, unit)]


def _settings_and_trials(payment: SearchRoute) -> list[Assumption]:
    if not payment.random:
        done = (
            "whatever proposed settings saw released values alone"
            if payment.adaptive
            else "all settings were drawn before the data was read"
        )
        return [
            Assumption(
                "settings",
                "settings follow from public things, or from what was released before",
                done,
                YES,
            )
        ]
    rows = [
        Assumption(
            "settings",
            "the settings of each trial are drawn independently, with replacement, from one "
            "public space",
            "drawn by dpfy from the run's own secret; a search that looks at scores is refused",
            YES,
        ),
        Assumption(
            "number of trials",
            f"it has the given law (mean {payment.trials:g}), was drawn before the first "
            f"trial, and nobody learns it",
            "drawn exactly from the run's own secret; neither the number nor the time that "
            "trials took is written down",
            YES,
        ),
        Assumption(
            "the others",
            "nothing of a trial that was not selected is released",
            "kept with the run's secrets, and erased with them",
            YES,
        ),
    ]
    if payment.route == SUBSET:
        done = "every record tossed a coin of its own, from the run's own secret"
        rows.append(
            Assumption(
                "subset",
                f"each record is in the sample with probability {payment.sample:g}, in secret",
                done,
                YES,
            )
        )
    return rows


def _scores(payment: SearchRoute, unit: Unit) -> Assumption:
    if payment.score == PUBLIC:
        return Assumption(
            "score",
            "a trial is scored by what it released and by public records alone",
            "the validation records were declared public",
            STATED,
        )
    counted = (
        ""
        if unit.most_records == 1
        else "; a unit counts once, with the share of its records that is right"
    )
    if payment.score == HELD_OUT:
        return Assumption(
            "score",
            "no unit is in training and in validation, and in which of them depends on nothing "
            "else",
            "every unit tossed a coin of its own, once, from the run's own secret" + counted,
            YES,
        )
    done = "charged beside every trial" + counted
    return Assumption(
        "score", "a score on training records is one more release from them", done, YES
    )


def _kind(plan: Plan) -> dict[str, Any]:
    """What one kind of trials does to the data."""
    recipe = plan.recipe
    return {
        "batch": recipe.expected_batch,
        "steps": recipe.steps,
        "records": recipe.records,
        "noise_multiplier": plan.noise_multiplier,
    }


@register
@dataclass(frozen=True)
class PublicTuning(Claim):
    """A search on public data, beside the claim of the training that uses what it found: it
    releases nothing of anybody.
    """

    space: Mapping[str, str] = field(hash=False)
    trials: int
    data: str
    engine: str = "random"

    kind: ClassVar[str] = "public-tuning"
    purpose: ClassVar[str] = "tuning"
    artefacts: ClassVar[tuple[str, ...]] = (TRIALS,)

    @property
    def event(self) -> events.Event:
        """Nothing of the private data."""
        return events.Nothing()

    def assumptions(self, facts: Mapping[str, Any]) -> Sequence[Assumption]:
        """That the data is what it is called."""
        done = f"declared so by anyone who ran it: {self.data}"
        return [Assumption("public data", "the search saw public data alone", done, STATED)]

    def describe(self) -> dict[str, Any]:
        """What was searched."""
        return {
            "title": "The search for settings",
            "words": f"Settings were searched for on public data ({self.data}), with the noise "
            f"that the run on private data has. It costs "
            "nothing.",
            "search": {
                "route": "public",
                "trials": self.trials,
                "engine": self.engine,
                "space": dict(self.space),
                "shown": "all of it",
            },
        }

    def to_json(self) -> dict[str, Any]:
        """Every field."""
        return {
            "space": dict(self.space), "trials": self.trials, "data": self.data, "engine": self.engine, "unit": self.unit.to_json(),  # noqa: E501
            "adjacency": self.adjacency.value, "delta": self.delta, "accountant": self.accountant, "records": self.records,  # noqa: E501
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Any) -> PublicTuning:
        """The claim that `to_json` wrote."""
        keys = (
            "space",
            "trials",
            "data",
            "engine",
            "unit",
            "adjacency",
            "delta",
            "accountant",
            "records",
        )
        check.known_keys("claim", data, keys)
        space = {
            check.one_line("claim.space", str(k)): check.one_line("claim.space", v, 4000)
            for k, v in dict(data["space"]).items()
        }
        about = {key: data[key] for key in ("adjacency", "delta", "accountant", "records")}
        trials = check.integer("claim.trials", data["trials"])
        return cls(
            space,
            trials,
            check.one_line("claim.data", data["data"]),
            data["engine"],
            unit=Unit(**data["unit"]),
            **about,
        )


def shape_of(law: str) -> float:
    """The shape of a law by its name."""
    return LAWS[check.one_of("law", law, LAWS)]
