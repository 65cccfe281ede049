"""What several ranks cost: a step of a model given plain, to DDP and to FSDP2, private or not, and
the memory of a rank of four.

``python benchmarks/distributed.py`` measures both on this machine (gloo, CPU; CPU seconds);
``--device cuda`` measures the step on one GPU (wall seconds) and looks, by NCCL, whether one rank
releases what no ranks do. ``--only step``, ``memory`` or ``equal``. One JSON line for each case.
The promise: with one rank at most 1.05 of the private step without ranks; what torch's own wrapper
costs a step that is not private stands beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import dpfy
from dpfy.plan import blt

LIMIT, RANKS = 1.05, 4
LAYOUTS = ("plain", "ddp", "fsdp")


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention with heads of 64, then the feed-forward part."""
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(batch, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Mean(nn.Module):
    """The mean over the positions."""

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to [batch, width]."""
        return x.mean(1)


@dataclass(frozen=True)
class Shape:
    """A model of `layers` equal blocks, and its batch; with `length`, transformer blocks on
    sequences of tokens.
    """

    width: int
    layers: int
    batch: int
    length: int = 0
    tokens: int = 8192

    def model(self, device: str) -> nn.Sequential:
        """The same weights each time."""
        torch.manual_seed(0)
        w = self.width
        with torch.device(device):
            if self.length:
                blocks = [
                    nn.Embedding(self.tokens, w),
                    *(Block(w) for _ in range(self.layers)),
                    nn.LayerNorm(w),
                    Mean(),
                ]
            else:
                blocks = [
                    nn.Sequential(nn.Linear(w, w), nn.GELU(), nn.LayerNorm(w))
                    for _ in range(self.layers)
                ]
            return nn.Sequential(*blocks, nn.Linear(w, 10))

    def data(self, batches: int = 1) -> tuple[Tensor, Tensor]:
        """Records and their classes."""
        torch.manual_seed(1)
        count = batches * self.batch
        x = (
            torch.randint(0, self.tokens, (count, self.length))
            if self.length
            else torch.randn(count, self.width)
        )
        return x, torch.randint(0, 10, (count,))


SHAPES = {
    "cpu": {"mlp-512x4": Shape(512, 4, 256)},
    "cuda": {
        "mlp-2048x8": Shape(2048, 8, 256),
        "transformer-1024x12": Shape(1024, 12, 64, 512),
        "transformer-2048x12": Shape(2048, 12, 32, 512),
    },
}


def wrapped(model: nn.Sequential, layout: str, device: str) -> nn.Module:
    """The model as the layout takes it."""
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout == "fsdp":
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for block in model[:-1]:
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


class Clock:
    """Seconds between its calls: of a CPU those that this process used, of a GPU those on the wall,
    its work done.
    """

    def __init__(self, device: str) -> None:
        self.cuda, self.taken = device == "cuda", list[float]()
        self.began = self.now()

    def now(self) -> float:
        """The time, once the device has done what it was given."""
        if not self.cuda:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def __call__(self) -> None:
        now = self.now()
        self.taken.append(now - self.began)
        self.began = now


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One for each example."""
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def not_private(shape: Shape, layout: str, device: str, count: int) -> list[float]:
    """Seconds of each step of a plain torch loop."""
    model = wrapped(shape.model(device), layout, device)
    x, y = (t.to(device) for t in shape.data())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)
    clock = Clock(device)
    for _ in range(count):
        losses(model, x, y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        clock()
    return clock.taken


def private(
    shape: Shape,
    layout: str,
    device: str,
    count: int,
    strategy: str = "dpsgd",
    look: Callable[[Any], object] = id,
) -> list[float]:
    """Seconds of each private step. With DP-SGD every record is in every batch, so that all steps
    are of one size.

    The plan has more steps than are measured: a run that ends would write its model and a
    checkpoint, which takes longer than the steps.
    """
    correlated = strategy == "blt"
    model, (x, y) = wrapped(shape.model(device), layout, device), shape.data(4 if correlated else 1)
    recipe = blt if correlated else dpfy.dpsgd
    plan = recipe(len(x), shape.batch, steps=count + 1).with_noise(1.0, delta=1e-5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)  # as on GPUs by default
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = dpfy.Run(f"{folder}/run", seed=0, checkpoint_every=1e9)
        runtime = dpfy.Runtime(device=device, max_physical_batch=shape.batch)
        with dpfy.PrivateTraining(model, optimizer, (x, y), plan, run, runtime=runtime) as training:
            clock = Clock(device)
            for inputs, targets in training.batches():
                training.step(losses(model, inputs, targets))
                clock()
                if training.steps_done == count:
                    break
            look(training)
    return clock.taken


@contextmanager
def one_rank(backend: str) -> Iterator[None]:
    """This process as the only rank of a group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    dist.init_process_group(backend)
    try:
        yield
    finally:
        dist.destroy_process_group()


def alone(shape: Shape, device: str, count: int, rounds: int) -> dict[str, Any]:
    """Seconds of a step by layout with one rank, measured in turn: for each step the least of all
    rounds, and the median of these.
    """
    found: dict[str, dict[str, list[list[float]]]] = {"private": {}, "not private": {}}
    recorded: dict[str, int] = {}
    for _ in range(rounds):
        for layout in LAYOUTS:
            taken = private(
                shape,
                layout,
                device,
                count,
                look=lambda t, layout=layout: recorded.update(
                    {layout: t.engine._recorder.repeated}
                ),
            )
            found["private"].setdefault(layout, []).append(
                taken[count // 2 : -1]
            )  # behind what is measured and checked first
            found["not private"].setdefault(layout, []).append(
                not_private(shape, layout, device, count)[count // 2 : -1]
            )
            print(
                f"# {layout}, private: {1e3 * statistics.median(taken[count // 2 : -1]):.2f} ms",
                file=sys.stderr,
                flush=True,
            )
    row: dict[str, Any] = {"steps by recordings": recorded}
    for kind, layouts in found.items():
        means = {
            layout: statistics.median(map(min, zip(*taken, strict=True)))
            for layout, taken in layouts.items()
        }
        row[kind] = {"ms": round(1e3 * means["plain"], 3)} | {
            k: round(means[k] / means["plain"], 3) for k in LAYOUTS[1:]
        }
    row["holds"] = max(row["private"]["ddp"], row["private"]["fsdp"]) <= LIMIT
    return row


def equal(device: str) -> dict[str, Any]:
    """The largest difference of the weights after a few steps between no ranks and one rank, by
    layout: DP-SGD and BLT.
    """
    shape, weights = Shape(256, 3, 64), {layout: list[Tensor]() for layout in LAYOUTS}

    def keep(training: Any) -> None:
        weights[layout] += [
            getattr(p, "_local_tensor", p).detach().clone() for p in training.model.parameters()
        ]

    for layout in LAYOUTS:
        for strategy in ("dpsgd", "blt"):
            private(shape, layout, device, 8, strategy, keep)
    apart = {
        k: max(
            float((a - b).abs().max()) for a, b in zip(weights[k], weights["plain"], strict=True)
        )
        for k in LAYOUTS[1:]
    }
    return {"apart": apart, "holds": max(apart.values()) <= 1e-6}


def held(training: Any) -> dict[str, int]:
    """Bytes that a rank holds between two steps: parameters, optimizer, past noise, and what the
    noise of a step is made in.
    """

    def size(tensors: Any) -> int:
        return sum(getattr(t, "_local_tensor", t).nbytes for t in tensors if isinstance(t, Tensor))

    part = training.private_step.stream.part
    return {
        "weights": size(training.model.parameters()),
        "optimizer": size(v for s in training.optimizer.state.values() for v in s.values()),
        "past noise": size(training.state.noise.values()),
        "noise and sums of a step": 4 * part.size,
        "parameters": 4 * part.total,
    }


def _rank(rank: int, layout: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{layout}", rank=rank, world_size=RANKS
    )
    note = Path(folder, f"{layout}-{rank}.json")
    private(
        SHAPES["cpu"]["mlp-512x4"],
        layout,
        "cpu",
        6,
        "blt",
        lambda t: note.write_text(json.dumps(held(t))),
    )
    dist.barrier()
    dist.destroy_process_group()


def memory() -> Iterator[dict[str, Any]]:
    """What a rank of four holds with buffered linear Toeplitz noise: the largest over the ranks, in
    MiB.
    """
    with tempfile.TemporaryDirectory() as folder:
        for layout in ("plain", "fsdp"):
            start_processes(_rank, (layout, folder), RANKS, start_method="spawn")
            each = [
                json.loads(Path(folder, f"{layout}-{rank}.json").read_text())
                for rank in range(RANKS)
            ]
            most = {name: round(max(h[name] for h in each) / 2**20, 2) for name in each[0]}
            yield {"case": "memory", "ranks": RANKS, "layout": layout, "MiB": most}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", choices=["step", "memory", "equal"])
    parser.add_argument("--shapes", help="names, by commas")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    device, shapes = options.device, SHAPES[options.device]
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU, as most people train
    backends = ["cpu:gloo,cuda:nccl", "gloo"] if device == "cuda" else ["gloo"]
    for backend in backends:
        with one_rank(backend):
            where = {"device": device, "backend": backend}
            if options.only in (None, "equal"):
                _print({"case": "equal", **where}, partial(equal, device))
            for name in (
                (options.shapes or ",".join(shapes)).split(",")
                if options.only in (None, "step")
                else ()
            ):
                if backend == backends[0]:
                    _print(
                        {"case": name, **where},
                        partial(alone, shapes[name], device, options.steps, options.rounds),
                    )
    for row in memory() if options.only in (None, "memory") and device == "cpu" else ():
        print(json.dumps(row), flush=True)


def _print(row: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> None:
    """One line, with what was measured or why it was not."""
    began = time.perf_counter()
    try:
        row |= measure()
    except Exception as problem:
        row |= {"error": f"{type(problem).__name__}: {problem}"[:300], "holds": False}
    print(json.dumps(row | {"took_s": round(time.perf_counter() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
