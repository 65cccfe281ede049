"""Checks of searches for settings: what leaves one, and what its trials may know of each other.

The statistical ones have a false-alarm rate below 1e-6 each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dpfy import accounting
from dpfy.audit.bounds import log_ratio
from dpfy.core import events
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency, user_unit
from dpfy.core.values import mock_permit
from dpfy.data.given import as_source
from dpfy.data.owners import Users
from dpfy.data.records import Records
from dpfy.data.users import UserRecords, by_user
from dpfy.plan.recipe import Recipe, dpsgd
from dpfy.runs.run import Run
from dpfy.training.fit import fit
from dpfy.tuning import run, trial
from dpfy.tuning.claim import Tuning
from dpfy.tuning.routes import HELD_OUT, PUBLIC, CalibratedSearch, SearchRoute, points
from dpfy.tuning.space import Settings, Space
from dpfy.tuning.terms import SearchSettings, TrialSplit
from dpfy.tuning.trial import Trial
from dpfy_lab.checks.published import published, temporary
from dpfy_lab.selftest.mistake import Found, check

SEARCHES, TRIALS, DELTA, RECORDS = 12_000, 7.0, 1e-6, 120
ONE = events.RandomizedResponse(2 / (math.e + 1), 2)
"""A trial that tells with epsilon 1 whether a canary is there: it memorises it, or not."""
SURE = math.e / (math.e + 1)
SPACE = Space.read({"rate": "0.1..1", "clip": [0.5, 1.0]})
MANY = 11
"""A seed with which a search makes more trials than its mean."""
SPREAD = 5.0


def _selected(*, canary: bool) -> NDArray[np.int64]:
    """What leaves many searches that love the trial which memorises a canary, there or not: the
    best of a number of trials that the product draws.
    """
    recipe = dpsgd(RECORDS, 30, steps=2, adjacency=Adjacency.REPLACE_ONE)
    payment = SearchRoute("random", TRIALS, 1.0, adjacency=Adjacency.REPLACE_ONE)
    paid = CalibratedSearch(payment, (recipe.with_noise(1.0, delta=1e-3),), (), None)
    claim, rng, found = Tuning(paid, SPACE.words()), np.random.default_rng([17, canary]), []
    permit = mock_permit(claim.event, SEARCHES, "tuning")
    for seed in range(SEARCHES):
        permit.__dict__.pop("_spent", None)
        count = run.drawn(claim, permit, Randomness.for_tests(2 * seed + canary))
        memorised = rng.random(count) < (SURE if canary else 1 - SURE)
        found.append(int(memorised.any()) if count else 2)
    return np.array(found, np.int64)


@check("search canary")
def CANARY() -> Found:
    """Searches that select the trial which memorises a canary tell no more of it than the whole
    search is billed for.
    """
    total = events.RepeatAndSelect(ONE, TRIALS, 1.0)
    epsilon = accounting.epsilon(total, DELTA, adjacency=Adjacency.REPLACE_ONE)
    if (found := log_ratio(_selected(canary=True), _selected(canary=False))) <= epsilon:
        return None
    return (
        f"what leaves the search tells of a canary with epsilon at least {found:.3f}, claimed "
        f"{epsilon:.3f}"
    )


def _records() -> Records:
    return Records((torch.arange(RECORDS, dtype=torch.float32)[:, None], torch.arange(RECORDS) % 2))


def _train(trial: Trial, records: object) -> None:
    model = nn.Linear(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.settings["rate"])
    fit(model, records, plan=trial.plan, optimizer=optimizer, run=trial.run)


def _recipe(settings: Settings, records: int) -> Recipe:
    return dpsgd(records, records / 4, steps=1, clip_norm=settings["clip"])


def _search(folder: Path, objective: Callable[[Trial], float], score: str, trials: float) -> None:
    terms = SearchSettings(4.0, 1e-3, RECORDS, trials, law="geometric", score=score, held_out=0.3)
    run.tune(objective, SPACE, _recipe, terms, Run(folder, seed=MANY))


@check("search losers")
def LOSERS() -> Found:
    """What leaves a search is the same whatever its other trials were."""

    def left(others: float) -> dict[str, bytes]:
        def score(trial: Trial) -> float:
            _train(trial, _records())
            return 1.0 if trial.number == 1 else others

        with temporary() as folder:
            _search(folder, score, PUBLIC, TRIALS)
            return published(folder)

    if left(0.2) == left(0.7):
        return None
    return "what leaves the search tells of trials that were not selected"


@check("search scores")
def SCORES() -> Found:
    """A score on private records has the noise that is billed: it is shown with the selected
    trial.
    """
    found: list[tuple[float, float]] = []

    def score(trial: Trial) -> float:
        _train(trial, trial.train(_records()))
        right, event = trial.number % 7, trial.score
        trial.count(right)
        assert trial.counted is not None
        assert isinstance(event, events.DiscreteGaussian)
        found.append((event.sigma, trial.counted - right))
        return trial.counted

    with temporary() as folder:
        _search(folder, score, HELD_OUT, 25)
    off = np.array([noise / sigma for sigma, noise in found])
    spread, limit = math.sqrt(float(np.mean(off**2))), SPREAD / math.sqrt(2 * off.size)
    if abs(spread - 1) <= limit:
        return None
    return f"scores have {spread:.3f} of the noise that is charged"


@check("search parts")
def PARTS() -> Found:
    """Nobody is in training and in validation, where that is what is billed."""
    trained, scored = set[int](), set[int]()

    def split(trial: Trial) -> float:
        train, valid = trial.train(_records()), trial.valid(_records())
        assert isinstance(train, Records)
        trained.update(train.tensors[0][:, 0].int().tolist())
        scored.update(valid.tensors[0][:, 0].int().tolist())
        _train(trial, trial.train(_records()))
        return trial.count(1)

    with temporary() as folder:
        _search(folder, split, HELD_OUT, 2)
    both = trained & scored
    if scored and not both:
        return None
    return f"{len(both)} of {len(scored)} validation records were trained on"


@check("search proposals")
def PROPOSALS() -> Found:
    """With a random number of trials, settings are the same whatever the scores are."""

    def proposed(best: float) -> list[Settings]:
        asked: list[Settings] = []

        def note(trial: Trial) -> float:
            _train(trial, _records())
            asked.append(dict(trial.settings))
            return best - 0.01 * len(asked)

        with temporary() as folder:
            _search(folder, note, PUBLIC, TRIALS)
        return asked

    if proposed(1.0) == proposed(0.0):
        return None
    return "the settings of later trials follow from the scores of earlier ones"


@check("search users")
def USERS() -> Found:
    """A user of several records moves the score of a trial by what its noise is made for."""
    unit, owners = user_unit(4), np.repeat(np.arange(6), 4)
    records = Records((torch.arange(len(owners), dtype=torch.float32),))
    scored, scores = by_user(records, owners, unit.most_records), []
    assert isinstance(scored, UserRecords)
    for right in (True, False):  # all records of the first user, beside some of the others
        said = torch.arange(len(owners)) % 3 == 0
        said[:4] = right
        scores.append(trial._points(said, scored, points(unit)))
    moved, noised = abs(scores[0] - scores[1]), points(unit)
    if moved <= noised:
        return None
    return f"a user moves a score by {moved} points, its noise is made for {noised}"


@check("search people")
def PEOPLE() -> Found:
    """A user whose records are chosen at every step is in training or in validation, with all of
    their records.
    """
    owners, rows = np.repeat(np.arange(40), 6), torch.arange(240)
    grouped = by_user((rows, rows), Users(owners), 6)
    parts, secret = TrialSplit(40, 0.4), Randomness.for_tests(MANY)
    train, valid = parts.train(grouped, secret, final=False), parts.valid(grouped, secret)
    trained, scored = (set(owners[part]) for part in (as_source(train).held[0], valid.flat[0]))
    if trained and scored and not trained & scored:
        return None
    return f"{len(trained & scored)} of {len(scored)} users scored on were trained on"


CHECKS = (CANARY, LOSERS, SCORES, PARTS, PROPOSALS, USERS, PEOPLE)
