"""The server's part: a Flower strategy whose rounds are those of the private training loop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dpfy.core import check, errors
from dpfy.core.errors import DpfyError, InvalidInput, Unsupported
from dpfy.federated.cohort import Cohort
from dpfy.federated.rounds import PrivateRounds
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engine import trainable
from dpfy.integrations.flower import mods
from dpfy.integrations.flower.replies import ClientPopulation, Replies, RoundReport, exchange
from dpfy.noise.shares import Shares
from dpfy.plan.claim import ForeignBatches
from dpfy.plan.recipe import Plan
from dpfy.runs.run import Run
from dpfy.training import load
from dpfy.training.run import TrainingClaims, complete

if TYPE_CHECKING:
    from dpfy.integrations.flower.secure import SecAggPlus

try:
    from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Result, Strategy
    from flwr.supercore import log
except ImportError:
    raise errors.missing("Flower", "flwr") from None

EVALUATION = (
    "what clients measure on their data is another release: measure on public data, with "
    "evaluate_fn"
)


class PrivateFedAvg(Strategy):
    """Private rounds for a Flower `ServerApp`: put it where `FedAvg(...)` stood, and `private_mod`
    first among the clients' mods.

        strategy = PrivateFedAvg(model, plan, "/srv/runs/x")
        result = strategy.start(grid, ArrayRecord(model.state_dict()), evaluate_fn=on_public_data)

    `optimizer` takes the noisy mean of the updates as its gradient: without one, SGD with rate 1,
    which is federated averaging; with momentum, Adam or Adagrad it is FedAvgM, FedAdam, FedAdagrad.
    `identity` is the entry of a node's configuration that says whose node it is. With `sampling`
    that strategy of Flower chooses whom to ask, and the charge claims no amplification. Rounds begin
    when `wait_for` clients are connected. A plan of :mod:`dpfy.federated.shares` runs over Flower's
    SecAgg+, with `secure_mod` at the clients. `reports` holds a :class:`RoundReport` for each round
    made here.

    Guarantees: the whole plan is reserved in the ledger, durably, before a message leaves. Who is
    asked in a round is drawn by the plan's sampler from the run's secret, over the clients that the
    plan counts, connected or not. A client adds at most the clip norm to a round, whatever it sends
    and however often; anyone who is absent, late or faulty adds zero; noise and divisor do not depend
    on who answers. A server that is killed and started again with the same folder goes on, with the
    bits that it would have made.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        run: str | Path | Run,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        identity: str | None = None,
        wait_for: int = 1,
        sampling: Strategy | None = None,
        batches: ForeignBatches | None = None,
        **rounds: Any,
    ) -> None:
        self.model, self.plan, self.sampling = model, plan, sampling
        self.run, self.batches = Run.of(run), batches
        if sampling is not None and batches is None:
            self.batches = ForeignBatches(
                f"clients chosen by the strategy {type(sampling).__name__} of Flower"
            )
        self.optimizer = (
            optimizer
            if optimizer is not None
            else torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        )
        self.identity = identity
        self.wait_for = check.integer("wait_for", wait_for, most=plan.recipe.records)
        self.reports: list[RoundReport] = []
        self._options = rounds
        self._rounds: PrivateRounds | None = None
        self._cohort: Cohort | None = None
        self._replies: Replies | None = None
        self._protocol: SecAggPlus | None = None

    def start(  # type: ignore[override]
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Make the rounds of the plan that are left, and the report. `evaluate_fn` is called as by
        other strategies.
        """
        if num_rounds is not None and num_rounds != self.plan.recipe.steps:
            raise InvalidInput(
                "num_rounds",
                num_rounds,
                f"must be the rounds of the plan: {self.plan.recipe.steps}",
            )
        if evaluate_config is not None:
            raise Unsupported("evaluation on clients", EVALUATION)
        timeout = check.positive("timeout", timeout)
        result, place = Result(), self._place()
        if complete(place, self.plan, TrainingClaims(self.batches)):
            load.load(place.path, self.model)
            result.arrays = self._arrays()
            return result
        self._begin_with(initial_arrays)
        rounds = self._rounds = self._made(place, grid, timeout)
        with rounds:
            self._population = ClientPopulation(
                rounds.folder.secrets, self.plan.recipe.records, self.identity
            )
            self._timeout = timeout
            if rounds.steps_done == 0:
                self._evaluated(result, 0, evaluate_fn)
            while (cohort := rounds.cohort()) is not None:
                self._cohort, number = cohort, cohort.step + 1
                messages = list(
                    self.configure_train(
                        number, self._arrays(), train_config or ConfigRecord(), grid
                    )
                )
                self.aggregate_train(
                    number, [] if self._protocol else exchange(grid, messages, timeout)
                )
                self._evaluated(result, number, evaluate_fn)
        result.arrays = self._arrays()
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a round, to the clients that were drawn for it and are there."""
        cohort, rounds = self._under_way()
        here = self._here(grid)
        drawn = self._drawn(cohort, here, server_round, arrays, grid)
        asked = {client: here[client] for client in drawn if client in here}
        report = RoundReport(server_round, drawn, tuple(c for c in drawn if c not in here))
        self._replies = Replies(asked, arrays, dict(trainable(rounds.model)), report)
        config["server-round"] = server_round

        def content() -> RecordDict:
            return RecordDict(
                {mods.ARRAYS: arrays, "config": config, mods.TERMS: self._terms(rounds, cohort)}
            )  # type: ignore[dict-item]

        if self._protocol is not None:
            self._protocol.prepare(asked, content, rounds.folder.secrets)
        return [
            Message(content(), dst_node_id=node, message_type=MessageType.TRAIN, ttl=self._timeout)
            for node in asked.values()
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """End the round: what came is clipped and summed, noised, and given to the optimizer. No
        metric of clients is released.
        """
        cohort, _ = self._under_way()
        if self._replies is None:
            raise DpfyError("rounds: configure_train comes before aggregate_train")
        taken, self._replies = self._replies, None
        if self._protocol is not None:
            taken.report.silent = self._protocol.make(cohort)
        else:
            taken.take(replies)
            taken.close(cohort)
        self._cohort = None
        self.reports.append(taken.report)
        if taken.report.troubles:
            log(
                WARNING,
                "round %s: some replies were %s (strategy.reports)",
                server_round,
                ", ".join(taken.report.troubles),
            )
        return self._arrays(), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nobody is asked."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Refused."""
        raise Unsupported("evaluation on clients", EVALUATION)

    def summary(self) -> None:
        """Log what is promised."""
        recipe = self.plan.recipe
        log(
            INFO,
            "\t├──> %s rounds over %s clients, %s expected in each",
            recipe.steps,
            recipe.records,
            f"{recipe.expected_batch:g}",
        )
        log(
            INFO,
            "\t└──> epsilon %s at delta %s",
            f"{self.plan.epsilon:.4g}",
            f"{self.plan.delta:g}",
        )

    def _made(self, place: Run, grid: Grid, timeout: float) -> PrivateRounds:
        """The rounds of the plan: with noise added here, or, where the plan has it in shares, by
        the clients.
        """
        given = (self.model, self.optimizer, self.plan, place)
        options = self._options | {"batches": self.batches}
        if not isinstance(self.plan.recipe.strategy, Shares):
            return PrivateRounds(*given, **options)
        from dpfy.federated.shares.rounds import DistributedRounds
        from dpfy.integrations.flower.secure import SecAggPlus

        self._protocol = SecAggPlus(grid, timeout)
        return DistributedRounds(*given, aggregator=self._protocol, **options)

    def _terms(self, rounds: PrivateRounds, cohort: Cohort) -> ConfigRecord:
        """What the mod of a client must know."""
        if self._protocol is not None:
            return self._protocol.terms(rounds, cohort.step)
        clip = rounds.clip
        names = list(trainable(rounds.model))
        return ConfigRecord(
            {mods.CLIP: clip.norm if isinstance(clip, FlatClip) else 0.0, mods.TRAINED: names}
        )

    def _place(self) -> Run:
        """The run folder; one that holds an unfinished or finished run is gone on with."""
        path = Path(self.run.path)
        there = path.is_dir() and any(path.iterdir())
        return dataclasses.replace(self.run, resume=True) if there else self.run

    def _begin_with(self, arrays: ArrayRecord) -> None:
        """Give the model its first weights; a run that goes on replaces them by its own."""
        try:
            self.model.load_state_dict(arrays.to_torch_state_dict())
        except (RuntimeError, TypeError, ValueError) as problem:
            raise InvalidInput(
                "initial_arrays", "arrays of another model", str(problem).splitlines()[-1].strip()
            ) from None

    def _here(self, grid: Grid) -> dict[int, int]:
        """The nodes of the clients that are connected, by number, once there are enough of them for
        the first round.
        """
        here = self._population.present(grid, self._timeout)
        while len(self._population.numbers) < self.wait_for:
            log(
                INFO, "%s of %s clients are connected", len(self._population.numbers), self.wait_for
            )
            time.sleep(1.0)
            here = self._population.present(grid, self._timeout)
        return here

    def _drawn(
        self, cohort: Cohort, here: dict[int, int], number: int, arrays: ArrayRecord, grid: Grid
    ) -> tuple[int, ...]:
        """Whom to ask, connected or not: the cohort of the plan, or whom `sampling` chooses."""
        if self.sampling is None:
            return tuple(int(client) for client in cohort.clients)
        chosen = {
            m.metadata.dst_node_id
            for m in self.sampling.configure_train(number, arrays, ConfigRecord(), grid)
        }
        return tuple(sorted(client for client, node in here.items() if node in chosen))

    def _under_way(self) -> tuple[Cohort, PrivateRounds]:
        if self._cohort is None or self._rounds is None:
            raise Unsupported(
                "a round by itself", "call start: it reserves the plan and draws who takes part"
            )
        return self._cohort, self._rounds

    def _arrays(self) -> ArrayRecord:
        """The model's weights and buffers as they are now."""
        return ArrayRecord(self.model.state_dict())

    def _evaluated(
        self,
        result: Result,
        number: int,
        evaluate: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    ) -> None:
        found = evaluate(number, self._arrays()) if evaluate else None
        if found is not None:
            log(INFO, "round %s: %s", number, dict(found))
            result.evaluate_metrics_serverapp[number] = found
