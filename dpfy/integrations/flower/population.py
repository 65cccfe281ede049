"""Who is who: the clients of a plan have numbers, the nodes of a federation come and go."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from dpfy.core import errors, storage
from dpfy.core.errors import Corrupt
from dpfy.core.storage import PRIVATE_MODE, write_atomically
from dpfy.integrations.flower import wire
from dpfy.runs.mark import POPULATION

try:
    from flwr.app import ConfigRecord, Message, MessageType, RecordDict
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
        question = RecordDict({wire.TERMS: ConfigRecord({wire.NAME: str(self.identity)})})
        messages = [
            Message(question, dst_node_id=node, message_type=MessageType.TRAIN, ttl=timeout)
            for node in nodes
        ]
        names = dict.fromkeys(nodes, "")
        for reply in exchange(grid, messages, timeout):
            said = None if reply.has_error() else reply.content.config_records.get(wire.TERMS)
            if said is not None and reply.metadata.src_node_id in names:
                names[reply.metadata.src_node_id] = str(said.get(wire.NAME, ""))[:200]
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
