"""What the self-test of the audit needs of a search for settings, with a bug's parts in place."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dpfy import accounting
from dpfy.core import events
from dpfy.core.ledger_rules import rehearsal
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.data.records import Records
from dpfy.plan.recipe import Recipe, dpsgd
from dpfy.runs.folder import Place
from dpfy.training.fit import fit
from dpfy.tuning.claim import Tuning
from dpfy.tuning.engine import RandomSearch
from dpfy.tuning.routes import HELD_OUT, PUBLIC, CalibratedSearch, SearchRoute
from dpfy.tuning.run import drawn, tune
from dpfy.tuning.space import Settings, Space
from dpfy.tuning.terms import SearchTerms
from dpfy.tuning.trial import Trial

SEARCHES, TRIALS, DELTA, RECORDS, SEEN = 12_000, 7.0, 1e-6, 120, 6
ONE = events.RandomizedResponse(2 / (math.e + 1), 2)
"""A trial that tells with epsilon 1 whether a canary is there: it memorises it, or not."""
SURE = math.e / (math.e + 1)
SPACE = Space.read({"rate": "0.1..1", "clip": [0.5, 1.0]})
MANY = 11
"""A seed with which a search makes more trials than its mean."""


class TuningBench:
    """Searches with a bug's parts: many in which a trial is one coin, and some that train."""

    def selected(self, bug: Any, *, canary: bool) -> tuple[float, NDArray[np.int64]]:
        """What left searches with a geometric number of trials, as numbers that an attacker tells
        apart.
        """
        number, shown = bug.trials(drawn), bug.shown(_best)
        plan = dpsgd(RECORDS, 30, steps=2, adjacency=Adjacency.REPLACE_ONE).with_noise(
            1.0, delta=1e-3
        )
        claim = Tuning(
            CalibratedSearch(
                SearchRoute("random", TRIALS, 1.0, adjacency=Adjacency.REPLACE_ONE),
                (plan,),
                (),
                None,
            ),
            SPACE.words(),
        )
        permit, rng, found = (
            rehearsal(claim.event, SEARCHES, "tuning"),
            np.random.default_rng([17, canary]),
            [],
        )
        for seed in range(SEARCHES):
            permit.__dict__.pop("_spent", None)
            count = number(claim, permit, Randomness.for_tests(2 * seed + canary))
            outputs = rng.random(count) < (SURE if canary else 1 - SURE)
            left = shown(outputs, int(outputs.argmax()))[:SEEN]
            found.append(10 * len(left) + sum(left))
        total = events.RepeatAndSelect(ONE, TRIALS, 1.0)
        return accounting.epsilon(total, DELTA, adjacency=Adjacency.REPLACE_ONE), np.array(
            found, np.int64
        )

    def scores(self, bug: Any) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
        """The noise of a score, and scores with and without it."""
        found: list[tuple[float, float, float]] = []

        def score(trial: Trial) -> float:
            _trained(trial, trial.train(_records()))
            right = trial.number % 7
            bug.scored(trial).count(right)
            assert trial.counted is not None
            event = trial.score
            assert isinstance(event, events.DiscreteGaussian)
            found.append((event.sigma, trial.counted, float(right)))
            return trial.counted

        _search(score, _terms(HELD_OUT, 25), MANY)
        sigma, used, exact = (np.array(column) for column in zip(*found, strict=True))
        return float(sigma[0]), used, exact

    def parts(self, bug: Any) -> tuple[set[int], set[int]]:
        """Which records a trial was trained on, and which it was scored on."""
        trained, scored = set[int](), set[int]()

        def split(trial: Trial) -> float:
            own = bug.held_out(trial)
            train, valid = own.train(_records()), own.valid(_records())
            trained.update(train.tensors[0][:, 0].int().tolist())
            scored.update(valid.tensors[0][:, 0].int().tolist())
            _trained(trial, trial.train(_records()))
            return trial.count(1)

        _search(split, _terms(HELD_OUT, 2), MANY)
        return trained, scored

    def proposals(self, bug: Any, *, score: float) -> list[Any]:
        """The settings of all trials, whose scores are near `score`."""
        asked, told = list[Any](), list[float]()

        def note(trial: Trial) -> float:
            _trained(trial, _records())
            asked.append(dict(trial.settings))
            told.append(score - 0.01 * len(told))
            return told[-1]

        _search(note, _terms(PUBLIC, TRIALS), MANY, bug.proposed(RandomSearch(SPACE), told))
        return asked


def _best(outputs: Any, best: int) -> list[Any]:
    """What leaves a search: the output of the best trial."""
    return [outputs[best]]


def _records() -> Records:
    return Records((torch.arange(RECORDS, dtype=torch.float32)[:, None], torch.arange(RECORDS) % 2))


def _trained(trial: Trial, records: Records) -> None:
    model = nn.Linear(1, 2)
    fit(
        model,
        records,
        plan=trial.plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=trial.settings["rate"]),
        run=trial.run,
    )


def _recipe(settings: Settings, records: int) -> Recipe:
    return dpsgd(records, records / 4, steps=1, clip_norm=settings["clip"])


def _terms(score: str, trials: float) -> SearchTerms:
    return SearchTerms(4.0, 1e-3, RECORDS, trials, law="geometric", score=score, held_out=0.3)


def _search(
    objective: Callable[[Trial], float], terms: SearchTerms, seed: int, engine: Any = None
) -> None:
    with tempfile.TemporaryDirectory() as place:
        tune(objective, SPACE, _recipe, terms, Place(Path(place) / "run", seed=seed), engine=engine)
