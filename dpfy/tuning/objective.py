"""A search over the settings of a training on a `dpfy.Dataset`, by an objective that trains and
scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dpfy.core.errors import InvalidInput
from dpfy.core.unit import single_owner
from dpfy.data.users import by_user
from dpfy.plan.recipe import Recipe, dpsgd
from dpfy.runs.dataset import Dataset
from dpfy.runs.run import Run
from dpfy.training.table import COUNT_SHARE, counted, read
from dpfy.tuning.routes import HELD_OUT
from dpfy.tuning.run import RecipeFor, Tuned, tune
from dpfy.tuning.space import Settings
from dpfy.tuning.terms import SearchSettings
from dpfy.tuning.trial import Trial

BATCH, EPOCHS, CLIP = 256, 10.0, 1.0
"""What a trial does where the settings do not say it."""


class DatasetObjective:
    """An objective on the records of a data set: `trial.data` are those that the trial trains on,
    `trial.held_out` those that it is scored on.

    Guarantees: records are read in the first trial, when the whole search is reserved.
    """

    def __init__(self, objective: Callable[[Trial], float], data: Dataset) -> None:
        self._objective, self._data = objective, data

    def __repr__(self) -> str:
        return f"DatasetObjective({self._data!r})"

    @cached_property
    def _records(self) -> Any:
        records, names = read(self._data)
        if names is None or self._data.unit is None:
            return records
        _, owners = np.unique(names, return_inverse=True)
        return by_user(records, owners, self._data.unit.at_most)

    def __call__(self, trial: Trial) -> float:
        """Train and score on the records of this trial."""
        trial.data = trial.train(self._records)
        if trial.score is not None:
            trial.held_out = trial.valid(self._records)
        return self._objective(trial)


def tune_training(
    objective: Callable[[Trial], float],
    space: Mapping[str, Any],
    data: object,
    *,
    epsilon: float,
    delta: float | None,
    run: Run | Path | str | None,
    recipe: RecipeFor | None = None,
    **terms: Any,
) -> Tuned:
    """`dpfy.tune` for a function that trains by `trial.plan` on `trial.data` in `trial.run`, and
    returns a score of `trial.held_out`.
    """
    if not isinstance(data, Dataset):
        rule = "must be a dpfy.Dataset where an objective trains on it"
        raise InvalidInput("data", type(data).__name__, rule)
    single_owner("a search", None if data.unit is None else data.unit.column)
    place, chosen = data.run(run), data.rule(delta)
    records = data.records if data.unit is None else None
    if records is None:
        share = COUNT_SHARE * epsilon
        records, epsilon = counted(data, share, place), epsilon - share
    asked = SearchSettings(epsilon, chosen.value, records, score=HELD_OUT, **terms)

    def standard(settings: Settings, count: int) -> Recipe:
        return dpsgd(
            count,
            min(float(settings.get("batch_size", BATCH)), count),
            epochs=float(settings.get("epochs", EPOCHS)),
            clip_norm=float(settings.get("clip_norm", CLIP)),
            unit=data.privacy_unit,
        )

    return tune(DatasetObjective(objective, data), space, recipe or standard, asked, place)
