"""A trial's own folder, among the secrets of the search: a training without report and ledger, that
publishes nothing.

    checkpoint/trials/000004/ (0700)   state.safetensors  steps.jsonl ...  model.safetensors
    metrics.jsonl  told.json

Its noise comes from a secret of its own, made of the search's secret and the trial's number; its
permit is one of the runs that the search was given its permit for. A search that is resumed finds
its trials as a run finds its checkpoint.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfy.core import events, storage
from dpfy.core.claim import Reserved
from dpfy.core.errors import Busy, Corrupt, InvalidInput, Unsupported
from dpfy.core.guarantee import Accountant, Guarantee
from dpfy.core.ledger import Ledger, Permit
from dpfy.core.randomness import Randomness
from dpfy.core.storage import PRIVATE_MODE, locked, write_atomically
from dpfy.core.values import mock_permit
from dpfy.plan.claim import TrainingClaim
from dpfy.plan.recipe import Plan
from dpfy.report import card, figures
from dpfy.runs.run import Run
from dpfy.training import metrics
from dpfy.training.integrity import checkpoint
from dpfy.training.run import TRAINING, TrainingRun
from dpfy.tuning.space import Settings

TOLD, LOCK = "told.json", "lock"
ONE_TRIAL = "one trial of a search: what the whole search costs is in its report"
WORST = -math.inf
NAMES = (*TrainingClaim.artefacts, TOLD)
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class _Alone:
    """What training asks of a ledger: that of one trial by itself, which is no charge."""

    plan: Plan

    @property
    def settlements(self) -> dict[str, tuple[int, int]]:
        """No trial is settled."""
        return {}

    def guarantee(
        self, accountant: Accountant, caveats: tuple[str, ...] = (), trust: str = "central"
    ) -> Guarantee:
        """Of the trial alone, with the caveat that it is one."""
        recipe = self.plan.recipe
        curve = figures.curve(self.plan.event, recipe.adjacency, accountant.name)
        return Guarantee(
            curve, accountant.name, recipe.adjacency, recipe.unit, trust, (*caveats, ONE_TRIAL)
        )


class SealedRun(TrainingRun):
    """The folder of one trial, used by `dpfy.fit` and `dpfy.PrivateTraining` as an opened run
    folder is.

    Guarantees: everything in it is for the search alone (mode 0700), and is erased with the
    search's secrets; it publishes nothing.
    """

    def __init__(
        self,
        place: Path,
        plan: Plan,
        permit: Permit,
        randomness: Randomness,
        checkpoint_every: float = 30.0,
        part: str | None = None,
    ) -> None:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(place, 0o700)
        self.run, self.plan, self.part = Run(place, checkpoint_every=checkpoint_every), plan, part
        self.path = self.secrets = place
        self.randomness, self.id = randomness, place.name
        self.ledger = _Alone(plan)  # type: ignore[assignment]
        self.stages, self.told = {}, {}
        self.in_use, self._over, self._process = False, False, os.getpid()
        self.fresh = not self.state.is_file()
        self._permit, self._reserved = permit, Reserved(TrainingClaim(plan), randomness.fixed)
        if not (place / metrics.FILE).exists():
            os.close(
                os.open(place / metrics.FILE, NEW, PRIVATE_MODE)
            )  # for its owner alone, before anybody appends to it

    @property
    def reserved(self) -> Reserved:
        """The plan of the trial."""
        return self._reserved

    @property
    def permit(self) -> Permit:
        """The right to make this trial's steps."""
        return self._permit

    @property
    def finished(self) -> bool:
        """Whether the trial is trained."""
        return (self.path / TOLD).is_file()

    @property
    def begun(self) -> bool:
        """Whether steps may have been made."""
        return (file := self.path / "steps.jsonl").is_file() and file.stat().st_size > 0

    def has_begun(self, *names: str) -> bool:
        """Whether steps may have been made."""
        return self.begun

    def note_begun(self) -> None:
        """The search has started, in every ledger, before its first trial."""

    def begin(self, name: str) -> Permit:
        """The right to make this trial's steps; nothing else was reserved for it."""
        if name != TRAINING:
            raise InvalidInput(
                "claim",
                name,
                "a trial trains, and makes no other release: reserve that beside the search",
            )
        return self.permit

    def begin_evaluation(self) -> Permit:
        """Refused: the score of a trial is part of the search's charge."""
        raise Unsupported(
            "a charged evaluation inside of a trial",
            "score it (trial.count), which the search pays for",
        )

    def settle(self, name: str, made: int) -> None:
        """No trial is charged for less than its plan, but by the search."""

    def tell(self, name: str, **facts: Any) -> None:
        """What a report would tell of this training, if it is the one that is selected."""
        self.told.setdefault(name, {}).update(facts)

    def write(self, name: str, content: bytes) -> Path:
        """A file of the trial, for the search alone."""
        if name not in NAMES:
            raise InvalidInput(
                "artefact",
                name,
                f"must be one of a training's: {', '.join(TrainingClaim.artefacts)}",
            )
        write_atomically(self.path / name, content, mode=PRIVATE_MODE)
        return self.path / name

    def finish(self, facts: Callable[[], card.Facts] | card.Facts) -> Path:
        """Keep what there is to tell, and forget how it came to be: checkpoints and journal are of
        no more use.
        """
        told = facts() if callable(facts) else facts
        sections = {name: dict(part) for name, part in ({**self.told, **told.sections}).items()}
        body = {
            "provenance": dict(told.provenance),
            "releases": told.releases,
            "told": sections.get(TRAINING, {}),
        }
        body["plan"] = self.plan.to_json()
        self.write(TOLD, json.dumps(body, allow_nan=False).encode())
        return self.path

    def steps_made(self) -> int:
        """How many steps may have been made, of a trial that was left: those of its checkpoint, and
        those in its journal.
        """
        kept = checkpoint.read(self.state, self.randomness).step if self.state.is_file() else 0
        file = self.path / "steps.jsonl"
        noted = (
            [json.loads(line)["step"] + 1 for line in file.read_text().splitlines()]
            if file.is_file()
            else []
        )
        return max([kept, *noted])

    def abandon(self) -> None:
        """Nothing is undone: a trial is a part of the search."""

    def close(self) -> None:
        """Nothing is held here."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Nothing to let go of."""


@dataclass(frozen=True)
class TrialReport:
    """What a trained trial has to tell: its plan, its section of a report, where and how it ran, and
    how many steps it made.
    """

    plan: Plan
    section: Mapping[str, Any]
    provenance: Mapping[str, str]
    steps: int

    @classmethod
    def read(cls, place: Path) -> TrialReport:
        """That of the trial in `place`."""
        try:
            held = storage.parsed_json(TOLD, storage.content(TOLD, place / TOLD, name=TOLD))
            return cls(
                Plan.from_json(held["plan"]),
                held["told"],
                held["provenance"],
                int(held["releases"]),
            )
        except (InvalidInput, KeyError, TypeError, ValueError):
            raise Corrupt(TOLD, "does not hold what a trial tells") from None


def secret_of(search: Randomness, number: int) -> Randomness:
    """The secret of one trial: no address under the search's own leads to the same numbers."""
    return Randomness(bytes.fromhex(search.tag("trial", str(number).encode())), search.fixed)


@contextmanager
def held(place: Path) -> Iterator[None]:
    """Keep every other process out of a trial: one that outlived its search may still be in it."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with locked(place / LOCK, wait=False, what="a trial"):
            yield
    except Busy:
        raise Busy(
            "the search: a process of an earlier attempt is still at work on it; wait for it to "
            "end, then resume"
        ) from None


@dataclass(frozen=True)
class TrialRights:
    """Where trials get their rights and their secrets: the search's run folder; None where the data
    is public and nothing is charged.
    """

    ledger: Path | None
    name: str
    randomness: Randomness

    def permit(self, event: events.Event, number: int, releases: int) -> Permit:
        """The right to do `event` as one of the runs of the search."""
        if self.ledger is None:
            return mock_permit(event, releases)
        held = os.stat(self.ledger)
        found = _permits(self.ledger, (held.st_dev, held.st_ino, held.st_size, held.st_mtime_ns))
        outer = next((p for p in found if p.name == self.name), None)
        if outer is None:
            raise InvalidInput("search", self.name, "nothing was reserved for it")
        return outer.inner(event, number, releases)


@functools.lru_cache(maxsize=4)
def _permits(ledger: Path, version: tuple[int, ...]) -> tuple[Permit, ...]:
    """What a ledger permits; read once for each `version` of its file."""
    return tuple(Ledger.read(ledger).permits())


@dataclass(frozen=True)
class TrialResult:
    """A trial that is over: its score, the steps it made, its kind and its settings; `notes` are an
    engine's own.
    """

    score: float
    steps: int
    kind: int
    settings: Settings
    notes: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As it is written down."""
        score = None if self.score == WORST else self.score
        return {
            "score": score,
            "steps": self.steps,
            "kind": self.kind,
            "settings": self.settings,
            "notes": dict(self.notes),
        }

    @classmethod
    def from_json(cls, data: Any) -> TrialResult:
        """What `to_json` wrote; lists of settings are tuples again."""
        score = WORST if data["score"] is None else float(data["score"])
        return cls(
            score,
            int(data["steps"]),
            int(data["kind"]),
            listed(data["settings"]),
            dict(data["notes"]),
        )


def listed(settings: Mapping[str, Any]) -> Settings:
    """Settings as JSON gives them back: lists are tuples again."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }
