"""An Optuna study that pays for what it looks at: its objective trains in a trial of dpfy, and
`optimize` here stands for its own.

    def objective(trial):
        rate = trial.suggest_float("rate", 0.05, 5, log=True)              # as before plan =
        trial.planned(dpfy.dpsgd(RECORDS, 256, steps=100))          # the noise that the search pays
        for dpfy.fit(net, trial.train(data), plan=plan, run=trial.run, optimizer=...) return
        accuracy(net, public)

    found = optimize(study, objective, recipes=[dpfy.dpsgd(RECORDS, 256, steps=100)],
    terms=Terms(...), run="runs/tuned")

Samplers that look at earlier trials, and pruners, are paid by composition: then the study holds
every trial. With a random number of trials settings are drawn by Optuna's random sampler, and the
study is given the selected trial, alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dpfy.core import check, errors
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.data.lazy import LazyRecords
from dpfy.data.owners import Owned
from dpfy.data.records import Records
from dpfy.plan.recipe import Plan, Recipe
from dpfy.report import card
from dpfy.runs.run import Run
from dpfy.tuning.claim import TUNING
from dpfy.tuning.routes import COMPOSITION, SUBSET
from dpfy.tuning.run import Execution, Tuned, tune
from dpfy.tuning.sealed import WORST, SealedRun, TrialResult
from dpfy.tuning.space import Settings
from dpfy.tuning.terms import SearchSettings
from dpfy.tuning.trial import Pruned, Trial

try:
    import optuna
    from optuna import distributions
except ImportError:
    raise errors.missing("searches by Optuna", "optuna") from None

OWN, DRAWN, PRUNED = "dpfy", "distributions", "pruned"
PUBLIC, PRIVATE = "public", "private"
Suggest = Callable[[str, distributions.BaseDistribution], Any]


class PrivateTrial:
    """What the objective is given: Optuna's suggestions, and the plan, the run and the records of a
    trial of dpfy.
    """

    def __init__(self, trial: Trial, suggest: Suggest) -> None:
        self._trial, self._suggest, self._ends, self.step = trial, suggest, False, 0
        trial.notes[DRAWN] = {}

    @property
    def params(self) -> Settings:
        """The settings drawn so far."""
        return dict(self._trial.settings)

    @property
    def number(self) -> int:
        """Which trial of the search this is."""
        return self._trial.number

    @property
    def plan(self) -> Plan:
        """What the trial does to the data, once it is `planned`."""
        return self._trial.plan

    @property
    def run(self) -> SealedRun:
        """The folder to train in, once the trial is `planned`."""
        return self._trial.run

    @property
    def device(self) -> str:
        """Where to train."""
        return self._trial.device

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """A number from `low` to `high`."""
        return float(self._drawn(name, distributions.FloatDistribution(low, high, log, step)))

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """A whole number from `low` to `high`."""
        return int(self._drawn(name, distributions.IntDistribution(low, high, log, step)))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """One of `choices`: numbers, texts, true or false."""
        return self._drawn(name, distributions.CategoricalDistribution(choices))

    def planned(self, recipe: Recipe) -> Plan:
        """The plan of one of the recipes that the search was given; the clip norm may be
        another.
        """
        return self._trial.planned(recipe)

    def train(self, data: object) -> Records | Owned | LazyRecords:
        """The records that this trial trains on."""
        return self._trial.train(data)

    def valid(self, data: object) -> Records:
        """The private records that the score is of: see :meth:`dpfy.tuning.trial.Trial.valid`."""
        return self._trial.valid(data)

    def count(self, right: int | Tensor) -> float:
        """The score on private records, with noise where it is charged: see
        :meth:`dpfy.tuning.trial.Trial.count`.
        """
        return self._trial.count(right)

    def report(self, value: float, step: int) -> None:
        """How the trial does so far, on public records, for the pruner. Refused where the search
        does not pay for it.
        """
        self.step = check.integer("step", step, least=0)
        self._ends = self._trial.report(value)

    def should_prune(self) -> bool:
        """Whether the pruner would end the trial: then raise optuna.TrialPruned."""
        return self._ends

    def _drawn(self, name: str, distribution: distributions.BaseDistribution) -> Any:
        held = self._trial.notes[DRAWN]
        written = distributions.distribution_to_json(distribution)
        if held.setdefault(name, written) != written:
            raise InvalidInput(name, written, "was drawn from another range before in this trial")
        if name not in self._trial.settings:
            self._trial.drew(name, self._suggest(name, distribution))
        return self._trial.settings[name]


@dataclass(frozen=True)
class _Independent:
    """The objective of a search whose trials know nothing of each other: each draws for itself. It
    can be taken to other processes.
    """

    objective: Callable[[PrivateTrial], float]
    sign: float

    def __call__(self, trial: Trial) -> float:
        sampler = optuna.samplers.RandomSampler(
            int(np.random.randint(2**31))
        )  # the generator begins with the trial's own secret

        def suggest(name: str, distribution: distributions.BaseDistribution) -> Any:
            return sampler.sample_independent(None, None, name, distribution)  # type: ignore[arg-type]

        try:
            return self.sign * float(self.objective(PrivateTrial(trial, suggest)))
        except optuna.TrialPruned:
            raise Pruned from None


@dataclass
class StudyEngine:
    """A study as an engine: trials are asked of it, in this process, and it is told of all that are
    made: they are charged.
    """

    study: Any
    objective: Callable[[PrivateTrial], float]
    run: str
    sign: float
    live: dict[int, tuple[Any, PrivateTrial]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The sampler, and the pruner."""
        return f"optuna {type(self.study.sampler).__name__}"

    @property
    def adaptive(self) -> bool:
        """Whether the sampler may look at earlier trials: every one but the random sampler."""
        return type(self.study.sampler) is not optuna.samplers.RandomSampler

    def ask(self, number: int, rng: np.random.Generator, begun: Settings | None = None) -> Settings:
        """Settings are drawn while the trial runs; those drawn before a crash are kept."""
        return {} if begun is None else begun

    def __call__(self, trial: Trial) -> float:
        """The objective, with suggestions of the study."""
        live = self.study.ask()
        live.set_user_attr(OWN, self._tag(trial.number))
        given = PrivateTrial(trial, _suggestions(live))
        self.live[trial.number] = (live, given)
        try:
            return self.sign * float(self.objective(given))
        except optuna.TrialPruned:
            trial.notes[PRUNED] = True
            raise Pruned from None

    def tell(self, number: int, row: TrialResult) -> None:
        """Give a trial that is over to the study, unless it holds it already."""
        tags = {t.user_attrs.get(OWN): t.state for t in self.study.get_trials(deepcopy=False)}
        (live, _), done = self.live.pop(number, (None, None)), optuna.trial.TrialState.COMPLETE
        if live is None and tags.get(self._tag(number)) in (done, optuna.trial.TrialState.PRUNED):
            return
        made = self._made(number, row)
        if live is not None and dict(live.params) == made.params:
            self.study.tell(live, made.value if made.state is done else None, state=made.state)
            return
        if live is not None:  # some of its settings were drawn before a crash
            self.study.tell(live, state=optuna.trial.TrialState.FAIL)
        self.study.add_trial(made)

    def prune(self, number: int, score: float) -> bool:
        """What the study's pruner says of a trial under way."""
        live, given = self.live[number]
        live.report(score, given.step)
        return bool(live.should_prune())

    def _tag(self, number: int) -> str:
        return f"{self.run}:{number}"

    def _made(self, number: int, row: TrialResult) -> Any:
        state = optuna.trial.TrialState.COMPLETE
        if row.score == WORST:
            state = (
                optuna.trial.TrialState.PRUNED
                if row.notes.get(PRUNED)
                else optuna.trial.TrialState.FAIL
            )
        return _frozen(
            row.settings, row.notes.get(DRAWN, {}), self.sign * row.score, state, self._tag(number)
        )


def _suggestions(live: Any) -> Suggest:
    """The suggestions of a trial of a study."""

    def suggest(name: str, asked: distributions.BaseDistribution) -> Any:
        if isinstance(asked, distributions.FloatDistribution):
            return live.suggest_float(name, asked.low, asked.high, step=asked.step, log=asked.log)
        if isinstance(asked, distributions.IntDistribution):
            return live.suggest_int(name, asked.low, asked.high, step=asked.step, log=asked.log)
        assert isinstance(asked, distributions.CategoricalDistribution)
        return live.suggest_categorical(name, asked.choices)

    return suggest


def _frozen(
    settings: Settings, drawn: Mapping[str, str], value: float, state: Any, tag: str
) -> Any:
    ranges = {name: distributions.json_to_distribution(drawn[name]) for name in settings}
    told = value if state is optuna.trial.TrialState.COMPLETE else None
    return optuna.trial.create_trial(
        state=state, value=told, params=dict(settings), distributions=ranges, user_attrs={OWN: tag}
    )


def optimize(
    study: Any,
    objective: Callable[[PrivateTrial], float],
    *,
    recipes: Sequence[Recipe],
    terms: SearchSettings,
    run: Run | str | Path,
    work: Execution | None = None,
    earlier_trials: str = PRIVATE,
) -> Tuned:
    """`study.optimize`, within a budget for everything: a run folder whose report covers the search.

    `objective` draws settings as before, says what it does to the data (`trial.planned(recipe)`, one
    of `recipes` but for the clip norm), trains by `trial.plan` in `trial.run`, and returns its
    value. The number of trials is that of `terms`. A study that holds trials already is refused,
    unless they are of public data (`earlier_trials="public"`): their values would be used and are
    not paid for.

    Guarantees: those of :func:`dpfy.tuning.run.tune`. By composition the study holds every trial,
    all of them charged. By the other routes trials are drawn by Optuna's random sampler from the
    run's own secret, and the study, its storage included, is given the selected one.
    """
    place, work = Run.of(run), work or Execution()
    tag = hashlib.sha256(str(Path(place.path).resolve()).encode()).hexdigest()[:16]
    _require_own(
        study, terms, place, tag, check.one_of("earlier_trials", earlier_trials, (PRIVATE, PUBLIC))
    )
    sign = 1.0 if study.direction is optuna.study.StudyDirection.MAXIMIZE else -1.0
    engine = StudyEngine(study, objective, tag, sign)
    if terms.route == COMPOSITION:
        if work.workers > 1 or work.pool is not None:
            raise Unsupported(
                "a study whose trials are made in several processes",
                "use one worker, or a random number of trials (route random)",
            )
        _fail_left(study, tag)
        return tune(engine, None, recipes, terms, place, engine=engine, work=work)
    if engine.adaptive:
        raise Unsupported(
            f"the sampler {type(study.sampler).__name__} under the route {terms.route!r}, whose "
            f"theorem is about independent settings,",
            "search with optuna.samplers.RandomSampler, or pay by composition (route composition)",
        )
    found = tune(
        _Independent(objective, sign), None, recipes, terms, place, engine=engine, work=work
    )
    _give(study, found, sign, f"{tag}:selected")
    return found


def _require_own(study: Any, terms: SearchSettings, place: Run, tag: str, earlier: str) -> None:
    if len(study.directions) > 1:
        raise Unsupported(
            "a study of several objectives",
            "search for one of them: one score is what a trial is selected by",
        )
    if terms.route == SUBSET:
        raise Unsupported(
            "a search on a subset whose settings Optuna draws",
            "use dpfy.tuning.run.tune with a space of settings",
        )
    others = [
        t
        for t in study.get_trials(deepcopy=False)
        if not str(t.user_attrs.get(OWN, "")).startswith(f"{tag}:")
    ]
    again = [t for t in study.get_trials(deepcopy=False) if t not in others]
    if (others and earlier == PRIVATE) or (again and not place.resume):
        rule = (
            "the study holds trials that this search does not pay for: use a new study, or "
            "earlier_trials='public' if they are public"
        )
        raise InvalidInput("study", f"{len(others) + len(again)} trials", rule)


def _fail_left(study: Any, tag: str) -> None:
    """Trials that a crash left under way in a study that is stored are made again as others."""
    for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        if str(trial.user_attrs.get(OWN, "")).startswith(f"{tag}:"):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)


def _give(study: Any, found: Tuned, sign: float, tag: str) -> None:
    """The selected trial, to the study."""
    held = {t.user_attrs.get(OWN) for t in study.get_trials(deepcopy=False)}
    part = card.section(found.report, TUNING)
    if found.settings is None or tag in held or not isinstance(part.get("score"), int | float):
        return
    value, complete = sign * float(part["score"]), optuna.trial.TrialState.COMPLETE
    if math.isfinite(value):
        study.add_trial(_frozen(found.settings, part["notes"][DRAWN], value, complete, tag))
