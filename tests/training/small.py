"""A small deterministic training job that the tests of this folder run, kill and resume."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
from torch import nn

import dpfy

RECORDS, FEATURES, CLASSES, STEPS = 200, 12, 3, 30


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, FEATURES, generator=generator)
    return x, (x[:, :CLASSES] + 0.3 * torch.randn(RECORDS, CLASSES, generator=generator)).argmax(1)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, CLASSES))


def plan(steps: int = STEPS, noise: float = 2.0) -> dpfy.Plan:
    recipe = dpfy.dpsgd(RECORDS, 20, steps=steps, clip_norm=0.5)
    return recipe.with_noise(noise, delta=1e-3)


def train(
    run: dpfy.Run | str | Path, *, steps: int = STEPS, noise: float = 2.0, runtime: dpfy.Runtime | None = None
) -> dpfy.Result:
    """Momentum, averaging, dropout and two physical batches a step: everything that a checkpoint must carry."""
    torch.set_num_threads(1)
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    update = dpfy.Update(average=0.9, schedule=lambda step: 1 / (1 + 0.05 * step))
    runtime = runtime or dpfy.Runtime(max_physical_batch=12)
    return dpfy.fit(
        net, data(), plan=plan(steps, noise), optimizer=optimizer, run=run, test=data(), runtime=runtime, update=update
    )


def train_in_child(path: str, death: tuple[str, int] | None, tally: str | None = None) -> None:
    """Train or resume with checkpoints at every step; die by SIGKILL at the n-th call of an os function, or tally the calls."""
    calls = dict.fromkeys(("write", "fsync", "replace"), 0)
    for name in calls:
        _watch(name, calls, death)
    train(dpfy.Run(path, resume=True, seed=5, checkpoint_every=0.0))
    if tally:
        Path(tally).write_text(json.dumps(calls))


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
