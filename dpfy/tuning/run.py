"""A search from its terms to the run folder: plan, reserve, draw, try, select, report. In this
order.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dpfy.accounting import rdp
from dpfy.core import events, storage
from dpfy.core.errors import Corrupt, InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.storage import PRIVATE_MODE, create, write_atomically
from dpfy.core.values import Bound, Bounded, Permit
from dpfy.mechanisms.candidates import PrivateSelection
from dpfy.mechanisms.choice import Exponential
from dpfy.mechanisms.mechanism import source
from dpfy.plan.recipe import Plan, Recipe
from dpfy.plan.stopping import first_steps
from dpfy.report import card
from dpfy.runs.folder import LEDGER, RunFolder, complete, held_claims
from dpfy.runs.mark import SEARCH_LOG
from dpfy.runs.released import Released
from dpfy.runs.run import Run
from dpfy.tuning import outcome
from dpfy.tuning.claim import TUNING, PublicTuning, Tuning
from dpfy.tuning.routes import (
    COMPOSITION,
    NOISY_MAX,
    RANDOM,
    SUBSET,
    CalibratedSearch,
    SearchRoute,
    calibrate_search,
    points,
)
from dpfy.tuning.sealed import TrialResult, TrialRights, listed, secret_of
from dpfy.tuning.search import (
    RandomSearch,
    Search,
    SearchEngine,
    TrialPool,
    pool_of,
    require_workers,
)
from dpfy.tuning.space import Settings, Space
from dpfy.tuning.terms import SearchSettings, TrialKinds, TrialSplit
from dpfy.tuning.trial import ASKED, Trial, TrialTask

LARGER_NOISE = 1.15
"""A Poisson number of trials, of which few are small, is taken where it needs no more than so many
times the noise of a geometric one.
"""
FINAL = 10**6
"""The number of the run on all records, behind those of all trials."""

RecipeFor = Callable[[Settings, int], Recipe]
"""What a run with these settings does to so many records."""
Scaled = Callable[[Settings, float], Settings]
"""The settings for a part of the records, from those for all of them and the share that it is."""


@dataclass(frozen=True, repr=False)
class Tuned(Released):
    """What a search leaves: a finished run, and the settings that were selected; None where no trial
    was made. It tells nothing about other trials, and no time, which would tell how many there were.
    """

    settings: Settings | None

    @property
    def score(self) -> float | None:
        """The score of the selected trial."""
        found = card.section(self.report, TUNING).get("score")
        return float(found) if isinstance(found, int | float) else None

    def _told(self) -> dict[str, Any]:
        part = card.section(self.report, TUNING) or card.section(self.report, PublicTuning.kind)
        utility = {k: v for k, v in part.get("utility", {}).items() if k != "absent"}
        return {
            "settings": self.settings,
            "score": part.get("score"),
            **({"scored": part["scored"]} if "scored" in part else {}),
            **utility,
            "training_alone": self.report["formal"]["training"].get("epsilon"),
            "bill": part.get("bill"),
        }

    def _shown(self) -> str:
        if self.settings is None:
            return "no trial was made"
        return "\n".join(f"{name}: {value}" for name, value in self.settings.items())


@dataclass(frozen=True)
class Execution:
    """How a search is done: nothing here changes what it costs.

    `scaled` gives the settings for a subset; `publish` the files of the selected run beside its
    model; `progress` is told how many trials are made, where that is no secret, and what is being
    done.
    """

    workers: int = 1
    devices: tuple[str, ...] = ("cpu",)
    checkpoint_every: float = 30.0
    pool: TrialPool | None = None
    scaled: Scaled | None = None
    publish: Callable[[Settings, Plan], Mapping[str, bytes]] = lambda settings, plan: {}
    progress: Callable[[str, int | None], None] = field(default=lambda what, made: None)

    def __post_init__(self) -> None:
        require_workers(self.workers)


def tune(
    objective: Callable[[Trial], float],
    space: Space | Mapping[str, Any] | None,
    recipe: RecipeFor | Sequence[Recipe],
    terms: SearchSettings,
    run: Run | str | Path,
    *,
    engine: SearchEngine | None = None,
    work: Execution | None = None,
) -> Tuned:
    """Search for settings on private data, and release the best trial: a run folder whose report
    covers the search.

    `objective` trains by `trial.plan` in `trial.run` (:func:`dpfy.fit` takes both) and returns a
    score, larger is better. `recipe` says, for settings and a number of records, what a trial does
    to the data; the noise is added here, so that everything together costs what `terms` say.
    Settings that change the charge (batch size, steps) are lists. Where an engine draws settings
    while a trial runs, `space` is None and `recipe` a list: what trials may do, one recipe for each
    charge; the trial then asks for `trial.planned(recipe)`.

    Guarantees: the whole event is reserved before the first trial; every trial is made under a
    permit for one of the events in it. What is not covered by a theorem is refused. A search that
    was killed is resumed to the same selection; only it leaves the folder.
    """
    where, work = Space.read(space) if isinstance(space, Mapping) else space, work or Execution()
    place = Run.of(run)
    if engine is None and where is None:
        raise InvalidInput("space", None, "must be given, or an engine that draws settings itself")
    chosen: SearchEngine = RandomSearch(where) if engine is None and where is not None else engine  # type: ignore[assignment]
    parts = terms.parts
    kinds = _kinds(where, recipe, terms, work)
    claim = _held(place, where, chosen, terms) or _planned(where, chosen, kinds, terms, place, work)
    if complete(place, claim):
        outcome.same_times(Path(place.path))
        return finished(Path(place.path))
    with RunFolder(place, claim) as folder:
        return _Searching(folder, claim, kinds, chosen, objective, parts, work).done()


def _kinds(
    space: Space | None,
    recipe: RecipeFor | Sequence[Recipe],
    terms: SearchSettings,
    work: Execution,
) -> TrialKinds:
    parts = terms.parts
    if space is None or not callable(recipe):
        if callable(recipe) or space is not None or terms.route == SUBSET:
            raise InvalidInput(
                "recipe",
                recipe,
                "must be a list of recipes where there is no space, and a function of settings "
                "where there is one",
            )
        return TrialKinds.listed(recipe)
    if terms.route != SUBSET:
        return TrialKinds.of(space, lambda settings: recipe(settings, parts.training))
    if work.scaled is None:
        way_out = "say how settings for all records are scaled to a part of them: Work(scaled=...)"
        raise Unsupported("a search on a subset without a rule that scales settings", way_out)
    scaled = work.scaled
    return TrialKinds.of(
        space,
        lambda settings: recipe(scaled(settings, terms.sample), parts.sampled),
        lambda settings: recipe(settings, parts.training),
    )


def _planned(
    space: Space | None,
    engine: SearchEngine,
    kinds: TrialKinds,
    terms: SearchSettings,
    place: Run,
    work: Execution,
) -> Tuning:
    """The claim of a new search: the least noise with which it costs what was asked for."""
    work.progress("calibrating", None)
    adaptive, seed, counts = engine.adaptive or terms.prune, None, tuple[int, ...]()
    terms.payment(terms.shapes[0], adaptive=adaptive)
    if terms.route in (COMPOSITION, NOISY_MAX):
        seed = secrets.randbits(62) if place.seed is None else place.seed
        if not adaptive and space is not None:
            counts = kinds.counts(
                [engine.ask(n, _public(seed, n)) for n in range(int(terms.trials))]
            )
    found: list[CalibratedSearch] = []
    for shape in terms.shapes if terms.route in (RANDOM, SUBSET) else terms.shapes[:1]:
        found.append(
            calibrate_search(
                terms.payment(shape, adaptive=adaptive),
                terms.target,
                kinds.recipes,
                kinds.finals,
                counts,
            )
        )
    paid = found[0]
    if len(found) > 1 and max(_ratios(*found)) > LARGER_NOISE:
        paid = found[1]
    return Tuning(paid, _words(space), engine.name, seed)


def _words(space: Space | None) -> dict[str, str]:
    return {} if space is None else space.words()


def _ratios(one: CalibratedSearch, other: CalibratedSearch) -> Iterator[float]:
    return (
        a.noise_multiplier / b.noise_multiplier for a, b in zip(one.plans, other.plans, strict=True)
    )


def _public(seed: int, number: int) -> np.random.Generator:
    """The generator of settings that are no secret."""
    return np.random.default_rng([seed, number])


def _held(
    place: Run, space: Space | None, engine: SearchEngine, terms: SearchSettings
) -> Tuning | None:
    """The claim of a search that is resumed, which must be of the same terms."""
    path = Path(place.path)
    if not place.resume or not (path / LEDGER).is_file():
        return None
    if (path / LEDGER).stat().st_size == 0:  # killed before its first line: nothing was reserved
        return None
    claims = held_claims(path)
    if not claims:
        return None
    held = claims[0]
    if not isinstance(held, Tuning):
        raise InvalidInput("resume", str(path), "holds no search")
    asked = terms.payment(held.payment.shape, adaptive=engine.adaptive or terms.prune)
    if held.payment != asked or held.space != _words(space) or held.engine != engine.name:
        raise InvalidInput(
            "resume tuning", "another search", "must be the one that the folder holds"
        )
    if (held.delta, held.accountant) != (terms.delta, terms.accountant):
        raise InvalidInput("resume tuning", "other terms", "must be those that the folder holds")
    return held


@dataclass
class _Searching:
    """One search in its opened folder."""

    folder: RunFolder
    claim: Tuning
    kinds: TrialKinds
    engine: SearchEngine
    objective: Callable[[Trial], float]
    parts: TrialSplit
    work: Execution

    def __post_init__(self) -> None:
        log = self.folder.secrets / SEARCH_LOG
        if not log.is_file():
            if self.folder.identified and self.folder.has_begun(TUNING):
                raise Corrupt(
                    f"checkpoint/{SEARCH_LOG}",
                    "is missing: nobody can tell which trials were made; start a new search",
                )
            create(log, mode=PRIVATE_MODE)
        self.permit = self.folder.begin(TUNING)
        self.randomness = self.folder.randomness
        self.source = TrialRights(self.folder.path / LEDGER, TUNING, self.randomness)
        self.search = Search(
            self.folder.secrets,
            self.work.pool or pool_of(self.work.workers),
            self.claim.payment.route == NOISY_MAX,
        )
        self.made = 0

    def done(self) -> Tuned:
        """Make the trials, select, publish, and end the run."""
        payment, paid = self.claim.payment, self.claim.paid
        if payment.random:
            self.work.progress("searching", None)
            number = self.search.made(self._tasks(drawn(self.claim, self.permit, self.randomness)))
        else:
            for n, row in self.search.rows.items():
                self._told(n, row)
            number = self.search.made(
                self._tasks(int(payment.trials)), lambda task, row: self._told(task.number, row)
            )
        if payment.route == NOISY_MAX:
            number = self._chosen()
        if number is None:
            return self._published(None)
        row = self.search.rows[number]
        settings = (
            self._asked(number) if payment.random and self.kinds.trial is not None else row.settings
        )
        place = self._on_all(settings) if paid.finals else self.search.place(number)
        return self._published(outcome.SelectedTrial(number, row, settings, place))

    def _tasks(self, count: int) -> Iterator[TrialTask]:
        """The trials, as many as there are; with a filter, as many as fit."""
        number = 0
        while number < count or self.claim.payment.pruned:
            if number in self.search.rows:
                number += 1
                continue
            settings = self._asked(number)
            if self.claim.payment.pruned and not self._fits():
                return
            yield self._task(number, settings)
            number += 1

    def _asked(self, number: int) -> Settings:
        """What to try. What was asked of an engine is kept: its noise must meet these settings and
        no others.
        """
        if self.claim.payment.random:
            return self.engine.ask(number, self.randomness.generator("settings", number))
        assert self.claim.seed is not None
        file = self.search.place(number) / ASKED
        begun = listed(storage.parsed_json(ASKED, file.read_bytes())) if file.is_file() else None
        settings = self.engine.ask(number, _public(self.claim.seed, number), begun)
        if begun is None and self.engine.adaptive:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(file, json.dumps(settings).encode(), mode=PRIVATE_MODE)
        return settings

    def _task(self, number: int, settings: Settings, *, final: bool = False) -> TrialTask:
        paid, work = self.claim.paid, self.work
        used = (
            settings
            if final or not paid.finals or work.scaled is None
            else work.scaled(settings, self.claim.payment.sample)
        )
        return TrialTask(
            self.search.place(number),
            number,
            used,
            self.kinds.recipe(settings, final=final),
            paid.finals if final else paid.plans,
            paid.score,
            self.source,
            self.objective,
            parts=self.parts if self.parts.held_out > 0 or self.parts.sample < 1 else None,
            final=final,
            prune=self.engine.prune if self.claim.payment.pruned else None,
            checkpoint_every=work.checkpoint_every,
            device=work.devices[number % len(work.devices)],
        )

    def _told(self, number: int, row: TrialResult) -> None:
        if (
            self.claim.payment.route == COMPOSITION
        ):  # by noisy max the scores are exact, and nobody is told them
            self.engine.tell(number, row)
        self.made += 1
        self.work.progress("searching", self.made)

    def _fits(self) -> bool:
        """Whether the whole of one more trial, of any kind, fits under what was reserved, at every
        order.
        """
        worst = events.one_of(plan.event for plan in self.claim.paid.plans)
        spent = [*(self._billed(row) for row in self.search.rows.values()), worst]
        total, budget = (
            rdp.divergences(event, self.claim.adjacency)
            for event in (events.Composed(tuple(spent)), self.claim.event)
        )
        return bool((total <= budget * (1 + 1e-9)).all())

    def _billed(self, row: TrialResult) -> events.Event:
        """What a trial released: all of its plan, or the steps that it made before it was
        pruned.
        """
        plan = self.claim.paid.plans[row.kind]
        recipe = plan.recipe
        if row.steps >= recipe.steps or row.steps == 0:
            return plan.event if row.steps else events.Nothing()
        released = first_steps(
            plan.noise_multiplier,
            recipe.sampler.participation,
            recipe.strategy,
            row.steps,
            recipe.steps,
        )
        return recipe.of_unit(released)

    def _chosen(self) -> int:
        """The winner, by the exponential mechanism on the counts of right answers of all trials."""
        rows, score = self.search.rows, self.claim.paid.score
        assert isinstance(score, events.BoundedRange)
        counts = np.array(
            [max(0, int(rows[n].score)) if np.isfinite(rows[n].score) else 0 for n in sorted(rows)]
        )
        chooser = Exponential(score.epsilon, True, adjacency=self.claim.adjacency)
        self.folder.bind("scores", counts.tobytes())
        permit = self.permit.inner(score, FINAL)
        most = Bound.scalar(points(self.claim.unit))
        found = chooser.release(Bounded(counts, most), permit, secret_of(self.randomness, FINAL))
        return sorted(rows)[found.value]

    def _on_all(self, settings: Settings) -> Path:
        """The run on all records, after a search on a subset."""
        task = self._task(FINAL, settings, final=True)
        self.work.progress("training on all records", None)
        task()
        return task.place

    def _published(self, found: outcome.SelectedTrial | None) -> Tuned:
        self.work.progress("card", None)
        outcome.publish(
            self.folder, self.claim, found, self.search.rows, self.work.publish, self.parts
        )
        return finished(self.folder.path)


class Drawn(Protocol):
    """The claim of a search: how it is paid for, and what it costs."""

    @property
    def payment(self) -> SearchRoute:
        """How it is paid for."""

    @property
    def event(self) -> events.Event:
        """All that it releases."""


def drawn(claim: Drawn, permit: Permit, randomness: Randomness) -> int:
    """How many trials a search makes: drawn exactly from the law that is charged, from the search's
    secret, under its permit.
    """
    bits = source(claim.event, permit, randomness, 0)
    return PrivateSelection(events.Nothing(), claim.payment.trials, claim.payment.shape).runs(bits)


def finished(path: Path) -> Tuned:
    """The result of a search that is finished."""
    made = storage.parsed_json(card.NAME, storage.content(card.NAME, path / card.NAME))
    part = card.section(made, TUNING)
    if not part:
        raise InvalidInput("run", str(path), "holds no search")
    settings = part.get("settings")
    return Tuned(path, None if settings is None or "absent" in settings else listed(settings))
