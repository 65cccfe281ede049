"""Datasets that the tests of lazy data read, and a run on them that can be killed and resumed."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import Dataset

import dpfy
from dpfy.gradients import per_view

sys.path.insert(0, str(Path(__file__).parent))
import small

X, Y = small.data()


class Rows(Dataset[Any]):
    """The small data, record by record, optionally with augmentation drawn from all three global
    generators.

    While the file `trap` exists, reading fails: by an error, or with `fatal` by the death of the
    process.
    """

    def __init__(
        self,
        augmented: bool = False,
        dtype: torch.dtype = torch.float32,
        trap: Path | None = None,
        fatal: bool = False,
    ) -> None:
        self.augmented, self.dtype, self.trap, self.fatal = augmented, dtype, trap, fatal

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.trap is not None and self.trap.exists():
            if self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("the disk went away")
        x = X[index].to(self.dtype)
        if self.augmented:
            x = x + 0.1 * torch.randn(len(x)).to(self.dtype) + random.random() * np.random.normal()
        return x, Y[index]


def train(
    data: object,
    path: Path | str,
    *,
    steps: int = 8,
    resume: bool = False,
    dtype: torch.dtype = torch.float32,
    stop: int | None = None,
    trap: Path | None = None,
    views: int = 1,
    dropout: float = 0.1,
    runtime: dpfy.Runtime | None = None,
) -> dict[str, torch.Tensor]:
    """The weights after a seeded private training of the small model (dropout included).

    In step `stop` the process kills itself, or, with `trap`, makes that file.
    """
    torch.set_num_threads(1)
    net = small.model().to(dtype)
    net[2].p = dropout  # type: ignore[index, union-attr]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    runtime = runtime or dpfy.Runtime(max_physical_batch=12)
    run = dpfy.Run(path, seed=5, resume=resume, checkpoint_every=0.0)
    with dpfy.PrivateTraining(
        net, optimizer, data, small.plan(steps), run, runtime=runtime
    ) as training:
        for x, y in training.batches():
            if training.steps_done == stop:
                trap.touch() if trap is not None else os.kill(os.getpid(), signal.SIGKILL)
            if views == 1:
                losses = functional.cross_entropy(net(x), y, reduction="none")
            else:
                losses = per_view(
                    functional.cross_entropy(net(x.flatten(0, 1)), y.flatten(), reduction="none"),
                    views,
                )
            training.step(losses)
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of weights are the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
