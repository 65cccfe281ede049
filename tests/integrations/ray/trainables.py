"""What the tests of Ray search over: a module that workers import."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tuning"))
import toy


def accuracy(trial):
    return {"accuracy": toy.objective(trial)}


def own_place(trial):
    """Trains, and is scored by where its settings lie in the space alone: so the law of the best
    one is known.
    """
    toy.trained(trial)
    return trial.settings["place"]


def fails(trial):
    raise ValueError(f"record 17 and rate {trial.settings['rate']}")
