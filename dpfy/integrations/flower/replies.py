"""The replies of a round: which of them count, and what became of the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpfy.core import errors
from dpfy.core.errors import InvalidInput
from dpfy.federated.cohort import Cohort
from dpfy.integrations.flower import wire

try:
    from flwr.app import ArrayRecord, Message
except ImportError:
    raise errors.missing("Flower", "flwr") from None


TROUBLES = ("absent", "silent", "failed", "refused", "repeated", "strange", "unusable")


@dataclass
class RoundReport:
    """What became of the clients of a round, by their numbers. For whoever runs the server alone:
    who was drawn is as private as the data.

    Whatever the cause, a client whose update did not count has counted as zero, and is billed as
    all others are.
    """

    round: int
    drawn: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    """No node of theirs was connected."""
    silent: tuple[int, ...] = ()
    """Asked, and no reply in time."""
    failed: dict[int, str] = field(default_factory=dict)
    """Replied with an error."""
    refused: dict[int, str] = field(default_factory=dict)
    """Replied with something else than the arrays of the model."""
    repeated: list[int] = field(default_factory=list)
    """Replied more than once; the first reply counts."""
    strange: int = 0
    """Replies of nodes that were not asked."""
    unusable: tuple[int, ...] = ()
    """Updates that were not finite."""

    @property
    def troubles(self) -> tuple[str, ...]:
        """What went wrong, without how often and for whom: the names of the fields above that are
        not empty.
        """
        return tuple(name for name in TROUBLES if getattr(self, name))


class Replies:
    """The updates of one round as they come in.

    Guarantees: of a node that was asked the first reply counts, of others none; what is not the
    model's is refused before the cohort sees it; the cohort gets the updates in the order of its
    clients, so that the sum does not depend on who answers first.
    """

    def __init__(
        self,
        asked: Mapping[int, int],
        sent: ArrayRecord,
        trainable: Mapping[str, Tensor],
        report: RoundReport,
    ) -> None:
        self.report = report
        self._clients = {node: client for client, node in asked.items()}
        self._shapes = wire.shapes_of(sent)
        self._weights = {name: value.detach() for name, value in trainable.items()}
        self._heard: set[int] = set()
        self._updates: dict[int, dict[str, Tensor]] = {}

    def take(self, replies: Iterable[Message]) -> None:
        """Sort replies by what they are."""
        for reply in replies:
            client = self._clients.get(reply.metadata.src_node_id)
            if client is None:
                self.report.strange += 1
            elif client in self._heard:
                self.report.repeated.append(client)
            else:
                self._heard.add(client)
                self._first(client, reply)

    def _first(self, client: int, reply: Message) -> None:
        if reply.has_error():
            self.report.failed[client] = f"error {reply.error.code}"
            return
        records = list(reply.content.array_records.values())
        try:
            if len(records) != 1:
                raise InvalidInput("reply", f"{len(records)} records of arrays", "must hold one")
            local = wire.decoded(records[0], self._shapes)
        except InvalidInput as problem:
            self.report.refused[client] = str(problem)
            return
        self._updates[client] = {
            name: (weight.double().cpu() - torch.from_numpy(local[name])).to(weight.dtype)
            for name, weight in self._weights.items()
        }

    def close(self, cohort: Cohort) -> None:
        """Hand the updates to the cohort and end its round."""
        for client in sorted(self._updates):
            cohort.add(client, self._updates[client])
        self.report.silent = tuple(sorted(set(self._clients.values()) - self._heard))
        self.report.unusable = cohort.close().unusable
