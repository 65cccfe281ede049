"""Answers against a model at one epsilon: accuracy over the number of questions (van der Maaten &
Hannun 2020), on MNIST.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import dpfy
from dpfy.core.errors import Internal
from dpfy.core.randomness import Randomness
from dpfy.data.config import DataConfig
from dpfy.data.records import Records
from dpfy.data.source import load
from dpfy.prediction import PrivatePredictor, plan, ridge, shards
from dpfy.prediction.claim import VoteClaim
from dpfy.prediction.voters import LinearVoters
from dpfy.report import verify
from dpfy.runs.run import Run
from dpfy_lab.data_dependent.analysis import ConfidentVote, outcomes
from dpfy_lab.studies import figures, prediction_numbers
from dpfy_lab.studies.figures import Axes, Line
from dpfy_lab.studies.page import Figure, Page, Section, Table
from dpfy_lab.studies.study import Cell, Options, Results, Study

EPSILON, DELTA = 1.0, 1e-5
VOTERS, BUDGETS = (100, 250), (10, 30, 100, 300, 1000, 3000)
STRENGTH = 0.01
STEPS, CLIP, RATE = 150, 0.3, 60.0
DIRECTIONS, CELLS = 8, 7
ALWAYS = -1e9
"""A threshold that every question passes."""


def cells(options: Options) -> list[Cell]:
    """Votes without noise, answers for each number of voters and questions, and a model trained at
    the same epsilon.
    """
    held = {"epsilon": EPSILON, "delta": DELTA, "fast": options.fast}
    crowds, budgets = ((20,), (10, 100)) if options.fast else (VOTERS, BUDGETS)
    found = []
    for voters in crowds:
        one = held | {"voters": voters, "strength": STRENGTH, "seed": 0}
        found.append(Cell(f"voters-{voters}", one, functools.partial(without_noise, one, options)))
        for budget in budgets:
            settings = one | {"budget": budget}
            found.append(
                Cell(
                    f"answers-{voters}-{budget}",
                    settings,
                    functools.partial(answered, settings, options),
                )
            )
    settings = held | {"steps": 5 if options.fast else STEPS, "clip": CLIP, "rate": RATE, "seed": 0}
    found.append(Cell("training", settings, functools.partial(trained, settings, options)))
    for name in () if options.fast else prediction_numbers.SETS:
        found += prediction_numbers.cells(name, options)
    return found


def edges(images: Tensor) -> Tensor:
    """Public features of each image by itself: the roots of its mean slopes in eight directions in
    7 x 7 cells, of length one.
    """
    angles = torch.arange(DIRECTIONS) * (2 * torch.pi / DIRECTIONS)
    found = []
    for part in images.split(1000):
        wide = functional.pad(part, (1, 1, 1, 1))
        right, down = (
            wide[..., 1:-1, 2:] - wide[..., 1:-1, :-2],
            wide[..., 2:, 1:-1] - wide[..., :-2, 1:-1],
        )
        slopes = (
            torch.cos(angles).view(1, -1, 1, 1) * right + torch.sin(angles).view(1, -1, 1, 1) * down
        )
        pooled = functional.adaptive_avg_pool2d(functional.relu(slopes), CELLS).flatten(1)
        found.append(functional.normalize(pooled.sqrt(), dim=1))
    return torch.cat(found)


@functools.lru_cache(maxsize=1)
def prepared(options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(training features, labels, test features, labels)."""
    source = load(
        DataConfig(kind="embedded" if options.fast else "mnist"), data_dir=options.data_dir
    )
    assert source.test is not None
    (x, y), (test_x, test_y) = source.train.tensors[:2], source.test.tensors[:2]
    return edges(x), y, edges(test_x), test_y


@functools.lru_cache(maxsize=2)
def taught(voters: int, options: Options) -> LinearVoters:
    """Ridge regressions, each of its own part of the training images."""
    x, y = (part.numpy() for part in prepared(options)[:2])
    return ridge(x, y, shards(len(x), voters, Randomness.for_tests(0)), voters, 10, STRENGTH)


@functools.lru_cache(maxsize=2)
def votes(voters: int, options: Options) -> NDArray[np.int64]:
    """On all test images."""
    return taught(voters, options).votes(prepared(options)[2].numpy())


@functools.lru_cache(maxsize=16)
def claimed(voters: int, budget: int) -> VoteClaim:
    """The claim of so many answers. Its noise depends on their number alone: that of other voters
    is used again.
    """
    return plan.gaussian(EPSILON, DELTA, voters=voters, classes=10, answers=budget)


def without_noise(settings: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """How often one voter is right, and how often most are."""
    counts, truth = votes(settings["voters"], options), prepared(options)[3].numpy()
    one = counts[np.arange(len(truth)), truth].mean() / settings["voters"]
    return {"one_voter": float(one), "most_voters": float((counts.argmax(axis=1) == truth).mean())}


def answered(settings: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """A service that answers as many questions as are paid for, verified; and the chance to be
    right, over all test images.
    """
    voters, budget = settings["voters"], settings["budget"]
    x, truth = (part.numpy() for part in prepared(options)[2:])
    claim = claimed(voters, budget)
    with tempfile.TemporaryDirectory() as place:
        with PrivatePredictor(
            Run(Path(place) / "run"), claim, taught(voters, options)
        ) as predictor:
            found = predictor.answer_all(x[:budget])
            folder = predictor.finish()
        epsilon = _verified(folder)
    right = [
        answer.label == int(label) for answer, label in zip(found, truth[:budget], strict=True)
    ]
    rule, counts = (
        ConfidentVote(ALWAYS, 1.0, claim.sigma),
        votes(voters, options).astype(np.float64),
    )
    chances = np.concatenate(
        [outcomes(part, rule)[:, 1:] for part in np.array_split(counts, max(1, len(counts) // 500))]
    )
    expected = float(chances[np.arange(len(truth)), truth].mean())
    return {
        "sigma": claim.sigma,
        "epsilon": epsilon,
        "expected_accuracy": expected,
        "measured": float(np.mean(right)),
    }


def trained(settings: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """A linear model on the same features by DP-SGD, the whole data set in every batch,
    verified.
    """
    x, y, test_x, test_y = prepared(options)
    torch.manual_seed(settings["seed"])
    model = nn.Linear(x.shape[1], 10, bias=False)
    nn.init.zeros_(model.weight)
    recipe = dpfy.dpsgd(len(x), len(x), steps=settings["steps"], clip_norm=settings["clip"])
    with tempfile.TemporaryDirectory() as place:
        result = dpfy.fit(
            model,
            Records((x, y)),
            plan=recipe.calibrate(EPSILON, DELTA),
            optimizer=torch.optim.SGD(model.parameters(), lr=settings["rate"], momentum=0.9),
            run=dpfy.Run(Path(place) / "run", seed=settings["seed"]),
            evaluation=dpfy.PublicTest(Records((test_x, test_y))),
        )
        return {"test_accuracy": result.utility["test_accuracy"], "epsilon": _verified(result.run)}


def _verified(folder: Path) -> float:
    """The epsilon of a card that verifies."""
    wrong = [found for found in dpfy.verify(folder) if not found.holds]
    if wrong:
        raise Internal("the run of the study verifies", f"{wrong[0].what}: {wrong[0].detail}")
    return float(verify.load_card(folder / "privacy.json")["guarantee"]["epsilon"])


def crossing(results: Results) -> int | None:
    """The least number of questions from which on the model is right more often than the best
    votes, of those that were tried.
    """
    best: dict[int, float] = {}
    for cell in results.starting("answers-"):
        budget = cell.settings["budget"]
        best[budget] = max(best.get(budget, 0.0), cell.result["expected_accuracy"])
    model = results["training"].result["test_accuracy"] if "training" in results else 1.0
    return next((budget for budget in sorted(best) if best[budget] < model), None)


def page(results: Results) -> Page:
    """The figure, its table, and where the lines cross."""
    curves, rows = [], []
    for crowd in results.starting("voters-"):
        voters = crowd.settings["voters"]
        found = results.starting(f"answers-{voters}-")
        for cell in found:
            done = cell.result
            rows.append([voters, cell.settings["budget"], done["sigma"], done["epsilon"],
                         100 * done["expected_accuracy"], 100 * done["measured"]])  # fmt: skip
        budgets = [cell.settings["budget"] for cell in found]
        curves.append(
            Line(
                f"{voters} voters",
                budgets,
                [100 * c.result["expected_accuracy"] for c in found],
                "o-",
            )
        )
    ends = sorted({budget for curve in curves for budget in curve.x})
    models = []
    if "training" in results:
        done = results["training"].result
        curves.append(
            Line("a trained model", ends, [100 * done["test_accuracy"]] * len(ends), "--")
        )
        models.append(["linear model by DP-SGD", done["epsilon"], 100 * done["test_accuracy"]])
    for crowd in results.starting("voters-"):
        name = f"{crowd.settings['voters']} voters"
        models.append(
            [f"{name}, most of them, no noise", "no privacy", 100 * crowd.result["most_voters"]]
        )
        models.append(
            [f"{name}, one of them, no noise", "no privacy", 100 * crowd.result["one_voter"]]
        )
    axes = Axes("questions that are answered in all", "accuracy, %", log_x=True)
    picture = Figure(
        "crossing",
        f"Accuracy over the inference budget, epsilon {EPSILON:g}",
        figures.lines(curves, axes),
    )
    columns = ("voters", "answers", "noise, votes", "epsilon", "expected %", "of these answers %")
    at = crossing(results)
    words = (
        "Every row is a service with a verified report. Expected: the chance of the right answer, by "
        "quadrature, over all test images; "
        "the last column counts the answers that the service gave. "
        + (
            f"From {at} questions on the model is better."
            if at is not None
            else "The lines do not cross here."
        )
    )
    facts = {
        "seeds": "seed 0 of shards, weights and noise of training; noise of answers from the "
        "operating system",
        "runs and spread": "one run a row; expected accuracies have no spread of the noise",
        "accountant": "tight",
        "unit": "one example",
        "adjacency": "one example added or removed",
        "hyperparameters": "four strengths of the ridge and eight settings of clip norm, rate and "
        "steps (40, 80; then 150 was taken) were "
        "compared on the last 10,000 training images; two strengths were seen on the test images "
        "before. The choice is not charged",
    }
    answers = Table("answers", "Answers from noisy votes", columns, rows)
    other = Table(
        "models",
        "One release, any number of questions; and votes without noise",
        ("what", "epsilon", "accuracy %"),
        models,
    )
    sections = [Section("Answers or a model", words, [answers, picture, other])]
    return Page([*sections, *prediction_numbers.sections(results)], facts)


STUDY = Study(
    "prediction",
    "Private answers against a private model, over the number of questions",
    "MNIST, 60,000 images to learn from and 10,000 to test on, epsilon 1, delta 1e-5; the "
    "comparison of van der Maaten & Hannun 2020. "
    "Voters are ridge regressions on public features of edges (392 numbers), the model is linear "
    "on the same features.",
    cells,
    page,
)
