"""Small training jobs on several ranks (gloo, CPU): what each rank does, and how ranks are
started.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

# what optimizers import late is imported once, in the server that ranks are forked from
import torch._dynamo
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import ProcessContext, start_processes
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import dpfy
import dpfy.report.verify
from dpfy.core.errors import Busy, Lost
from dpfy.gradients.clip import QuantileClip
from dpfy.plan import bandmf, blt
from dpfy.training import Update, World
from dpfy.training.run import TrainingRun

RECORDS, FEATURES, STEPS, TIMEOUT = 60, 6, 6, 90.0


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, FEATURES, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] > 0).long()


class Augmented(Dataset[Any]):
    """The same records, read one by one, with noise of their own in each draw."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = data()
        return x[index] + torch.randn(FEATURES, dtype=torch.float64) * random.random(), y[index]


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)
    ).double()


def plan(kind: str) -> dpfy.Plan:
    """About 9 records a step, ragged shares; or 2, and on four ranks most shares are empty."""
    size = {"clip_norm": 0.7, "steps": STEPS}
    recipe = {
        "dpsgd": lambda: dpfy.dpsgd(RECORDS, 9, **size),
        "lazy": lambda: dpfy.dpsgd(RECORDS, 9, **size),
        "few": lambda: dpfy.dpsgd(RECORDS, 2, **size),
        "exact": lambda: dpfy.dpsgd(RECORDS, 9, noise="exact", **size),
        "banded": lambda: bandmf(RECORDS, 9, bands=3, **size),
        "blt": lambda: blt(RECORDS, 9, **size),
        "adaptive": lambda: dataclasses.replace(
            dpfy.dpsgd(RECORDS, 9, **size), clip=QuantileClip(0.7)
        ),
    }[kind]()
    return recipe.with_noise(1.5, delta=1e-3)


def train(
    kind: str,
    run: dpfy.Run,
    stop: int = STEPS,
    wrap: Callable[[nn.Module], nn.Module] = lambda m: m,
    world: World | None = None,
) -> dict[str, Any]:
    """Train until `stop` steps are made: Adam, an average, and two physical batches a step where
    the share is large enough.
    """
    torch.set_num_threads(1)
    model = wrap(
        net(seed=0 if not dist.is_initialized() else dist.get_rank())
    )  # all ranks get the weights of rank 0
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    how = {
        "update": Update(average=0.9),
        "runtime": dpfy.Runtime(max_physical_batch=4),
        "world": world,
    }
    with dpfy.PrivateTraining(
        model, optimizer, Augmented() if kind == "lazy" else data(), plan(kind), run, **how
    ) as training:
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
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [__name__]
    )  # torch is imported once
    return start_processes(
        _joined, (ranks, port, job, arguments), ranks, join=False, start_method="forkserver"
    )


def done(context: ProcessContext, seconds: float = 500.0) -> None:
    """Wait for all ranks; what one of them raised is raised here. A machine with other work to do
    may take long.
    """
    until = time.monotonic() + seconds
    while not context.join(max(0.0, until - time.monotonic())):
        if time.monotonic() > until:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"ranks that do not end in {seconds} seconds")


def _joined(
    rank: int, ranks: int, port: int, job: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT))
    try:
        job(rank, *arguments)
    except BaseException:
        traceback.print_exc()
        raise
    dist.barrier()
    dist.destroy_process_group()


def sharded(model: nn.Module, **policy: Any) -> nn.Module:
    """FSDP2: the first layer by itself, the rest with the root."""
    model.load_state_dict(net().state_dict())  # each rank keeps its part of the same weights
    fully_shard(model[0], **policy)  # type: ignore[index]
    return fully_shard(model, **policy)


def parallel(model: nn.Module) -> nn.Module:
    """Tensor parallel: the first layer by columns, put together again for what follows, the last by
    rows.
    """
    model.load_state_dict(net().state_dict())
    styles = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "3": RowwiseParallel(input_layouts=Replicate()),
    }
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), styles)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda m: m,
    "ddp": DistributedDataParallel,
    "fsdp": sharded,
    "parallel": parallel,
    "offload": partial(sharded, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "mixed": partial(sharded, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32)),
}


def cases(rank: int, folder: str, names: list[tuple[str, str]]) -> None:
    """Train by each plan and layout, and leave what every rank holds at the end."""
    for kind, wrap in names:
        run = dpfy.Run(f"{folder}/{kind}-{wrap}", seed=3, checkpoint_every=0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind in ("banded", "adaptive"):  # left in the middle, and resumed
                train(kind, run, stop=3, wrap=WRAPS[wrap])
                run = dataclasses.replace(run, resume=True)
            found = train(kind, run, wrap=WRAPS[wrap])
        torch.save(found, f"{folder}/{kind}-{wrap}-{rank}.pt")


def results(folder: Path, name: str, ranks: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}-{rank}.pt") for rank in range(ranks)]


def dying(
    rank: int, folder: str, kind: str, wrap: str, victim: int, event: int, tally: str = ""
) -> None:
    """Train or resume with checkpoints at every step; rank `victim` dies by SIGKILL at the
    `event`-th call of a function.
    """
    if (Path(folder) / "privacy.json").is_file():
        return
    seen = 0

    def count(frame: Any, what: str, argument: Any) -> None:
        nonlocal seen
        seen += what == "call"
        if seen == event and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    world = World.joined(timeout=TIMEOUT)
    WRAPS[wrap](net())  # what is imported late
    sys.setprofile(count)
    try:
        train(
            kind,
            dpfy.Run(folder, resume=True, seed=3, checkpoint_every=0.0),
            wrap=WRAPS[wrap],
            world=world,
        )
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


def outcomes(context: ProcessContext, seconds: float = 200.0) -> list[int | None]:
    """How the ranks ended, each by itself: nobody ends the others."""
    for process in context.processes:
        process.join(seconds)
    found = [process.exitcode for process in context.processes]
    for process in context.processes:
        process.kill()
    return found


def disagreeing(rank: int, folder: str) -> None:
    """Rank 1 does something else than rank 0, in one way after the other; leaves what each rank was
    told, and what is left on disk.
    """
    odd, told = rank == 1, {}

    def attempt(
        name: str,
        words: dict[str, Any],
        at: int = -1,
        do: Callable[[Any, Any], None] = lambda t, o: None,
    ) -> None:
        run = dpfy.Run(f"{folder}/{name}", seed=3)
        model = words.get("model", net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        released = -1
        try:
            with dpfy.PrivateTraining(
                model, optimizer, words.get("data", data()), words.get("plan", plan("dpsgd")), run
            ) as training:
                for x, y in training.batches():
                    released = training.steps_done
                    if odd and training.steps_done == at:
                        do(training, optimizer)
                    training.step(nn.functional.cross_entropy(model(x), y, reduction="none"))
        except Exception as error:
            dist.barrier()  # rank 0 has undone what was left
            told[name] = (type(error).__name__, str(error), released, Path(run.path).exists())

    def fail(training: Any, optimizer: Any) -> None:
        raise RuntimeError("the disk is full")

    def other_rate(training: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.2

    def other_weights(training: Any, optimizer: Any) -> None:
        training._guard.check = lambda: None
        with torch.no_grad():
            next(training.model.parameters()).add_(1.0)

    attempt("plan", {"plan": plan("few")} if odd else {})
    attempt("data", {"data": tuple(t[:-1] for t in data())} if odd else {})
    attempt("record", {"data": (data()[0] + 1e-9, data()[1])} if odd else {})
    attempt("model", {"model": nn.Linear(FEATURES, 3).double()} if odd else {})
    attempt("code", {"model": nn.Sequential(*net()[:1], nn.ReLU(), *net()[2:])} if odd else {})  # type: ignore[index]
    attempt("rate", {}, 2, other_rate)
    attempt("weights", {}, 1, other_weights)
    attempt("failure", {}, 2, fail)
    torch.save(told, f"{folder}/told-{rank}.pt")


def silent(rank: int, folder: str) -> None:
    """Rank 1 does not answer; then a run of these two ranks, left in the middle."""
    world = World.joined(timeout=2.0)
    if rank == 0:
        try:
            world.exchange("here")
        except Lost as error:
            Path(folder, "silent").write_text(str(error))
    else:
        time.sleep(4.0)
    train("banded", dpfy.Run(f"{folder}/run", seed=3), stop=3)


def busy(rank: int, folder: str) -> None:
    """The folder that rank 0 has opened is in use by another training of its own."""
    run: Any = dpfy.Run(f"{folder}/busy", seed=3)
    if rank == 0:
        run = TrainingRun(run, plan("dpsgd"))
        run.in_use = True
    model = net()
    training = dpfy.PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data(), plan("dpsgd"), run
    )
    try:
        training.__enter__()
    except (Busy, Lost) as error:
        Path(folder, f"busy-{rank}").write_text(f"{training.world.control_group} {error}")
    dist.barrier()
    if rank == 0:
        run.__exit__(None, None, None)


def other_number(rank: int, folder: str) -> None:
    """Resume the run of two ranks with another number of them."""
    try:
        train("banded", dpfy.Run(f"{folder}/run", resume=True, seed=3))
    except (dpfy.InvalidInput, Lost) as error:
        Path(folder, f"number-{rank}").write_text(str(error))


def restarted(rank: int, folder: str) -> None:
    """As under torchrun: the same call, which dies the first time and goes on the second."""
    again = Path(folder, "died").is_file()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1" if again else "0"
    found = train(
        "banded",
        dpfy.Run(f"{folder}/elastic", seed=3, checkpoint_every=0.0),
        stop=STEPS if again else 3,
    )
    dist.barrier()
    if not again:
        Path(folder, "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    torch.save(found, f"{folder}/elastic-{rank}.pt")


def drawn(rank: int, folder: str) -> None:
    """Which records each rank takes, in many steps of many runs."""
    counts = []
    for seed in range(12):
        recipe = dataclasses.replace(dpfy.dpsgd(RECORDS, 9, steps=100), records=RECORDS)
        model = nn.Linear(FEATURES, 2).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = dpfy.Run(f"{folder}/drawn{seed}", seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with dpfy.PrivateTraining(
                model, optimizer, data(), recipe.with_noise(1.0, delta=1e-3), run
            ) as training:
                for step in range(100):
                    row = np.zeros(RECORDS, int)
                    for piece in training.drawing.pieces(step):
                        np.add.at(row, piece.indices[piece.counts], 1)
                    counts.append(row)
    np.save(f"{folder}/drawn-{rank}.npy", np.array(counts))


def several(rank: int, folder: str) -> None:
    """All that two ranks do in one start."""
    disagreeing(rank, folder)
    drawn(rank, folder)
    busy(rank, folder)
    silent(rank, folder)
