"""What the self-test of the audit needs of a federation: rounds of clients, and noise in shares,
with a bug's parts in place.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dpfy.core import events
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.federated.clients import CLIENT
from dpfy.federated.rounds import PrivateRounds
from dpfy.federated.shares.aggregator import TooFew, TrustedSum
from dpfy.federated.shares.scheme import SharingScheme
from dpfy.noise.shares import Shares
from dpfy.plan.recipe import dpsgd
from dpfy.training.bench import TrainingBench
from dpfy.training.run import Run

Array = NDArray[np.float64]
CLIENTS, CLIP = 6, 0.5
SECRET, ROUNDS = Randomness.for_tests(43), 24
SCHEME = SharingScheme(
    Shares(dimension=1000, clients=24, least=16, bits=16, scaled=40.0, rotation=5), 2.7, 1.5
)
"""A clip norm of 40 steps in 1,024 coordinates: rounding makes vectors longer by a tenth, so that
who forgets it is seen.
"""


@dataclass(frozen=True)
class Billed:
    """What is billed of a round, with a share in units of the vectors."""

    share: float
    shares: int


class FederatedBench(TrainingBench):
    """The bench of training, and a federation of 24 clients of which 16 survive."""

    def of_round(self, sent: dict[int, list[Array]], bug: Any) -> Array:
        """One round of `CLIENTS` clients, all drawn, without noise; the move of the model in clip
        norms, times the clients expected.
        """
        model = nn.Sequential(nn.Linear(4, 2), nn.Flatten())
        model[0].bias = nn.Parameter(torch.zeros(4))  # type: ignore[assignment]
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        plan = dpsgd(CLIENTS, CLIENTS, steps=1, clip_norm=CLIP, unit=CLIENT).with_noise(
            0.0, delta=1e-3
        )
        with tempfile.TemporaryDirectory() as place:
            rounds = PrivateRounds(
                model, optimizer, plan, Run(Path(place) / "run", seed=1), repeatable=True
            )
            rounds.gathers = bug.cohort(rounds.gathers)
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

    def shared(self, bug: Any, *, signal: bool) -> tuple[Billed, Array, Array]:
        """What is billed; what some rounds with as few survivors as allowed show, and the truth.

        With `signal` vectors that nearly agree, and their decoded sums; otherwise vectors of zero,
        and the sums as they come.
        """
        event, scheme = SCHEME.event, bug.scheme(SCHEME)
        assert isinstance(event, events.DistributedDiscreteGaussian)
        rng = np.random.default_rng(6)
        sums, truth = [], []
        for round in range(ROUNDS):
            vectors = 0.3 * rng.normal(size=(event.shares, SCHEME.shares.dimension)) + rng.normal(
                size=SCHEME.shares.dimension
            )
            vectors *= signal * SCHEME.clip / np.linalg.norm(vectors, axis=1, keepdims=True)
            found = self._total(scheme, bug, vectors, round)
            sums.append(
                scheme.decode(found, round) if signal else scheme.centred(found) * SCHEME.step
            )
            truth.append(vectors.sum(0))
        return Billed(event.share * SCHEME.step, event.shares), np.array(sums), np.array(truth)

    def _total(self, scheme: Any, bug: Any, vectors: Array, round: int) -> NDArray[np.uint64]:
        messages = {
            client: scheme.encode(vector, SECRET, client, round)
            for client, vector in enumerate(vectors)
        }
        aggregator, shares = bug.aggregator(TrustedSum()), SCHEME.shares
        total: NDArray[np.uint64] = aggregator.sum(
            messages, bits=scheme.bits, least=shares.least, round=round
        ).total
        return total

    def moved(self, bug: Any) -> Iterator[tuple[str, float, int]]:
        """For difficult vectors: how far a client's message moves with them, squared, in steps; and
        what is billed.
        """
        scheme, size = bug.scheme(SCHEME), SCHEME.shares.dimension
        spread = SCHEME._rotation(0).inverse(
            np.full(SCHEME.shares.coordinates, SCHEME.clip / math.sqrt(SCHEME.shares.coordinates))
        )
        one = np.zeros(size)
        one[3] = 1e9
        for what, vector in {
            "spread": spread,
            "one number": one,
            "not a number": np.full(size, np.nan),
            "long": 50 * spread,
        }.items():
            with_it, without = (
                SCHEME.centred(scheme.encode(v, SECRET, 0, 0)) for v in (vector, np.zeros(size))
            )
            apart = SCHEME.centred(SCHEME.wrapped(with_it - without)).astype(np.float64)
            yield what, float(apart @ apart), SCHEME.shares.squared

    def too_few(self, bug: Any) -> tuple[int, int] | None:
        """(survivors, billed) of a round with one survivor less than is billed, if it was
        released.
        """
        least = SCHEME.shares.least
        try:
            self._total(bug.scheme(SCHEME), bug, np.zeros((least - 1, SCHEME.shares.dimension)), 0)
        except TooFew:
            return None
        return least - 1, least
