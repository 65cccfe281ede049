"""What several ranks cost: the private step of a model given plain, to DDP and to FSDP2, and the memory of a rank of four.

``python benchmarks/distributed.py`` measures both on this machine (gloo, CPU); ``--device cuda`` measures the step on one GPU, by NCCL;
``--only step`` or ``--only memory``; ``--json`` prints one JSON object. The promise: with one rank at most 1.05 of the step without ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import dpfy

LIMIT, RANKS = 1.05, 4
SIZES = {"cpu": (512, 4, 256, 1024), "cuda": (2048, 8, 256, 2048)}
"""Width, layers, batch and records."""


def model_of(width: int, layers: int, device: str) -> nn.Sequential:
    """Layers of equal width, as in a transformer's feed-forward parts."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(width, 10)).to(device)


def wrapped(model: nn.Sequential, layout: str, device: str) -> nn.Module:
    """The model as the layout takes it."""
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout == "fsdp":
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for block in model[:-1]:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def steps(layout: str, device: str, count: int, strategy: str = "dpsgd") -> list[float]:
    """Seconds of each private step."""
    width, layers, batch, records = SIZES[device]
    model = wrapped(model_of(width, layers, device), layout, device)
    x, y = torch.randn(records, width), torch.randint(0, 10, (records,))
    if strategy == "blt":
        plan = dpfy.blt(records, batch, steps=max(count, records // batch)).with_noise(1.0, delta=1e-5)
    else:
        plan = dpfy.dpsgd(records, batch, steps=count).with_noise(1.0, delta=1e-5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)  # as on GPUs by default
    taken: list[float] = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = dpfy.Run(f"{folder}/run", seed=0, checkpoint_every=1e9)
        with dpfy.PrivateTraining(model, optimizer, (x, y), plan, run, runtime=dpfy.Runtime(device=device)) as training:
            clock = time.process_time if device == "cpu" else time.perf_counter  # of a CPU, what others do to it does not count
            began = clock()
            for inputs, targets in training.batches():
                training.step(nn.functional.cross_entropy(model(inputs), targets, reduction="none"))
                if device == "cuda":
                    torch.cuda.synchronize()
                now = clock()
                taken.append(now - began)
                began = now
            if dist.is_initialized() and dist.get_world_size() > 1:
                Held.note(training)
    return taken


class Held:
    """Bytes that a rank holds between two steps."""

    found: dict[str, int] = {}  # noqa: RUF012

    @classmethod
    def note(cls, training: Any) -> None:
        """Of parameters, optimizer and past noise, and what the noise of a step is made in."""

        def size(tensors: Any) -> int:
            return sum(getattr(t, "_local_tensor", t).nbytes for t in tensors if isinstance(t, torch.Tensor))

        part = training.private_step.stream.part
        cls.found = {
            "weights": size(training.model.parameters()),
            "optimizer": size(v for s in training.optimizer.state.values() for v in s.values()),
            "past noise": size(training.state.noise.values()),
            "noise and sums of a step": 4 * part.size,
            "parameters": 4 * part.total,
        }


def alone(device: str, count: int, rounds: int) -> dict[str, float]:
    """Medians of a step by layout, with one rank, measured in turn; as ratios to the step without ranks."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    found: dict[str, list[float]] = {"plain": [], "ddp": [], "fsdp": []}
    for _ in range(rounds):
        for layout, taken in found.items():
            taken += steps(layout, device, count)[count // 2 :]  # behind what is measured and checked first
    dist.destroy_process_group()
    least = {layout: statistics.median(taken) for layout, taken in found.items()}
    return {"seconds": least["plain"], "ddp": least["ddp"] / least["plain"], "fsdp": least["fsdp"] / least["plain"]}


def _rank(rank: int, layout: str, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29578"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    steps("fsdp" if layout == "fsdp" else "plain", "cpu", 6, "blt")
    with open(f"{folder}/{layout}-{rank}.json", "w") as file:
        json.dump(Held.found, file)
    dist.barrier()
    dist.destroy_process_group()


def memory() -> dict[str, dict[str, int]]:
    """What a rank of four holds with buffered linear Toeplitz noise: the largest over the ranks."""
    found: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for layout in ("replicated", "fsdp"):
            start_processes(_rank, (layout, folder), RANKS, start_method="spawn")
            held = []
            for rank in range(RANKS):
                with open(f"{folder}/{layout}-{rank}.json") as file:
                    held.append(json.load(file))
            found[layout] = {name: max(h[name] for h in held) for name in held[0]}
    return found


def main() -> None:
    """Measure, print, and say whether the promises hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", choices=["step", "memory"])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.only != "memory":
        found["step"] = alone(options.device, options.steps, options.rounds)
        found["holds"] = max(found["step"]["ddp"], found["step"]["fsdp"]) <= LIMIT
    if options.only != "step" and options.device == "cpu":
        found["memory"] = memory()
    if options.json:
        print(json.dumps(found))
        return
    if "step" in found:
        times = found["step"]
        print(
            f"one rank, {options.device}: step {times['seconds'] * 1e3:.2f} ms; DDP {times['ddp']:.3f}, FSDP2 {times['fsdp']:.3f} of it"
        )
        print(f"at most {LIMIT}: {'holds' if found['holds'] else 'DOES NOT HOLD'}")
    for layout, held in found.get("memory", {}).items():
        print(f"{RANKS} ranks, {layout}: " + ", ".join(f"{name} {size / 2**20:.2f} MiB" for name, size in held.items()))


if __name__ == "__main__":
    main()
