"""The server's part of secure aggregation: Flower's SecAgg+ sums whole numbers modulo 2^bits, and
shows their sum alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpfy.core import errors
from dpfy.core.errors import DpfyError, Unsupported
from dpfy.core.storage import write_atomically
from dpfy.federated.cohort import Cohort
from dpfy.federated.rounds import PrivateRounds
from dpfy.federated.shares.aggregator import SurvivorSum, TooFew
from dpfy.federated.shares.rounds import DistributedRounds, SharesCohort
from dpfy.federated.shares.scheme import Message as Encoded
from dpfy.gradients.engine import trainable
from dpfy.integrations.flower.secure_client import MOST_BITS, terms_of
from dpfy.runs.mark import ASKED

try:
    from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
    from flwr.app.user_config import UserConfig
    from flwr.common import FitIns, Parameters, parameters_to_ndarrays
    from flwr.server.compat.legacy_context import LegacyContext
    from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
    from flwr.server.workflow.secure_aggregation.secaggplus_workflow import (
        SecAggPlusWorkflow,
        WorkflowState,
    )
    from flwr.serverapp import Grid
except ImportError:
    raise errors.missing("Flower's secure aggregation", "flwr") from None

LEAST = 2
"""Fewer clients than two have no masks between them."""
TRIES = 3


class ClientNode:
    """The node of a client, as the protocol wants it."""

    def __init__(self, node: int) -> None:
        self.node_id, self.cid = node, str(node)


class SecureRound:
    """Stands where the protocol expects a strategy: says who is asked, and takes the sum that it
    shows.
    """

    def __init__(self, nodes: list[int]) -> None:
        self.nodes = nodes
        self.survivors: list[int] = []
        self.shown: np.ndarray | None = None

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: Any
    ) -> list[tuple[ClientNode, FitIns]]:
        """Who is asked; what they are told comes later."""
        return [(ClientNode(node), FitIns(Parameters([], ""), {})) for node in self.nodes]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[ClientNode, Any]], failures: list[Any]
    ) -> tuple[None, dict]:
        """The sum, as the protocol scales it."""
        self.survivors = [proxy.node_id for proxy, _ in results]
        (self.shown,) = parameters_to_ndarrays(results[0][1].parameters)
        return None, {}


class SecAggPlus:
    """A `SecureSum` (:mod:`dpfy.federated.shares`) over the nodes of a Flower federation.

    Guarantees: the server sends nothing from which it could have less than the sum over at least
    `least` clients by the protocol; a client that vanishes before keys are shared is left out, one
    that vanishes later is recovered or the round shows nothing. Flower makes each mask from a seed
    of 32 bits: the server is trusted not to search for them.
    """

    words = (
        "clients encoded their updates, each with its noise, and SecAgg+ of Flower summed them "
        "under masks; its masks come from seeds of "
        "32 bits, so that the server is trusted not to search for them"
    )

    def __init__(self, grid: Grid, timeout: float) -> None:
        self.grid, self.timeout = grid, timeout
        self._nodes: Mapping[int, int] = {}
        self._content: Callable[[], RecordDict] = RecordDict
        self._file = Path()

    def terms(self, rounds: PrivateRounds, number: int) -> ConfigRecord:
        """What clients must know to encode their updates."""
        assert isinstance(rounds, DistributedRounds)
        return terms_of(rounds.scheme, list(trainable(rounds.model)), number)

    def prepare(
        self, nodes: Mapping[int, int], content: Callable[[], RecordDict], secrets: Path
    ) -> None:
        """Whom to ask what in the round to come."""
        self._nodes, self._content, self._file = nodes, content, secrets / ASKED

    def make(self, cohort: Cohort) -> tuple[int, ...]:
        """Make the round; who is missing in it. One with too few clients, or that a killed server
        had asked for, ends without a release.
        """
        assert isinstance(cohort, SharesCohort)
        if self._file.is_file() and int(self._file.read_text()) >= cohort.step:
            cohort.skip()
            return tuple(self._nodes)
        for client in self._nodes:
            cohort.add_message(client, np.zeros(0, np.uint64))
        self._survivors: frozenset[int] = frozenset()
        try:
            cohort.close()
        except TooFew:
            cohort.skip()
        return tuple(sorted(set(self._nodes) - self._survivors))

    def sum(
        self, messages: Mapping[int, Encoded], *, bits: int, least: int, round: int
    ) -> SurvivorSum:
        """Run the protocol with the clients of `messages`, which stay on their devices."""
        if bits > MOST_BITS:
            raise Unsupported(f"SecAgg+ with {bits} bits", f"plan with at most {MOST_BITS}")
        clients, least = {self._nodes[client]: client for client in messages}, max(least, LEAST)
        nodes, workflow = sorted(clients), _workflow(bits, least, self.timeout)
        for _ in range(TRIES):
            if len(nodes) < least:
                break
            told, state = SecureRound(nodes), WorkflowState()
            context = _context(told, round)
            for stage in (workflow.setup_stage, workflow.share_keys_stage):
                stage(self.grid, context, state)
                if len(state.active_node_ids) < len(nodes):
                    break
            else:
                write_atomically(self._file, str(round).encode())
                return self._collected(workflow, context, state, told, bits, clients)
            nodes = sorted(state.active_node_ids)
        raise TooFew(len(nodes), least)

    def _collected(
        self,
        workflow: SecAggPlusWorkflow,
        context: LegacyContext,
        state: WorkflowState,
        told: SecureRound,
        bits: int,
        clients: Mapping[int, int],
    ) -> SurvivorSum:
        """Ask for masked messages, and for the keys that take the masks off their sum."""
        state.nid_to_fitins = {node: self._content() for node in state.active_node_ids}
        whole = workflow.collect_masked_vectors_stage(self.grid, context, state)
        survivors = len(state.active_node_ids)
        if not whole or not workflow.unmask_stage(self.grid, context, state):
            raise TooFew(survivors, workflow.reconstruction_threshold)
        steps = np.asarray(told.shown, np.float64) * len(told.survivors) / (1 << bits)
        if not np.all(np.abs(steps - np.rint(steps)) < 1e-3):
            raise DpfyError(
                "secure aggregation: a client sent another weight than 1; nothing of the round is "
                "used"
            )
        total = np.rint(steps).astype(np.int64) & ((1 << bits) - 1)
        self._survivors = frozenset(clients[node] for node in told.survivors)
        return SurvivorSum(total.astype(np.uint64), self._survivors)


def _workflow(bits: int, least: int, timeout: float) -> SecAggPlusWorkflow:
    """The protocol for whole numbers: every client is a neighbour of every other, and its own
    rounding leaves them as they are.
    """
    made = SecAggPlusWorkflow(1.0, least, timeout=timeout)
    made.quantization_range = made.modulus_range = 1 << bits
    made.clipping_range, made.max_weight = float(1 << (bits - 1)), float(1 << bits)
    return made


def _context(told: SecureRound, number: int) -> LegacyContext:
    state = RecordDict(
        {
            MAIN_CONFIGS_RECORD: ConfigRecord({Key.CURRENT_ROUND: number + 1}),
            MAIN_PARAMS_RECORD: ArrayRecord(),
        }
    )
    return LegacyContext(Context(0, 0, UserConfig(), state, UserConfig()), strategy=told)  # type: ignore[arg-type]
