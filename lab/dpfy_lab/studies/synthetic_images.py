"""Synthetic MNIST: what a network that sees nothing else says of the real test images."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import dpfy
from dpfy.core.errors import Internal
from dpfy.data.config import DataConfig
from dpfy.data.source import load
from dpfy.runs.run import Run
from dpfy_lab.studies.study import Cell, Options, Study
from dpfy_lab.studies.synthetic_images_page import page
from dpfy_lab.synthetic_images.run import ImageOptions, ImageSettings, synthesize_images

DELTA = 1e-5
RUNS = {("mnist", 1.0): 1, ("mnist", 10.0): 1}
"""How many runs there are of each data set and epsilon."""
IMAGES, EPOCHS, BATCH, RATE, SHAKEN = 20_000, 4, 100, 4e-3, 0.07
SHORT = {("embedded", 10.0): 1}


def cells(options: Options) -> list[Cell]:
    """A run for each data set, epsilon and seed."""
    runs, images, epochs = (SHORT, 2000, 1) if options.fast else (RUNS, IMAGES, EPOCHS)
    found = []
    for (data, epsilon), count in runs.items():
        for seed in range(count):
            settings = {
                "data": data,
                "epsilon": epsilon,
                "delta": DELTA,
                "seed": seed,
                "images": images,
                "epochs": epochs,
            }
            found.append(
                Cell(
                    f"run-{data}-{epsilon:g}-{seed}",
                    settings,
                    functools.partial(run_one, settings, options),
                )
            )
    return found


def run_one(settings: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """A verified synthesis, then the network trained on its images alone; test images are
    public.
    """
    started = time.process_time()
    with tempfile.TemporaryDirectory() as place:
        made = synthesize_images(
            settings["data"],
            terms=ImageSettings(settings["epsilon"], settings["delta"]),
            run=Run(Path(place) / "run", seed=settings["seed"]),
            options=ImageOptions(images=settings["images"]),
            data_dir=options.data_dir,
        )
        seconds = time.process_time() - started
        wrong = [finding for finding in dpfy.verify(made.run) if not finding.holds]
        if wrong:
            raise Internal("the synthesis verifies", f"{wrong[0].what}: {wrong[0].detail}")
        images, labels = made.arrays
    x, y = (
        torch.from_numpy(images)[:, None].float() / 255,
        torch.from_numpy(labels.astype(np.int64)),
    )
    test_x, test_y = load(DataConfig(kind=settings["data"]), data_dir=options.data_dir).test.tensors
    test = test_x, test_y
    stated = made.card["guarantee"]
    return {
        "test_accuracy": accuracy(
            (x, y), test, settings["epochs"], settings["seed"], options.device
        ),
        "images": len(images),
        "clusters": made.facts["clusters_of_a_class"],
        "axes": made.facts["axes"],
        **closeness((x, y), test),
        "synthesis_cpu_seconds": seconds,
        "epsilon": stated["epsilon"],
        "accountant": stated["accountant"],
        "adjacency": stated["adjacency"],
    }


def network() -> nn.Sequential:
    """Two layers of convolution and two dense ones, for 28 x 28 pixels and 10 classes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def shaken(images: Tensor) -> Tensor:
    """Each image turned, sheared, scaled and moved a little, at random: the usual augmentation."""
    count = len(images)
    drawn = SHAKEN * torch.randn(6, count, device=images.device)
    turn = torch.stack(
        [1 + drawn[0], drawn[1] + drawn[2], drawn[4], -drawn[2], 1 + drawn[3], drawn[5]], dim=1
    )
    grid = functional.affine_grid(
        turn.reshape(count, 2, 3), list(images.shape), align_corners=False
    )
    return functional.grid_sample(images, grid, align_corners=False)


def accuracy(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], epochs: int, seed: int, device: str
) -> float:
    """The share of test images that a network recognises which was trained on `train` alone, for a
    fixed number of epochs.
    """
    torch.manual_seed(seed)
    (x, y), net = (part.to(device) for part in train), network().to(device)
    optimizer, steps = torch.optim.Adam(net.parameters()), max(1, len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=epochs * steps)
    for _ in range(epochs):
        order = torch.randperm(len(x), device=device)
        for number in range(steps):
            batch = order[number * BATCH : (number + 1) * BATCH]
            optimizer.zero_grad()
            functional.cross_entropy(net(shaken(x[batch])), y[batch]).backward()
            optimizer.step()
            schedule.step()
    net.eval()
    with torch.no_grad():
        found = torch.cat(
            [net(part.to(device)).argmax(dim=1).cpu() for part in test[0].split(1000)]
        )
    return float((found == test[1]).double().mean())


def closeness(made: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Pixels of synthetic and of test images of one class: how far their means and their standard
    deviations are apart, on average.
    """
    apart = {"pixel_means_apart": 0.0, "pixel_deviations_apart": 0.0}
    classes = [
        label for label in range(10) if all(int((y == label).sum()) > 1 for _, y in (made, test))
    ]
    for label in classes:
        one, other = (x[y == label] for x, y in (made, test))
        apart["pixel_means_apart"] += float(
            (one.mean(dim=0) - other.mean(dim=0)).abs().mean()
        ) / len(classes)
        apart["pixel_deviations_apart"] += float(
            (one.std(dim=0) - other.std(dim=0)).abs().mean()
        ) / len(classes)
    return apart


STUDY = Study(
    "synthetic-images",
    "Synthetic MNIST",
    "60,000 private images, delta 1e-5, one image added or removed; a network that was trained on "
    "20,000 synthetic images alone is tested "
    "on the 10,000 real test images. Published for comparison: the accuracies that DP-FETA (2025) "
    "and PrivImage (2024) state.",
    cells,
    page,
)
