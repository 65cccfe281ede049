"""Rounds whose noise comes with the updates: the server sums what clients encoded, and adds
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.storage import write_atomically
from dpfy.core.values import Bounded
from dpfy.federated.cohort import Cohort, Tally
from dpfy.federated.rounds import ClientNumbers, PrivateRounds
from dpfy.federated.shares.aggregator import SecureSum, TrustedSum
from dpfy.federated.shares.scheme import Array, Message, SharingScheme
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engine import Grads, zeros
from dpfy.noise.shares import Shares
from dpfy.plan.claim import SIMULATED
from dpfy.plan.recipe import Plan
from dpfy.runs.mark import ENCODED_HERE
from dpfy.runs.run import Run
from dpfy.training.run import TRAINING, TrainingRun

ENCODED = (
    f"{SIMULATED}: updates were encoded by the server instead of the clients, and anyone who ran it "
    f"could see every one"
)


@dataclass(frozen=True, repr=False)
class SharingClients(ClientNumbers):
    """Clients that add noise to what they send."""

    adds_shares = True


class SharesCohort(Cohort):
    """The clients of a round, and what they sent: messages that they encoded, or, in a simulation,
    updates that are encoded for them.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.messages: dict[int, Message] = {}
        self.skipped = False

    @property
    def waiting(self) -> list[int]:
        """Clients that were drawn and have sent nothing yet."""
        return [client for client in super().waiting if client not in self.messages]

    def add_message(self, client: int, message: Message) -> None:
        """Take what a client made with `SharingScheme.encode`. It adds its vector and its share of the
        noise to the round, once.
        """
        self.messages[self._admitted(client)] = message

    def skip(self) -> Tally:
        """End a round that too few clients are left in: nothing of it is summed or released, and it
        is charged all the same.
        """
        self.messages, self._rows, self._stacked, self.skipped = {}, {}, None, True
        return self.close()

    def _admitted(self, client: object) -> int:
        if client in self.messages:
            raise InvalidInput(
                f"client {client}", "a second message", "a client sends one update a round"
            )
        return super()._admitted(client)

    def vectors(self) -> Iterator[tuple[int, Array]]:
        """The updates that were not encoded by their clients, each as one vector."""
        for place, client in enumerate(self.clients.tolist()):
            if self._stacked is not None:
                yield client, flat([t[place] for t in self._stacked])
            elif client in self._rows:
                yield client, flat(self._rows[client])

    def encoded(
        self, scheme: SharingScheme, randomness: Randomness
    ) -> tuple[dict[int, Message], tuple[int, ...]]:
        """The messages of all who answered, those of a simulation from streams of the run's own
        secret; and whose update was unusable.
        """
        found, unusable = dict(self.messages), []
        for client, vector in self.vectors():
            found[client] = scheme.encode(vector, randomness, client, self.step)
            unusable += [] if np.isfinite(vector).all() else [client]
        return found, tuple(unusable)


def flat(tensors: list[Tensor]) -> Array:
    """Tensors as one vector in double precision."""
    return np.concatenate([t.detach().double().cpu().numpy().reshape(-1) for t in tensors])


class DistributedRounds(PrivateRounds):
    """Rounds in which every client adds its share of the noise, and the server sees sums alone.

        plan = dpfy.federated.shares.plan(clients=1000, dimension=d, rounds=50, epsilon=4,
        delta=1e-5, least=800) with DistributedRounds(model, optimizer, plan, run="runs/x",
        aggregator=protocol) as rounds:
            for cohort in rounds.cohorts():
                cohort.add_message(client, message)      # made by the client: Client(rounds.scheme,
                client).message(update, round)

    `cohort.add(client, update)` is for simulations: the update is encoded here, with streams of the
    run's secret, and the report says so.

    Guarantees: those of :class:`dpfy.federated.PrivateRounds`, but that noise is the clients'. A
    round with fewer than the plan's `least` answers raises `TooFew`; nothing of it was seen or
    released, and it goes on when more have answered, or ends by `cohort.skip()`. The sum that the
    protocol showed is kept before it is used: a server that was killed never asks for the same
    round again.
    """

    numbers = SharingClients
    gathers = SharesCohort

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        run: str | Path | Run | TrainingRun | None = None,
        *,
        aggregator: SecureSum | None = None,
        **rest: Any,
    ) -> None:
        shares = plan.recipe.strategy if isinstance(plan, Plan) else None
        if not isinstance(shares, Shares):
            raise Unsupported(
                "a plan whose noise is not in shares",
                "make it with dpfy.federated.shares.plan, or use PrivateRounds",
            )
        held = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if held != shares.dimension:
            raise InvalidInput(
                "dimension",
                shares.dimension,
                f"must be the number of trainable parameters ({held})",
            )
        if not isinstance(plan.recipe.clip, FlatClip) or plan.recipe.noise != "float":
            raise Unsupported(
                "shares of noise with another clip than one norm for the whole update",
                "use FlatClip",
            )
        super().__init__(model, optimizer, plan, run, **rest)
        self.scheme = SharingScheme(shares, plan.recipe.clip.bound.l2, plan.noise_multiplier)
        self.aggregator = TrustedSum() if aggregator is None else aggregator

    def _open(self) -> None:
        super()._open()
        bare = replace(
            self.private_step.stream, scale=0.0
        )  # sums have their noise; permit and event are compared all the same
        self.private_step = replace(self.private_step, stream=bare)
        self._tell()

    def _tell(self) -> None:
        """Say for the report who summed, and whether more than sums was seen here, in this process or
        in one before it.
        """
        assert isinstance(self.folder, TrainingRun)
        file = self.folder.secrets / ENCODED_HERE
        words = file.read_text("utf-8") if file.is_file() else self.aggregator.words
        self.folder.tell(TRAINING, aggregation=check.one_line("aggregator.words", words, 400))

    def _summed(self, cohort: Cohort) -> tuple[Bounded[Grads], Tally]:
        assert isinstance(cohort, SharesCohort)
        shares = self.scheme.shares
        if cohort.skipped:
            return Bounded(
                zeros(self._guard.trainable, self.clip), self.clip.bound, self.plan.recipe.unit
            ), Tally(len(cohort), 0, ())
        messages, unusable = cohort.encoded(self.scheme, self.folder.randomness)
        words = ENCODED if len(messages) > len(cohort.messages) else self.aggregator.words
        if words.startswith(SIMULATED):
            write_atomically(self.folder.secrets / ENCODED_HERE, words.encode())
            self._tell()
        found = self.aggregator.sum(
            messages, bits=shares.bits, least=shares.least, round=cohort.step
        )
        vector = torch.from_numpy(self.scheme.decode(found.total, cohort.step))
        sums = split(vector, self._guard.trainable)
        return Bounded(sums, self.clip.bound, self.plan.recipe.unit), Tally(
            len(cohort), len(found.survivors), unusable
        )


def split(vector: Tensor, like: Mapping[str, Tensor]) -> Grads:
    """A vector as tensors of these shapes, types and places, in their order."""
    parts = torch.split(vector, [p.numel() for p in like.values()])
    return {
        n: part.view(p.shape).to(dtype=p.dtype, device=p.device)
        for part, (n, p) in zip(parts, like.items(), strict=True)
    }
