"""Checks of rounds of clients, from outside: what one client can do to a round, whatever it sends,
and who else comes.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dpfy.core.errors import InvalidInput
from dpfy.federated.recipes import CLIENT
from dpfy.federated.rounds import PrivateRounds
from dpfy.plan.recipe import dpsgd
from dpfy.runs.run import Run
from dpfy_lab.checks.published import temporary
from dpfy_lab.selftest.mistake import Found, check

Array = NDArray[np.float64]
Sent = dict[int, list[Array]]
CLIENTS, SIZE, BAD, CLIP = 6, 12, 2, 0.5
"""Clients that are expected, numbers in an update (in two tensors), the client that tries, and the
clipping norm.
"""


def round_of(sent: Sent) -> Array:
    """One round of all clients without noise: the move of the model in clipping norms, times the
    clients expected. `sent` holds updates by client, in clipping norms.
    """
    model = nn.Sequential(nn.Linear(4, 2), nn.Flatten())
    model[0].bias = nn.Parameter(torch.zeros(4))  # type: ignore[assignment]
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    recipe = dpsgd(CLIENTS, CLIENTS, steps=1, clip_norm=CLIP, unit=CLIENT)
    plan = recipe.with_noise(0.0, delta=1e-3)
    with temporary() as folder:
        rounds = PrivateRounds(model, optimizer, plan, Run(folder, seed=1), repeatable=True)
        with rounds:
            cohort = rounds.cohort()
            assert cohort is not None
            for client, updates in sent.items():
                for update in updates:
                    with contextlib.suppress(InvalidInput):  # refused: it counts as nothing
                        cohort.add(client, [CLIP * update[:8].reshape(2, 4), CLIP * update[8:]])
            cohort.close()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    moved: Array = (before - after).double().numpy() * CLIENTS / CLIP
    return moved


def others() -> Sent:
    """What everybody but the client that tries sends, in clipping norms: short updates, and one
    that is long.
    """
    rng = np.random.default_rng(5)
    sizes = {client: 9.0 if client == 4 else 0.1 for client in range(CLIENTS) if client != BAD}
    return {client: [rng.normal(size=SIZE) * size] for client, size in sizes.items()}


def tries() -> dict[str, list[Array]]:
    """What the client that tries may send."""
    long = np.full(SIZE, 50.0)
    bad = np.where(np.arange(SIZE) == 3, np.nan, long)
    return {
        "a long update": [long],
        "two updates": [long, long],
        "not a number": [bad],
        "infinity": [long * np.inf],
        "nothing": [],
    }


@check("one client")
def ONE() -> Found:
    """Without noise: whatever one client sends moves the sum of a round by at most one clipping
    norm, against its not being there.
    """
    without = round_of(others())
    for what, sent in tries().items():
        change = float(np.linalg.norm(round_of({**others(), BAD: sent}) - without))
        if not change <= 1.0 + 1e-3:
            return f"a client that sends {what} moves the round by {change:.3f} clip norms, not 1"
    return None


@check("few answers")
def FEW() -> Found:
    """One client answers, of all that are expected: the round is its update over the expected
    number, no more.
    """
    long = float(np.linalg.norm(round_of({BAD: [np.full(SIZE, 50.0)]})))
    if abs(long - 1.0) <= 1e-3:
        return None
    return (
        f"the only answer of a round counts as {long:.3f} clip norms over the expected cohort, not "
        f"1"
    )


CHECKS = (ONE, FEW)
