"""A small deterministic training job that the tests of this folder run, kill and resume."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dpfy
from dpfy.training import Result, Update

RECORDS, FEATURES, CLASSES, STEPS = 200, 12, 3, 30


def held_out() -> tuple[torch.Tensor, torch.Tensor]:
    """Public data like the records."""
    return data(2)


def data(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(RECORDS, FEATURES, generator=generator)
    return x, (x[:, :CLASSES] + 0.3 * torch.randn(RECORDS, CLASSES, generator=generator)).argmax(1)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, CLASSES)
    )


def plan(steps: int = STEPS, noise: float = 2.0) -> dpfy.Plan:
    recipe = dpfy.dpsgd(RECORDS, 20, steps=steps, clip_norm=0.5)
    return recipe.with_noise(noise, delta=1e-3)


def train(
    run: dpfy.Run | str | Path,
    *,
    steps: int = STEPS,
    noise: float = 2.0,
    runtime: dpfy.Runtime | None = None,
) -> Result:
    """Momentum, averaging, dropout and two physical batches a step: everything that a checkpoint
    must carry.
    """
    torch.set_num_threads(1)
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    update = Update(average=0.9, schedule=lambda step: 1 / (1 + 0.05 * step))
    runtime = runtime or dpfy.Runtime(max_physical_batch=12)
    return dpfy.fit(
        net,
        data(),
        plan=plan(steps, noise),
        optimizer=optimizer,
        run=run,
        evaluation=dpfy.PublicTest(held_out()),
        runtime=runtime,
        update=update,
    )


def train_in_child(path: str, death: tuple[str, int] | None, tally: str | None = None) -> None:
    """Train or resume with checkpoints at every step; die by SIGKILL at the n-th call of an os
    function, or tally the calls.
    """
    calls = dict.fromkeys(("write", "fsync", "replace"), 0)
    for name in calls:
        _watch(name, calls, death)
    train(dpfy.Run(path, resume=True, seed=5, checkpoint_every=0.0))
    if tally:
        Path(tally).write_text(json.dumps(calls))


def train_and_tell(path: str, event: int, told: Connection) -> None:
    """Train or resume with checkpoints at every step; tell when `event` happens (0: after the last
    one, how many there were).

    Events are the calls and returns of functions, counted as Python makes them.
    """
    seen = 0

    def count(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == event:
            told.send_bytes(b"now")

    sys.setprofile(count)
    train(dpfy.Run(path, resume=True, seed=5, checkpoint_every=0.0))
    sys.setprofile(None)
    if event == 0:
        told.send_bytes(str(seen).encode())


BOUNDARIES = ("open", "mkdir", "chmod", "write", "fsync", "replace", "rename", "unlink", "rmdir")


def die_at_every_call(path: str, every: int, answer: str) -> None:
    """Kill a short run at every call of an os function (of the middle of its life, at every
    `every`-th); resume it; compare.

    The runs are forks of this process. Writes to `answer` how many were killed, and for each that
    was not resumed to the same model and a clean folder, at which call.
    """
    train(dpfy.Run(Path(path) / "first"), steps=2)  # its forks find every cache filled
    whole = Path(path) / "whole"
    order = Path(path) / "order"
    assert _forked(whole, None, order) == 0
    calls = [name for name in order.read_text().split() if name]
    deaths = [n for n in range(len(calls)) if n < 30 or n > len(calls) - 40 or n % every == 0]
    killed, wrong = 0, []
    for n in deaths:
        folder = Path(path) / str(n)
        killed += os.waitstatus_to_exitcode(_forked(folder, n)) == -signal.SIGKILL
        if _forked(folder, None) != 0 or _left(folder) != _left(whole):
            wrong.append((n, calls[n], *sorted(_left(folder).keys() ^ _left(whole).keys())))
    Path(answer).write_text(
        json.dumps({"calls": len(calls), "deaths": len(deaths), "killed": killed, "wrong": wrong})
    )


def _left(folder: Path) -> dict[str, object]:
    """What must be the same in all finished runs: the names of all files, and the model and the
    metrics to the last byte.
    """
    found = {str(p.relative_to(folder)): None for p in folder.rglob("*")} if folder.is_dir() else {}
    return found | {
        n: (folder / n).read_bytes()
        for n in ("model.safetensors", "metrics.jsonl")
        if (folder / n).is_file()
    }


def _forked(path: Path, death: int | None, order: Path | None = None) -> int:
    """The wait status of a fork that trains two steps, and dies before call `death`."""
    return forked(
        path,
        lambda: train(dpfy.Run(path, resume=True, seed=5, checkpoint_every=0.0), steps=2),
        death,
        order,
    )


def forked(
    path: Path, work: Callable[[], object], death: int | None, order: Path | None = None
) -> int:
    """The wait status of a fork that does `work` in `path`, and dies before call `death`, counted
    over all functions together.

    The names of the calls are written to `order`.
    """
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    seen: list[str] = []
    for name in BOUNDARIES:
        _count(name, seen, death)
    try:
        work()
        if order:
            order.write_text(" ".join(seen))
        os._exit(0)
    except BaseException as problem:
        print(f"{path.name}: {problem!r}", file=sys.stderr)
        os._exit(1)


def _count(name: str, seen: list[str], death: int | None) -> None:
    real = getattr(os, name)

    def counted(*arguments: object, **options: object) -> object:
        if len(seen) == death:
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(name)
        return real(*arguments, **options)

    setattr(os, name, counted)


def _watch(name: str, calls: dict[str, int], death: tuple[str, int] | None) -> None:
    real = getattr(os, name)

    def watched(*arguments: object, **options: object) -> object:
        calls[name] += 1
        if (name, calls[name]) == death:
            if name == "write":  # half of the bytes reach the file
                handle, content = arguments
                real(handle, bytes(content)[: max(1, len(content) // 2)])  # type: ignore[arg-type, call-overload]
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(os, name, watched)


def card_of(path: Path) -> dict[str, Any]:
    """The card of a training run, with what its section on training tells beside the general
    part.
    """
    card = json.loads((Path(path) / "privacy.json").read_text())
    training = next(part for part in card["sections"] if part["kind"] == "training")
    rows = [*card["accounting"]["assumptions"], *training["assumptions"]]
    return card | training | {"accounting": card["accounting"] | {"assumptions": rows}}
