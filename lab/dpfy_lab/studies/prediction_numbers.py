"""Private answers that are numbers, and students for regression, beside a regression without
privacy: sets of UCI.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpfy.core.randomness import Randomness
from dpfy.prediction import PrivatePredictor, number_claim, plan, teach_numbers
from dpfy.prediction.regression import Floats, Waves, train_number_student
from dpfy.prediction.voters import ridge_weights
from dpfy.report import verify
from dpfy.runs.run import Run
from dpfy_lab.studies.classical_regression import raw
from dpfy_lab.studies.page import Section, Table
from dpfy_lab.studies.study import Cell, Options, Results

SETS = ("bike", "elevators", "pol", "protein")
EPSILONS, DELTA, CROWDS = (1.0, 4.0), 1e-6, (300, 1000)
ASKED, LEARNT, STRENGTH = 100, 1000, 0.1
WAVES = Waves(100, 2.0)
DECLARED = {"data": "held-out rows", "used_for": "a student", "provenance": "a public data set"}


def cells(name: str, options: Options) -> list[Cell]:
    """A set without privacy, and with it for each epsilon and number of voters."""
    held: dict[str, Any] = {"set": name, "strength": STRENGTH, "waves": vars(WAVES), "seed": 0}
    found = [Cell(f"numbers-{name}", held, functools.partial(plain, held, options))]
    for epsilon in EPSILONS:
        for voters in CROWDS:
            more = held | {"epsilon": epsilon, "delta": DELTA, "voters": voters}
            more |= {"asked": ASKED, "learnt": LEARNT}
            work = functools.partial(private, more, options)
            found.append(Cell(f"numbers-{name}-{epsilon:g}-{voters}", more, work))
    return found


@functools.lru_cache(maxsize=1)
def prepared(name: str, data_dir: str | None) -> tuple[Floats, Floats, Floats, Floats]:
    """Training rows and targets, test rows and targets: a fifth is held out. Columns lie in
    [-1, 1], by their ranges in the set, which count as public.
    """
    x, y = raw(name, data_dir)
    order = np.random.default_rng(0).permutation(len(x))
    x, y, part = x[order], y[order], len(x) // 5
    low, high = x.min(axis=0), x.max(axis=0)
    x = (x - low) / np.where(high > low, high - low, 1) * 2 - 1
    return x[part:], y[part:], x[:part], y[:part]


def interval(y: Floats) -> tuple[float, float]:
    """The range of the targets, which counts as public."""
    return float(y.min()), float(y.max())


def error(said: Any, truth: Floats) -> float:
    """The root mean squared error, in standard deviations of the targets."""
    return float(np.sqrt(np.mean((np.asarray(said) - truth) ** 2)) / truth.std())


def plain(settings: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """One regression of all records on the same features, without noise."""
    x, y, test_x, test_y = prepared(settings["set"], options.data_dir)
    low, high = interval(y)
    weights = ridge_weights(WAVES.of(x), (y - low) / (high - low) * 2 - 1, STRENGTH)
    said = np.clip(WAVES.of(test_x) @ weights[:-1] + weights[-1], -1, 1)
    return {"records": len(x), "error": error(low + (said + 1) / 2 * (high - low), test_y)}


def private(settings: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """A verified service of answers, and a verified student of more answers."""
    x, y, test_x, test_y = prepared(settings["set"], options.data_dir)
    low, high = interval(y)
    shape: dict[str, Any] = {"voters": settings["voters"], "low": low, "high": high}
    parts: dict[str, Any] = {"waves": WAVES, "strength": STRENGTH}
    secret = Randomness.for_tests(0)
    voters = teach_numbers(x, y, **shape, **parts, randomness=secret)
    terms = (settings["epsilon"], DELTA)
    claim = plan.numbers(*terms, **shape, answers=ASKED)
    public = test_x[:LEARNT].astype(np.float32)
    places = voters.places(public)
    without = low + (high - low) * places.mean(axis=1) / (voters.classes - 1)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "answers", seed=0)
        with PrivatePredictor(run, claim, voters) as predictor:
            said = [answer.label for answer in predictor.answer_all(public[:ASKED])]
            spent = [_epsilon(predictor.finish())]
        teachers = {"teachers": settings["voters"], "low": low, "high": high}
        wide = number_claim(*terms, **teachers, answers=LEARNT)
        run = Run(Path(folder) / "student", seed=0, public_data=(DECLARED,))
        found = train_number_student(run, wide, lambda: (x, y, None), public, **parts)
        spent.append(_epsilon(found.run))
        rest = torch.from_numpy(test_x[LEARNT:].astype(np.float32))
        student = found.model(rest).numpy()
    return {
        "epsilon": max(spent),
        "without_noise": error(without, test_y[:LEARNT]),
        "answers": error(said, test_y[:ASKED]),
        "student": error(student, test_y[LEARNT:]),
    }


def _epsilon(folder: Path) -> float:
    assert all(finding.holds for finding in verify.verify(folder))
    return float(verify.load_card(folder / "privacy.json")["guarantee"]["epsilon"])


def sections(results: Results) -> list[Section]:
    """The table, where there are such cells."""
    rows = []
    for cell in results.starting("numbers-"):
        if "voters" not in cell.settings:
            continue
        name = cell.settings["set"]
        done, full = cell.result, results[f"numbers-{name}"].result
        rows.append(
            [name, full["records"], cell.settings["voters"], cell.settings["epsilon"],
             done["epsilon"], full["error"], done["without_noise"], done["answers"],
             done["student"]]
        )  # fmt: skip
    if not rows:
        return []
    columns = ("set", "records", "voters", "epsilon asked", "epsilon", "no privacy",
               "mean of voters, no noise", f"{ASKED} answers", f"student of {LEARNT}")  # fmt: skip
    words = (
        "Root mean squared errors in standard deviations of the target: 1 is the error of the mean "
        "of all targets. A fifth of each set is held out. All use the same features. Answers and "
        "student are of different claims at the same epsilon, and are measured on other rows. The "
        "noise has seed 0."
    )
    caption = "Answers that are numbers: error in standard deviations of the target"
    return [Section("Numbers", words, [Table("numbers", caption, columns, rows)])]
