"""A small federation that the tests of this folder run, kill and resume: its clients answer as a
function of round and weights.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

import dpfy
from dpfy.federated import CLIENT, PrivateRounds
from dpfy.training import Update
from dpfy.training.run import complete

CLIENTS, ROUNDS = 40, 6


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


def plan(
    rounds: int = ROUNDS, noise: float = 1.0, cohort: float = 8, **changes: object
) -> dpfy.Plan:
    recipe = dpfy.dpsgd(CLIENTS, cohort, steps=rounds, clip_norm=0.5, unit=CLIENT)
    return replace(recipe, **changes).with_noise(noise, delta=1e-3)


def answer(client: int, step: int, net: nn.Module, salt: int = 0) -> list[np.ndarray]:
    """What a client sends: depends on who it is, on the round and on the weights it was given."""
    rng = np.random.default_rng([int(client), step, salt])
    return [
        rng.normal(size=tuple(p.shape)).astype(np.float32) + 0.1 * p.detach().numpy()
        for p in net.parameters()
    ]


def serve(
    run: object,
    *,
    repeatable: bool = False,
    salt: int = 0,
    the_plan: dpfy.Plan | None = None,
    **options,
) -> nn.Module:
    """All rounds; every third client of a round never answers."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    update = Update(average=0.5)
    with PrivateRounds(
        net, optimizer, the_plan or plan(), run, repeatable=repeatable, update=update, **options
    ) as rounds:
        for cohort in rounds.cohorts():
            for place, client in enumerate(cohort.clients):
                if place % 3 != 2:
                    cohort.add(int(client), answer(client, cohort.step, net, salt))
    return net


def serve_and_die(path: str, death: int | None, salt: int) -> None:
    """Serve or resume; die by SIGKILL before the n-th call of a function that writes."""
    torch.set_num_threads(1)
    seen = 0
    for name in ("write", "fsync", "replace"):
        real = getattr(os, name)

        def counted(*arguments, _real=real, **named):
            nonlocal seen
            if seen == death:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
            return _real(*arguments, **named)

        setattr(os, name, counted)
    if not complete(
        run := dpfy.Run(path, resume=True, seed=5), plan()
    ):  # a crash after the card is made good there
        serve(run, salt=salt)
    if death is None:
        Path(path + ".calls").write_text(str(seen))


def forked(path: str, death: int | None, salt: int = 0) -> int:
    """The wait status of a fork that serves."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        serve_and_die(path, death, salt)
        os._exit(0)
    except BaseException as problem:
        print(repr(problem))
        os._exit(1)
