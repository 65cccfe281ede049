"""The replies of a round: which of them count, and what became of the others.

Who is who: the clients of a plan have numbers, the nodes of a federation come and go.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dpfy.core import errors, storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.storage import PRIVATE_MODE, write_atomically
from dpfy.federated.cohort import Cohort
from dpfy.integrations.flower import mods
from dpfy.runs.mark import POPULATION

try:
    from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
    from flwr.serverapp import Grid
except ImportError:
    raise errors.missing("Flower", "flwr") from None

POLL = 0.25


def exchange(grid: Grid, messages: list[Message], timeout: float) -> Iterator[Message]:
    """Send messages and give their replies as they come, until all are there or `timeout` seconds
    have passed.
    """
    waiting = {key for key in grid.push_messages(messages) if key} if messages else set()
    end = time.monotonic() + timeout
    while waiting:
        for reply in grid.pull_messages(waiting):
            waiting.discard(reply.metadata.reply_to_message_id)
            yield reply
        if not waiting or time.monotonic() >= end:
            return
        time.sleep(POLL)


class ClientPopulation:
    """The clients that a plan counts: a name each, and a number for as long as the run lasts.

    A node is known by the entry `identity` of its configuration, which its mod tells, or else by
    the key that it authenticates with (without authentication: the one it made when it started).

    Guarantees: a name keeps its number, also when the server is killed; there are never more
    numbers than the plan counts clients; of two nodes with one name at most one is asked in a
    round.
    """

    def __init__(self, folder: Path, clients: int, identity: str | None) -> None:
        self.file, self.clients, self.identity = folder / POPULATION, clients, identity
        self.numbers: dict[str, int] = {name: number for number, name in enumerate(self._held())}
        self.turned_away: set[str] = set()
        self._names: dict[int, str] = {}

    def _held(self) -> list[str]:
        if not self.file.is_file():
            return []
        held = storage.parsed_json(POPULATION, self.file.read_bytes())
        if (
            not isinstance(held, list)
            or len(set(map(str, held))) != len(held)
            or len(held) > self.clients
        ):
            raise Corrupt(
                f"checkpoint/{POPULATION}", "is no list of the names of clients: start a new run"
            )
        return [str(name) for name in held]

    def present(self, grid: Grid, timeout: float) -> dict[int, int]:
        """The node of each client that can be asked now, by the client's number."""
        nodes = {int(node.node_id): bytes(node.public_key).hex() for node in grid.get_nodes()}
        fresh = [node for node in nodes if node not in self._names]
        if self.identity is None:
            self._names |= {node: nodes[node] or str(node) for node in fresh}
        else:
            self._names |= self._asked(grid, fresh, timeout)
        here = {node: self._names[node] for node in nodes if self._names.get(node)}
        self._admit(here.values())
        return {
            self.numbers[name]: node for node, name in sorted(here.items()) if name in self.numbers
        }

    def _asked(self, grid: Grid, nodes: list[int], timeout: float) -> dict[int, str]:
        """The names that nodes give; one that gives none takes no part."""
        question = RecordDict({mods.TERMS: ConfigRecord({mods.NAME: str(self.identity)})})
        messages = [
            Message(question, dst_node_id=node, message_type=MessageType.TRAIN, ttl=timeout)
            for node in nodes
        ]
        names = dict.fromkeys(nodes, "")
        for reply in exchange(grid, messages, timeout):
            said = None if reply.has_error() else reply.content.config_records.get(mods.TERMS)
            if said is not None and reply.metadata.src_node_id in names:
                names[reply.metadata.src_node_id] = str(said.get(mods.NAME, ""))[:200]
        return names

    def _admit(self, names: Iterable[str]) -> None:
        """Give numbers to new names, in their order, while there are any left; written down before
        they are used.
        """
        fresh = sorted(set(names) - self.numbers.keys())
        room = self.clients - len(self.numbers)
        self.turned_away |= set(fresh[room:])
        for name in fresh[:room]:
            self.numbers[name] = len(self.numbers)
        if fresh[:room]:
            write_atomically(self.file, json.dumps(list(self.numbers)).encode(), mode=PRIVATE_MODE)


TROUBLES = ("absent", "silent", "failed", "refused", "repeated", "strange", "unusable")


@dataclass
class RoundReport:
    """What became of the clients of a round, by their numbers. For anyone who runs the server alone:
    who was drawn is as private as the data.

    Whatever the cause, a client whose update did not count has counted as zero, and is charged as
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
        self._shapes = mods.shapes_of(sent)
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
            local = mods.decoded(records[0], self._shapes)
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
