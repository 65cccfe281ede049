"""Lazy data: 60,000 PNG files read by two workers, and a memory-mapped file of 20 GB, each trained on privately.

    python benchmarks/lazy_data.py images            private loop against a plain DataLoader loop, in one run
    python benchmarks/lazy_data.py mapped            peak resident memory, with all else of the process in it

Files are made in a temporary folder and removed. The mapped file is sparse: it takes no room on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import dpfy

SIDE, CLASSES = 28, 10


class Images(Dataset[Any]):
    """PNG files `0.png`, `1.png`, ...; the label is the number's last digit. With `flips`, augmented by torch's generator."""

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


def network() -> nn.Module:
    """LeNet-5 with tanh and average pooling."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.Tanh(),
        nn.Linear(120, 84),
        nn.Tanh(),
        nn.Linear(84, CLASSES),
    )


def plain(data: Dataset[Any], batch: int, steps: int, workers: int, device: str) -> Iterator[int]:
    """A plain DataLoader loop; gives the images of each step."""
    net = network().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=batch, shuffle=True, num_workers=workers, pin_memory=device != "cpu")
    done = 0
    while True:
        for x, y in loader:
            loss = functional.cross_entropy(net(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield len(x)
            done += 1
            if done == steps:
                return


def private(data: Dataset[Any], batch: int, steps: int, workers: int, device: str, run: Path) -> Iterator[int]:
    """The private loop on the same files; gives the images of each step."""
    net = network().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    plan = dpfy.dpsgd(len(data), batch, steps=steps, clip_norm=1.0).with_noise(1.0, delta=1e-5)  # type: ignore[arg-type]
    with dpfy.PrivateTraining(net, optimizer, dpfy.lazy(data, workers=workers), plan, run) as training:
        for x, y in training.batches():
            training.step(functional.cross_entropy(net(x), y, reduction="none"))
            yield len(x)


def images(count: int, batch: int, steps: int, workers: int, device: str, flips: bool = False) -> dict[str, float]:
    """Images a second of both loops, in turns of a quarter each, and what they took of all processors."""
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), count)
        data = Images(Path(folder), count, flips)
        seconds: dict[str, list[float]] = {"plain": [], "private": []}
        seen = {"plain": 0, "private": 0}
        for turn in range(4):
            order = ("plain", "private") if turn % 2 else ("private", "plain")
            for name in order:
                quarter = steps // 4
                loop = (
                    plain(data, batch, quarter, workers, device)
                    if name == "plain"
                    else private(data, batch, quarter, workers, device, Path(folder) / f"run{turn}")
                )
                next(loop)  # entry, workers and the first step
                began = time.perf_counter()
                found = sum(loop)
                seconds[name].append(time.perf_counter() - began)
                seen[name] += found
    rates = {name: seen[name] / sum(seconds[name]) for name in seen}
    return {
        "plain_images_a_second": rates["plain"],
        "private_images_a_second": rates["private"],
        "ratio": rates["private"] / rates["plain"],
    }


@contextmanager
def sparse(folder: Path, gigabytes: float, record: int) -> Iterator[tuple[Path, int]]:
    """A file of that size without a byte on the disk, and how many records it holds."""
    path, rows = folder / "data.bin", int(gigabytes * 1e9) // record
    with path.open("wb") as file:
        file.truncate(rows * record)
    yield path, rows
    path.unlink()


def mapped(gigabytes: float, steps: int, batch: int, workers: int) -> dict[str, float]:
    """Train on records of 3 x 64 x 64 bytes, and tell the most memory that this process and its workers held."""
    side = 64
    with tempfile.TemporaryDirectory() as folder, sparse(Path(folder), gigabytes, 3 * side * side) as (path, rows):
        x = np.memmap(path, dtype=np.uint8, mode="r", shape=(rows, 3 * side * side))
        net = nn.Sequential(nn.Linear(3 * side * side, 32), nn.Tanh(), nn.Linear(32, CLASSES))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        plan = dpfy.dpsgd(rows, batch, steps=steps, clip_norm=1.0).with_noise(1.0, delta=1e-8)
        data = dpfy.lazy(x, workers=workers)
        read = 0
        with dpfy.PrivateTraining(net, optimizer, data, plan, Path(folder) / "run") as training:
            for (pixels,) in training.batches():
                read += pixels.numel()
                training.step(
                    functional.cross_entropy(net(pixels.float() / 255), pixels[:, 0].long() % CLASSES, reduction="none")
                )
    peak = [resource.getrusage(who).ru_maxrss / 2**20 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {"gigabytes": gigabytes, "read_gigabytes": read / 1e9, "peak_gib": peak[0], "largest_worker_gib": peak[1]}


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["images", "mapped"])
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--flips", action="store_true", help="augment the images")
    parser.add_argument("--gigabytes", type=float, default=20.0)
    chosen = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    works: dict[str, Callable[[], dict[str, float]]] = {
        "images": lambda: images(chosen.images, chosen.batch, chosen.steps, chosen.workers, chosen.device, chosen.flips),
        "mapped": lambda: mapped(chosen.gigabytes, chosen.steps, chosen.batch, chosen.workers),
    }
    print(json.dumps(works[chosen.what]()))


if __name__ == "__main__":
    main()
