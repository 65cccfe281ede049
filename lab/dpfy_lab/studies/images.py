"""Our recipe on all of MNIST and Fashion-MNIST: scattering, private moments, one linear layer, the
whole data set in every batch.
"""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import dpfy
from dpfy.accounting.gaussian import sigma_analytic
from dpfy.core.errors import Internal
from dpfy.core.values import Bound, Bounded
from dpfy.data.config import DataConfig
from dpfy.data.source import load
from dpfy.models.scattering import scattering
from dpfy.noise.strategy import Identity
from dpfy.noise.stream import NoiseStream
from dpfy.report import card as cards
from dpfy.report import verify
from dpfy.training import TrainingRun, Update
from dpfy_lab.studies.images_page import page
from dpfy_lab.studies.study import Cell, Options, Study
from dpfy_lab.studies.sweep import LENGTH, MOMENTUM, Setting, rows, sweep
from dpfy_lab.whitening import maps
from dpfy_lab.whitening.claim import MomentsClaim

DELTA = 1e-5
RECORDS = 60_000
GROUPS = 27
VALIDATION = 10_000
SEEDS = range(5)
UP = 1 + 1e-9
"""Noise is rounded up by this, so that the composed guarantee cannot pass its target by
rounding.
"""

TARGETS = {"mnist": (1.0, 1.68, 3.0), "fashion-mnist": (1.0, 1.68, 3.0)}


@dataclass(frozen=True)
class HeadRecipe:
    """Share of the budget (of mu squared) for the moments, power of the whitening, cosines (0 for
    none) and their width, the head.
    """

    share: float
    power: float
    waves: int
    width: float
    head: Setting


CHOSEN: dict[tuple[str, float], HeadRecipe] = {
    ("mnist", 1.0): HeadRecipe(0.05, 0.5, 12288, 1.0, Setting(400, 0.03, 4.0, 0.0, 0.98)),
    ("mnist", 1.68): HeadRecipe(0.05, 0.5, 0, 0.0, Setting(700, 0.03, 4.0, 0.0, 0.98)),
    ("mnist", 3.0): HeadRecipe(0.05, 0.5, 0, 0.0, Setting(700, 0.2, 8.0, 0.0, 0.98)),
    ("fashion-mnist", 1.0): HeadRecipe(0.05, 0.5, 0, 0.0, Setting(700, 0.2, 4.0, 0.0, 0.98)),
    ("fashion-mnist", 1.68): HeadRecipe(0.05, 0.5, 0, 0.0, Setting(700, 0.2, 4.0, 0.0, 0.98)),
    ("fashion-mnist", 3.0): HeadRecipe(0.05, 0.5, 12288, 1.0, Setting(400, 0.2, 8.0, 0.0, 0.98)),
}
"""`best` of the sweep cells: the highest accuracy on the last 10,000 training records."""


def cells(options: Options) -> list[Cell]:
    """The sweeps that the settings come from, then the runs."""
    return sweep_cells(options) + run_cells(options)


FEATURES = ((0.5, 0, 0.0, (700, 1500)), (0.5, 12288, 1.0, (400, 800)), (0.5, 12288, 0.7, (400,)))
"""Whitening power, number of cosines, their width, steps: the maps that are compared."""
GRID = {"clip": (0.03, 0.2), "rate": (4.0, 8.0, 16.0), "decay": (0.0, 1.0), "average": (0.98,)}
SHARE = 0.05


def sweep_cells(options: Options) -> list[Cell]:
    """One cell for each data set, map of features and number of steps."""
    found = []
    for data, (power, waves, width, lengths) in itertools.product(TARGETS, FEATURES):
        for steps in lengths:
            settings = {
                "data": data,
                "share": SHARE,
                "power": power,
                "waves": waves,
                "width": width,
                "steps": steps,
            }
            settings |= {
                "grid": {k: list(v) for k, v in GRID.items()},
                "epsilons": list(TARGETS[data]),
            }
            settings |= {"validation": VALIDATION, "seed": 0}
            name = f"sweep-{data}-{waves}-{width:g}-{steps}"
            found.append(Cell(name, settings, functools.partial(run_sweep, settings, options)))
    return found


def run_sweep(settings: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Train on the first 50,000 records, compare on the last 10,000; the noise is that of 50,000
    records.
    """
    images, labels, _, _ = extracted(settings["data"], options)
    cut = RECORDS - VALIDATION
    grid = [Setting(settings["steps"], *values) for values in itertools.product(*GRID.values())]
    found: list[dict[str, Any]] = []
    for epsilon in settings["epsilons"]:
        mu = 1 / sigma_analytic(epsilon, DELTA)
        recipe = HeadRecipe(
            settings["share"], settings["power"], settings["waves"], settings["width"], grid[0]
        )
        noise = noise_of(recipe, epsilon)[0]
        torch.manual_seed(settings["seed"])
        total = {
            k: v + torch.randn_like(v) * noise * maps.BOUND
            for k, v in maps.sums(images[:cut]).items()
        }
        x = mapped(recipe, total, noise, cut, images)
        mus = [mu * math.sqrt(1 - recipe.share)] * len(grid)
        accuracy = sweep(
            (x[:cut], labels[:cut]), (x[cut:], labels[cut:]), grid, mus, settings["seed"]
        )
        found += rows(grid, [epsilon] * len(grid), accuracy)
    return {"rows": found}


def run_cells(options: Options) -> list[Cell]:
    """One cell for each data set, epsilon and noise seed."""
    found = []
    for (data, epsilon), recipe in CHOSEN.items():
        for seed in SEEDS:
            settings = {
                "data": data,
                "epsilon": epsilon,
                "delta": DELTA,
                "seed": seed,
                "recipe": asdict(recipe),
            }
            compute = functools.partial(run_one, data, epsilon, seed, recipe, options)
            found.append(Cell(f"run-{data}-{epsilon:g}-{seed}", settings, compute))
    return found


def noise_of(recipe: HeadRecipe, epsilon: float) -> tuple[float, float]:
    """Noise multipliers of the moments and of each step: Gaussian releases whose squared ratios add
    up to the target's.
    """
    mu = 1 / sigma_analytic(epsilon, DELTA)
    return UP / (mu * math.sqrt(recipe.share)), UP * math.sqrt(
        recipe.head.steps / (1 - recipe.share)
    ) / mu


def run_one(
    data: str, epsilon: float, seed: int, recipe: HeadRecipe, options: Options
) -> dict[str, Any]:
    """A private run: moments and training are reserved in one folder before a record is read; the
    figures are those of its card.
    """
    with tempfile.TemporaryDirectory() as place:
        start = time.monotonic()
        folder = train(Path(place) / "run", data, epsilon, seed, recipe, options)
        seconds, wrong = time.monotonic() - start, [f for f in dpfy.verify(folder) if not f.holds]
        if wrong:
            raise Internal(f"the run of {data} verifies", f"{wrong[0].what}: {wrong[0].detail}")
        card = verify.load_card(folder / "privacy.json")
    stated, training = card["guarantee"], cards.section(card, "training")
    return {
        "test_accuracy": training["utility"]["test_accuracy"],
        "epsilon": stated["epsilon"],
        "noise_multipliers": list(noise_of(recipe, epsilon)),
        "accountant": stated["accountant"],
        "adjacency": stated["adjacency"],
        "unit": stated["unit"],
        "training_seconds": seconds,
    }


def train(
    path: Path, data: str, epsilon: float, seed: int, recipe: HeadRecipe, options: Options
) -> Path:
    """The recipe through the public interface: one folder with two claims, and one card for
    both.
    """
    run = dpfy.Run(path, seed=seed)
    return train_head(run, RECORDS, epsilon, recipe, options, lambda: extracted(data, options))


def train_head(
    run: dpfy.Run,
    records: int,
    epsilon: float,
    recipe: HeadRecipe,
    options: Options,
    parts: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]],
    kept: torch.dtype = torch.float32,
) -> Path:
    """The recipe on features that `parts` gives when moments and training are reserved; mapped
    features are kept as numbers of type `kept`.
    """
    moments_noise, step_noise = noise_of(recipe, epsilon)
    plan = dpfy.dpsgd(
        records, records, steps=recipe.head.steps, clip_norm=recipe.head.clip_norm
    ).with_noise(step_noise, delta=DELTA)
    moments = MomentsClaim(moments_noise, delta=DELTA, records=records)
    with TrainingRun(run, plan, beside=(moments,)) as folder:
        images, labels, test_images, test_labels = parts()
        total = Bounded(maps.sums(images), Bound(maps.BOUND))
        folder.bind("moments", b"".join(t.cpu().numpy().tobytes() for t in total.value.values()))
        stream = NoiseStream(Identity(), moments_noise, folder.randomness, "moments")
        released, _ = stream.release(total, 0, {}, folder.begin("moments"))
        rows, test = (
            mapped(recipe, released.value, moments_noise, records, part) * LENGTH
            for part in (images, test_images)
        )
        head = nn.Linear(rows.shape[1], 10, device=options.device)
        for p in head.parameters():
            nn.init.zeros_(p)
        optimizer = torch.optim.SGD(
            head.parameters(), lr=recipe.head.learning_rate, momentum=MOMENTUM
        )
        update = Update(recipe.head.average, recipe.head.schedule)
        runtime = dpfy.Runtime(max_physical_batch=records, device=options.device)
        with dpfy.PrivateTraining(
            head, optimizer, (rows.to(kept), labels), plan, folder, runtime=runtime, update=update
        ) as training:
            del rows, images
            for x, y in training.batches():
                training.step(functional.cross_entropy(head(x.float()), y, reduction="none"))
            with training.averaged(), torch.no_grad():
                accuracy = float((head(test).argmax(1) == test_labels).double().mean())
            training.finish({"test_accuracy": accuracy}, test="public")
    return Path(run.path)


@functools.lru_cache(maxsize=1)
def extracted(data: str, options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(training features, labels, test features, labels): scattering, normalised within groups of
    channels, each record of length one.
    """
    source = load(DataConfig(kind=data), data_dir=options.data_dir)

    def features(images: Tensor) -> Tensor:
        parts = (
            functional.group_norm(scattering(part.to(options.device)), GROUPS).flatten(2)
            for part in images.split(1000)
        )
        return torch.cat([maps.unit(part) for part in parts])

    (x, y), (test_x, test_y) = source.train.tensors, source.test.tensors
    return features(x), y.to(options.device), features(test_x), test_y.to(options.device)


def mapped(
    recipe: HeadRecipe, noisy: dict[str, Tensor], noise: float, records: int, images: Tensor
) -> Tensor:
    """Rows of length one for the head, by the released moments and public constants."""
    white = maps.Whitening.from_sums(noisy, records, recipe.power, noise * maps.BOUND)(images)
    return maps.RandomFeatures(recipe.waves, recipe.width)(white) if recipe.waves else white


def best(results: Mapping[str, Any]) -> dict[tuple[str, float], HeadRecipe]:
    """For each data set and epsilon the setting with the highest validation accuracy over all
    sweeps.
    """
    top: dict[tuple[str, float], tuple[float, HeadRecipe]] = {}
    for cell in results.values():
        s = cell.settings
        for row in cell.result.get("rows", ()):
            key = (s["data"], row["epsilon"])
            head = Setting(row["steps"], row["clip"], row["rate"], row["decay"], row["average"])
            recipe = HeadRecipe(s["share"], s["power"], s["waves"], s["width"], head)
            if key not in top or row["accuracy"] > top[key][0]:
                top[key] = (row["accuracy"], recipe)
    return {key: recipe for key, (_, recipe) in top.items()}


STUDY = Study(
    "images",
    "Our recipe on all of MNIST and Fashion-MNIST",
    "60,000 images to train on, 10,000 to test on, delta 1e-5. Published for comparison: Tramer & "
    "Boneh 2021.",
    cells,
    page,
)
