"""Small training jobs on several ranks (gloo, CPU): what each rank does, and how ranks are started."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what optimizers import late is imported once, in the server that ranks are forked from
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import ProcessContext, start_processes
from torch.nn.parallel import DistributedDataParallel

import dpfy
import dpfy.report.verify  # noqa: F401
from dpfy.core.errors import Lost
from dpfy.gradients.clip import QuantileClip

RECORDS, FEATURES, STEPS, TIMEOUT = 60, 6, 6, 40.0


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, FEATURES, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] > 0).long()


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).double()


def plan(kind: str) -> dpfy.Plan:
    """About 9 records a step, ragged shares; or 2, and on four ranks most shares are empty."""
    size = {"clip_norm": 0.7, "steps": STEPS}
    recipe = {
        "dpsgd": lambda: dpfy.dpsgd(RECORDS, 9, **size),
        "few": lambda: dpfy.dpsgd(RECORDS, 2, **size),
        "exact": lambda: dpfy.dpsgd(RECORDS, 9, noise="exact", **size),
        "banded": lambda: dpfy.bandmf(RECORDS, 9, bands=3, **size),
        "blt": lambda: dpfy.blt(RECORDS, 9, **size),
        "adaptive": lambda: dataclasses.replace(dpfy.dpsgd(RECORDS, 9, **size), clip=QuantileClip(0.7)),
    }[kind]()
    return recipe.with_noise(1.5, delta=1e-3)


def train(
    kind: str,
    run: dpfy.Run,
    stop: int = STEPS,
    wrap: Callable[[nn.Module], nn.Module] = lambda m: m,
    world: dpfy.World | None = None,
) -> dict[str, Any]:
    """Train until `stop` steps are made: Adam, an average, and two physical batches a step where the share is large enough."""
    torch.set_num_threads(1)
    model = wrap(net(seed=0 if not dist.is_initialized() else dist.get_rank()))  # all ranks get the weights of rank 0
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    how = {"update": dpfy.Update(average=0.9), "runtime": dpfy.Runtime(max_physical_batch=4), "world": world}
    with dpfy.PrivateTraining(model, optimizer, data(), plan(kind), run, **how) as training:
        if training.steps_done < stop:
            for x, y in training.batches():
                training.step(nn.functional.cross_entropy(model(x), y, reduction="none"))
                if training.steps_done >= stop:
                    break
        past = sum(t.numel() for t in training.state.noise.values())
        found = {name: full(p) for name, p in training.model.named_parameters()}
        found["clip"], found["past"] = training.clip.bound.l2, past
    if (model_file := Path(run.path) / "model.safetensors").is_file():  # the average
        found |= {f"released {name}": t for name, t in load_file(model_file).items()}
    return found


def full(t: torch.Tensor) -> torch.Tensor:
    """A copy, of sharded tensors whole."""
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()  # type: ignore[operator]


def start(job: Callable[..., None], ranks: int, *arguments: Any) -> ProcessContext:
    """Start ``job(rank, *arguments)`` on each rank of a group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])  # torch is imported once
    return start_processes(_joined, (ranks, port, job, arguments), ranks, join=False, start_method="forkserver")


def _joined(rank: int, ranks: int, port: int, job: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT))
    try:
        job(rank, *arguments)
    finally:
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def sharded(model: nn.Module) -> nn.Module:
    """FSDP2: the first layer by itself, the rest with the root."""
    model.load_state_dict(net().state_dict())  # each rank keeps its part of the same weights
    fully_shard(model[0])  # type: ignore[index]
    return fully_shard(model)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {"plain": lambda m: m, "ddp": DistributedDataParallel, "fsdp": sharded}


def cases(rank: int, folder: str, names: list[tuple[str, str]]) -> None:
    """Train by each plan and layout, and leave what every rank holds at the end."""
    for kind, wrap in names:
        found = train(kind, dpfy.Run(f"{folder}/{kind}-{wrap}", seed=3, checkpoint_every=0.0), wrap=WRAPS[wrap])
        torch.save(found, f"{folder}/{kind}-{wrap}-{rank}.pt")


def results(folder: Path, name: str, ranks: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}-{rank}.pt") for rank in range(ranks)]


def dying(rank: int, folder: str, kind: str, wrap: str, victim: int, event: int, tally: str = "") -> None:
    """Train or resume with checkpoints at every step; rank `victim` dies by SIGKILL at the `event`-th call of a function."""
    if (Path(folder) / "privacy.json").is_file():
        return
    seen = 0

    def count(frame: Any, what: str, argument: Any) -> None:
        nonlocal seen
        seen += what == "call"
        if seen == event and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    world = dpfy.World.joined(timeout=TIMEOUT)
    WRAPS[wrap](net())  # what is imported late
    sys.setprofile(count)
    try:
        train(kind, dpfy.Run(folder, resume=True, seed=3, checkpoint_every=0.0), wrap=WRAPS[wrap], world=world)
    except dpfy.InvalidInput as error:
        if "finished run" not in str(error):
            raise
    except Lost as error:
        if "finished run" not in str(error):
            raise
    finally:
        sys.setprofile(None)
    if tally:
        (Path(tally) / str(rank)).write_text(str(seen))


def outcomes(context: ProcessContext, seconds: float = 100.0) -> list[int | None]:
    """How the ranks ended, each by itself: nobody ends the others."""
    for process in context.processes:
        process.join(seconds)
    found = [process.exitcode for process in context.processes]
    for process in context.processes:
        process.kill()
    return found
