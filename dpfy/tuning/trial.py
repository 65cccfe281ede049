"""One trial: settings and a plan go in, a trained model and its score come out, all of it among the
secrets of the search.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dpfy.core import check, events
from dpfy.core.errors import DpfyError, InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.storage import PRIVATE_MODE, write_atomically
from dpfy.core.unit import Unit
from dpfy.core.values import Bound, Bounded
from dpfy.data.given import admitted
from dpfy.data.lazy import LazyRecords
from dpfy.data.owners import Owned
from dpfy.data.records import Records, as_records
from dpfy.data.split import first_of, units
from dpfy.data.users import UserRecords
from dpfy.mechanisms.discrete import DiscreteGaussianMechanism
from dpfy.plan.recipe import Plan, Recipe
from dpfy.tuning.routes import points
from dpfy.tuning.sealed import (
    WORST,
    SealedRun,
    TrialResult,
    TrialRights,
    held,
    secret_of,
)
from dpfy.tuning.space import Settings
from dpfy.tuning.terms import TrialSplit

ASKED = "settings.json"


class Pruned(Exception):
    """Raised in an objective to end its trial, by what it has released so far."""


class TrialFailed(DpfyError):
    """A trial ended with an error. Nothing was released; the search can be resumed."""


class Trial:
    """What an objective is given: the `settings` to try, the calibrated `plan` to train by, and the
    `run` to train in.

    dpfy.fit(net, data, plan=trial.plan, run=trial.run, ...)  or  dpfy.PrivateTraining(net,
    optimizer, data, trial.plan, trial.run)

    What it prints, stores or returns may tell of a trial that is not selected: it should do nothing
    but train and score.
    """

    def __init__(self, task: TrialTask) -> None:
        self.settings, self.device, self._task = dict(task.settings), task.device, task
        self.kind, self.counted, self.notes = 0, None, dict[str, Any]()
        self._plan: Plan | None = None
        self._run: SealedRun | None = None
        self._rows: int | None = None
        self._scored: Records | None = None

    counted: float | None
    data: Any = None
    """Of a search on a `dpfy.Dataset`, the records that this trial trains on."""
    held_out: Any = None
    """As well, those that it is scored on."""

    @property
    def plan(self) -> Plan:
        """What the trial does to the data, with the noise that the search pays for."""
        if self._plan is None:
            raise InvalidInput(
                "trial.plan", None, "say first what the trial does: trial.planned(recipe)"
            )
        return self._plan

    @property
    def run(self) -> SealedRun:
        """The folder to train in."""
        if self._run is None:
            raise InvalidInput(
                "trial.run", None, "say first what the trial does: trial.planned(recipe)"
            )
        return self._run

    def planned(self, recipe: Recipe) -> Plan:
        """The plan of a recipe, with the noise of its kind; for searches whose trials find their
        settings while they run. Once a trial.

        Guarantees: a recipe whose charge is none of those that the search reserved is refused, and so
        is one for another unit or adjacency.
        """
        task, bill = self._task, _bill(recipe)
        if self._plan is not None:
            raise InvalidInput("trial.planned", "a second recipe", "a trial trains once")
        place = next((k for k, kind in enumerate(task.kinds) if _bill(kind.recipe) == bill), None)
        if place is None:
            raise InvalidInput(
                "trial",
                "settings with another charge",
                "nothing was reserved for it: name it among the kinds of trials",
            )
        kind = task.kinds[place]
        plan = Plan(recipe, kind.noise_multiplier, kind.delta, kind.accountant)
        permit = task.source.permit(plan.event, task.number, recipe.steps)
        part = None if task.parts is None else task.parts.part(final=task.final)
        self._run = SealedRun(task.place, plan, permit, task.secret, task.checkpoint_every, part)
        self._plan, self.kind = plan, place
        return plan

    def drew(self, name: str, value: Any) -> None:
        """Keep a setting that was drawn while the trial runs: made again after a crash, the trial
        finds it in `settings`.
        """
        self.settings[name] = value
        write_atomically(
            self._task.place / ASKED, json.dumps(self.settings).encode(), mode=PRIVATE_MODE
        )

    @property
    def number(self) -> int:
        """Which trial of the search this is."""
        return self._task.number

    @property
    def score(self) -> events.Event | None:
        """What the score on private records releases; None where trials are scored on public
        ones.
        """
        return self._task.score

    def train(self, data: object) -> Records | Owned | LazyRecords:
        """The records that this trial trains on: all of them, those not held out for scores, or a
        search's sample of them. Give records of users by :func:`dpfy.by_user`.
        """
        task = self._task
        if task.parts is None:
            found = admitted(data)
            records = found if isinstance(found, Owned | LazyRecords) else as_records(found)
        else:
            records = task.parts.train(self._whole(data), task.source.randomness, final=task.final)
        if not self._held_out and isinstance(records, Records):
            self._scored = records
        return records

    def valid(self, data: object) -> Records:
        """The private records that the score is of, from the same data as `train`: those held out,
        or with score="training" those trained on. Of users one row each, with the first of their
        records.
        """
        task = self._task
        if self._held_out:
            assert task.parts is not None
            self._scored = task.parts.valid(self._whole(data), task.source.randomness)
            return self._scored
        if task.score is None:
            raise Unsupported(
                "validation records that were not held out", "search with score='held-out'"
            )
        records = self.train(self._whole(data))
        assert not isinstance(records, LazyRecords)
        self._scored = first_of(records) if isinstance(records, Owned) else records
        return self._scored

    @property
    def _held_out(self) -> bool:
        return self._task.parts is not None and self._task.parts.held_out > 0

    @property
    def _unit(self) -> Unit:
        """Whose data the search protects: the same unit for all kinds of trials."""
        return self._task.kinds[0].recipe.unit

    def _whole(self, data: object) -> Records | Owned:
        """The data to take a part of: always the same rows, one for each unit, so that a unit's
        coin is always its own.
        """
        if isinstance(admitted(data.fields if isinstance(data, Owned) else data), LazyRecords):
            way_out = (
                "give records in memory, grouped with dpfy.by_user(records, users, most) where a "
                "user owns several"
            )
            raise Unsupported("a part of records that are read when they are drawn", way_out)
        records = data if isinstance(data, Owned) else as_records(data)
        self._require_units("trial.train", records)
        if self._rows not in (None, units(records)):
            rule = (
                "must be the same records, in the same order, in every call of trial.train and "
                "trial.valid"
            )
            raise InvalidInput("trial.train", "another number of records", rule)
        self._rows = units(records)
        return records

    def _require_units(self, name: str, records: Records | Owned) -> None:
        most = self._unit.most_records
        each = records.most if isinstance(records, Owned) else records.records_each
        if each != most:
            rule = (
                f"one {self._unit.name} owns up to {most}: group the records with "
                f"dpfy.by_user(records, users, {most})"
            )
            raise InvalidInput(name, f"{each} records in a row", rule)

    def report(self, score: float) -> bool:
        """Tell how the trial does so far, on public records; whether it should be ended: then raise
        :class:`dpfy.tuning.trial.Pruned`.
        """
        if self._task.prune is None:
            raise Unsupported(
                "looking at a trial before its end in this search",
                "pay by composition, with pruning, and score on public records",
            )
        return self._task.prune(self._task.number, as_score(score))

    def count(self, right: int | Tensor) -> float:
        """The score on private records: how many of them the model answers right, each of them at
        most once.

        `right` is their number, or a bool for each record. Where a unit owns several records it
        must be a bool for each place of the users that `trial.valid` gave:
        ``model(users.flat[0]).argmax(1) == users.flat[1]``. A user then counts once, with the share
        of their records that is right, in hundredths.

        Guarantees: one unit adds between 0 and 1 to the score, which is what is charged. The score
        has noise where it is released, and is exact where the exponential mechanism will choose
        among scores that nobody else sees. Refused where the search reserved nothing.
        """
        task, score = self._task, self._task.score
        if score is None:
            raise Unsupported(
                "a score on private records that nothing is reserved for",
                "search with score='held-out' or score='training'",
            )
        total, laid = self._total(right), points(self._unit)
        if task.final:  # it is selected already, and nothing pays for one more look
            return math.nan
        if self.counted is not None:
            raise InvalidInput("trial.count", "a second score", "a trial is scored once")
        self.counted = float(total)
        if isinstance(score, events.DiscreteGaussian):
            if score.sensitivity != laid:
                raise Unsupported(
                    "a score of users in a search that was reserved for single records",
                    "start the search again",
                )
            self.run.bind("score", str(total).encode())
            bounded, permit = (
                Bounded(total, Bound.scalar(laid), self._unit),
                task.source.permit(score, task.number, 1),
            )
            noisy = DiscreteGaussianMechanism(score.sigma, laid).release(
                bounded, permit, self.run.randomness
            )
            self.counted = float(noisy.value) / laid
        return self.counted

    def _total(self, right: int | Tensor) -> int:
        """The score in points, of which one unit adds at most `points` of them."""
        scored = self._scored
        if isinstance(right, Tensor):
            if scored is not None:
                self._require_units("trial.count", scored)
            return _points(right, scored, points(self._unit))
        if self._unit.most_records > 1:
            rule = (
                f"one {self._unit.name} owns several records and must count once: give one bool "
                f"for each place, not a number"
            )
            raise InvalidInput("trial.count", "a number", rule)
        found = check.integer("right", right, least=0)
        if scored is not None and found > len(scored):
            raise InvalidInput(
                "trial.count", "a number", "must be at most the number of records that are scored"
            )
        return found


def _bill(recipe: Recipe) -> tuple[object, ...]:
    """What was reserved for a recipe: its event, and whose data that event is about."""
    return recipe.event(1.0), recipe.unit, recipe.adjacency, recipe.draw


def _points(right: Tensor, scored: Records | None, each: int) -> int:
    """The sum over units of the share of their records that is right, each rounded to one of `each`
    points.
    """
    real = torch.ones(0, 1, dtype=torch.bool)
    if scored is not None:
        grouped = isinstance(scored, UserRecords)
        real = scored.tensors[-1].cpu() if grouped else torch.ones(len(scored), 1, dtype=torch.bool)
    if right.dtype != torch.bool or right.numel() != real.numel():
        rule = (
            "must be one bool for each record that trial.valid gave (trial.train with "
            "score='training'): ask it for them first"
        )
        raise InvalidInput("trial.count", f"a tensor of {right.dtype}", rule)
    hits, owned = (right.cpu().reshape(real.shape) & real).sum(1), real.sum(1).clamp(min=1)
    return int(((2 * each * hits + owned) // (2 * owned)).sum())


class TrialObjective(Protocol):
    """What is searched over: trains `trial.plan` in `trial.run`, and returns the score, larger is
    better.
    """

    def __call__(self, trial: Trial) -> float:
        """Train and score."""


@dataclass(frozen=True, repr=False)
class TrialTask:
    """All that a process needs to make one trial: what it does (`recipe`), or None where it says so
    itself, and plans of all kinds.

    Settings and kind are what the trial was made with, and are kept with its score.
    """

    place: Path
    number: int
    settings: Settings
    recipe: Recipe | None
    kinds: tuple[Plan, ...]
    score: events.Event | None
    source: TrialRights
    objective: Callable[[Trial], float]
    parts: TrialSplit | None = None
    final: bool = False
    prune: Callable[[int, float], bool] | None = None
    checkpoint_every: float = 30.0
    device: str = "cpu"

    def __call__(self) -> TrialResult:
        """Make the trial, or go on with it, with no step more if it is trained already. Its row; a
        score that is not a number is the worst.

        Guarantees: made again after a crash it is the same trial, bit for bit, as far as the
        objective depends on only its trial, the data and the generators of Python, NumPy and
        torch.
        """
        with held(self.place):
            trial, steps = Trial(self), None
            if self.recipe is not None:
                trial.planned(self.recipe)
            with _seeded(self.secret):
                try:
                    score = self._made(trial)
                except Pruned:
                    score, steps = WORST, min(trial.plan.recipe.steps, trial.run.steps_made())
            return TrialResult(
                score,
                trial.plan.recipe.steps if steps is None else steps,
                trial.kind,
                trial.settings,
                trial.notes,
            )

    @property
    def secret(self) -> Randomness:
        """The secret of this trial."""
        return secret_of(self.source.randomness, self.number)

    def _made(self, trial: Trial) -> float:
        try:
            found = self.objective(trial)
        except (
            InvalidInput
        ) as problem:  # not the value, which may be of a trial that nobody is to know of
            raise TrialFailed(f"a trial failed: {problem.field}: {problem.rule}") from None
        except DpfyError as problem:
            raise TrialFailed(f"a trial failed: {problem}") from None
        except Pruned:
            if self.prune is None:
                raise TrialFailed(
                    "a trial was pruned in a search that charges whole trials; pay by composition, "
                    "with pruning"
                ) from None
            raise
        except Exception as problem:  # its text may hold anything
            raise TrialFailed(
                f"a trial failed ({type(problem).__name__}); run the objective by itself, on "
                f"made-up data, to see where"
            ) from None
        if not trial.run.finished:
            raise TrialFailed(
                "a trial trained nothing: an objective trains by trial.plan in trial.run "
                "(dpfy.fit(..., run=trial.run))"
            )
        if self.score is not None and not self.final:
            if trial.counted is None:
                raise TrialFailed(
                    "a trial was not scored: return trial.count(right), the number of right "
                    "answers on the validation records"
                )
            found = trial.counted
        return as_score(found)


def as_score(found: Any) -> float:
    """A score as a number; one that is none, or infinite, is the worst."""
    try:
        score = float(found)
    except (TypeError, ValueError):
        raise TrialFailed(
            "a trial's score is no number: return a float, larger is better"
        ) from None
    return score if math.isfinite(score) else WORST


@contextmanager
def _seeded(secret: Randomness) -> Iterator[None]:
    """The generators that programs draw from begin alike whenever the trial is made; those of this
    process go on as they were.
    """
    seed = int.from_bytes(secret.key("generators", 0, 8), "little") >> 1
    kept, arrays = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    accelerated = bool(devices) or torch.accelerator.is_available()
    with torch.random.fork_rng(devices=devices):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # where there is nothing but a processor, torch.manual_seed would keep a call with its stack
        # for each accelerator there is not
        (torch.manual_seed if accelerated else torch.default_generator.manual_seed)(seed)
        try:
            yield
        finally:
            random.setstate(kept)
            np.random.set_state(arrays)
