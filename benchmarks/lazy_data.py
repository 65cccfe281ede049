"""Lazy data: 60,000 PNG files read by two workers, and a memory-mapped file of 20 GB, each trained
on privately.

    python benchmarks/lazy_data.py images            private loop against a plain DataLoader loop,
    in one run python benchmarks/lazy_data.py mapped            peak resident memory, with all else
    of the process in it

Files are made in a temporary folder and removed. The mapped file is sparse: it takes no room on the
disk.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import dpfy

SIDE, CLASSES = 28, 10
TURN = 12

PLANNED = 4000
"""Steps of the plan, of which the first ones are measured: the checks of a run are as many in a
short one.
"""


class Images(Dataset[Any]):
    """PNG files `0.png`, `1.png`, ...; the label is the number's last digit. With `flips`,
    augmented by torch's generator.
    """

    def __init__(self, folder: Path, images: int, flips: bool) -> None:
        self.folder, self.images, self.flips = folder, images, flips

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        with Image.open(self.folder / f"{index}.png") as image:
            pixels = torch.from_numpy(np.array(image)).float()[None] / 255
        return (pixels.flip(-1) if self.flips and torch.rand(()) < 0.5 else pixels), index % CLASSES


def write_images(folder: Path, images: int) -> None:
    """Images of smooth blobs: about as hard to decode as digits."""
    from PIL import Image

    rng = np.random.default_rng(0)
    grid = np.arange(SIDE)
    for index in range(images):
        (x, y), width = rng.uniform(6, 22, 2), rng.uniform(3, 6)
        blob = 255 * np.exp(-((grid[:, None] - x) ** 2 + (grid - y) ** 2) / (2 * width**2))
        Image.fromarray(np.where(blob > 20, blob, 0).astype(np.uint8)).save(folder / f"{index}.png")


def perceptron() -> nn.Module:
    """One hidden layer: reading the files takes most of the time."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE * SIDE, 128), nn.Tanh(), nn.Linear(128, CLASSES)
    )


def lenet() -> nn.Module:
    """LeNet-5 with tanh and average pooling: on a CPU as slow as the reading."""
    convolutions = (
        nn.Conv2d(1, 6, 5, padding=2),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.Tanh(),
        nn.AvgPool2d(2),
    )
    dense = (nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, CLASSES))
    return nn.Sequential(*convolutions, nn.Flatten(), *dense)


MODELS = {"perceptron": perceptron, "lenet": lenet}


@dataclass(frozen=True)
class Loop:
    """What both loops share."""

    data: Images
    batch: int
    steps: int
    workers: int
    device: str
    model: str

    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The network and its optimizer."""
        torch.manual_seed(0)
        net = MODELS[self.model]().to(self.device)
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    def plain(self) -> Iterator[int]:
        """A plain DataLoader loop; gives the images of each step."""
        net, optimizer = self.parts()
        loader = DataLoader(
            self.data,
            batch_size=self.batch,
            shuffle=True,
            num_workers=self.workers,
            pin_memory=self.device != "cpu",
        )
        done = 0
        while True:
            for x, y in loader:
                x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
                loss = functional.cross_entropy(net(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                yield len(x)
                done += 1
                if done == self.steps:
                    return

    def private(self, run: Path) -> Iterator[int]:
        """The private loop on the same files; gives the images of each step."""
        net, optimizer = self.parts()
        recipe = dpfy.dpsgd(
            len(self.data), self.batch, steps=max(PLANNED, self.steps), clip_norm=1.0
        )
        data = dpfy.lazy(self.data, workers=self.workers)
        with dpfy.PrivateTraining(
            net, optimizer, data, recipe.with_noise(1.0, delta=1e-5), run
        ) as training:
            for x, y in training.batches():
                training.step(functional.cross_entropy(net(x), y, reduction="none"))
                yield len(x)
                if training.steps_done == self.steps:
                    return


def images(loop: Loop, folder: Path) -> dict[str, float]:
    """Images a second of both loops, which take turns, and the processor time that each takes for
    an image, workers included.
    """
    rates = turns({"plain": loop.plain(), "private": loop.private(folder / "run")}, loop.steps)
    spent = {
        "plain": cpu_seconds(loop.plain()),
        "private": cpu_seconds(loop.private(folder / "again")),
    }
    return {
        "plain_images_a_second": statistics.median(rates["plain"]),
        "private_images_a_second": statistics.median(rates["private"]),
        "ratio": statistics.median(
            b / a for a, b in zip(rates["plain"], rates["private"], strict=True)
        ),
        "plain_cpu_us": 1e6 * spent["plain"],
        "private_cpu_us": 1e6 * spent["private"],
        "cpu_ratio": spent["plain"] / spent["private"],
    }


def turns(loops: dict[str, Iterator[int]], steps: int) -> dict[str, list[float]]:
    """The rates of each loop in turns of TURN steps, one after the other, so that what else the
    machine does meets all alike.
    """
    for loop in loops.values():
        next(loop)
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range((steps - 1) // TURN):
        for name, loop in sorted(loops.items(), reverse=bool(turn % 2)):
            began = time.perf_counter()
            seen = sum(next(loop) for _ in range(TURN))
            rates[name].append(seen / (time.perf_counter() - began))
    for loop in loops.values():
        loop.close()  # type: ignore[attr-defined]
    return rates


def cpu_seconds(loop: Iterator[int]) -> float:
    """Processor time for an image, after the first step: of this process, and of the workers that
    end with the loop.
    """
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    first, began = next(loop), time.process_time()
    seen = sum(loop)
    here = (time.process_time() - began) / seen
    return here + (sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before) / (first + seen)


def mapped(
    folder: Path, gigabytes: float, steps: int, batch: int, workers: int
) -> dict[str, float]:
    """Train on records of 3 x 64 x 64 bytes, and tell the most memory that this process and its
    workers held.
    """
    size = 3 * 64 * 64
    path, rows = folder / "data.bin", int(gigabytes * 1e9) // size
    with path.open("wb") as file:
        file.truncate(rows * size)
    x = np.memmap(path, dtype=np.uint8, mode="r", shape=(rows, size))
    net = nn.Sequential(nn.Linear(size, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    plan = dpfy.dpsgd(rows, batch, steps=steps, clip_norm=1.0).with_noise(1.0, delta=1e-8)
    read = 0
    with dpfy.PrivateTraining(
        net, optimizer, dpfy.lazy(x, workers=workers), plan, folder / "run"
    ) as training:
        for (pixels,) in training.batches():
            read += pixels.numel()
            training.step(
                functional.cross_entropy(
                    net(pixels.float() / 255), pixels[:, 0].long() % CLASSES, reduction="none"
                )
            )
    peak = [
        resource.getrusage(who).ru_maxrss / 2**20
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return {
        "gigabytes": gigabytes,
        "read_gigabytes": read / 1e9,
        "peak_gib": peak[0],
        "largest_worker_gib": peak[1],
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["images", "mapped"])
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", choices=MODELS, default="perceptron")
    parser.add_argument("--flips", action="store_true", help="augment the images")
    parser.add_argument("--gigabytes", type=float, default=20.0)
    chosen = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    warnings.filterwarnings("ignore", "run .* unfinished")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if chosen.what == "mapped":
            print(
                json.dumps(
                    mapped(folder, chosen.gigabytes, chosen.steps, chosen.batch, chosen.workers)
                )
            )
            return
        write_images(folder, chosen.images)
        data = Images(folder, chosen.images, chosen.flips)
        loop = Loop(data, chosen.batch, chosen.steps, chosen.workers, chosen.device, chosen.model)
        print(json.dumps(images(loop, folder)))


if __name__ == "__main__":
    main()
