"""The server of a federation: rounds of clients whose updates are bounded, summed and noised by the
private training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpfy.core import check
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput, Unsupported
from dpfy.core.values import Bounded
from dpfy.data.records import Records
from dpfy.federated.cohort import Cohort, Tally
from dpfy.federated.recipes import Participations, check_unit
from dpfy.gradients.clip import Clip
from dpfy.gradients.engine import Engine, Grads
from dpfy.isolation.summary import CheckSummary
from dpfy.plan.claim import ForeignBatches
from dpfy.plan.recipe import Plan
from dpfy.runs.mark import ROUND
from dpfy.runs.run import Run
from dpfy.sampling.samplers import CheckInSampler
from dpfy.training.batches import Batches
from dpfy.training.integrity import checkpoint
from dpfy.training.integrity.checkpoint import Snapshot
from dpfy.training.loop import PrivateTraining
from dpfy.training.run import TrainingRun
from dpfy.training.runtime import Runtime
from dpfy.training.step import Update
from dpfy.training.validation import check_parts

CHECKED = (
    "the update of each client was bounded as it came, whatever the client had computed: no step "
    "had examples that could mix"
)
TOOK_PART = "took part"
Arrivals = Callable[[int, "NDArray[np.int64]"], "Sequence[int] | NDArray[np.int64]"]
"""(round, clients that may take part) to those that do."""


class UpdateEngine(Engine):
    """Stands where an engine of gradients does: updates come from clients, and a cohort sums
    them.
    """

    name = "updates of clients"

    def attach(self, model: nn.Module) -> None:
        """Nothing of the model is watched."""

    def detach(self) -> None:
        """Nothing was."""

    def bounded_sum(self, losses: Tensor, clip: Clip, mask: Tensor | None = None) -> Bounded[Grads]:
        """Refused: there are no losses here."""
        raise DpfyError(
            "rounds: updates of clients are added to a cohort, not computed from losses"
        )


@dataclass
class UpdateChecks(CheckSummary):
    """What the report says about mixing where no gradient was computed by the server."""

    @property
    def words(self) -> str:
        """Each update came by itself."""
        return CHECKED


@dataclass(frozen=True, repr=False)
class ClientNumbers(Records):
    """The clients by number: all that a server knows of their data before they answer."""

    most_records: int = 1

    @property
    def records_each(self) -> int:
        """Of one client, as many as the plan's unit may own."""
        return self.most_records


class PrivateRounds(PrivateTraining):
    """Private training whose contributions are updates of clients instead of gradients of examples
    (DP-FedAvg and its kin).

        with dpfy.federated.PrivateRounds(model, optimizer, plan, run="runs/x") as rounds:
            for cohort in rounds.cohorts():
                for client in cohort.clients:
                    cohort.add(client, update_of(client, model))   # global weights minus local
                    weights

    The mean of the clipped updates, with noise, is the gradient that `optimizer` takes: SGD with
    rate 1 is federated averaging.

    `repeatable` says that a round which is made again gets the same updates, bit for bit, as a
    simulation from the run's secret does. Otherwise, the default, the sum of a round is kept among
    the run's secrets before its noise is made, and a checkpoint is written after it: a server that
    was killed goes on from that sum, and never makes the noise of a round for another one.

    Guarantees: those of :class:`dpfy.PrivateTraining`, with a client as the unit. The whole plan is
    reserved in the ledger before the first cohort is drawn; who is in a cohort is a function of the
    run's secret and the round; the divisor is the expected cohort, however many clients answer.
    Where cohorts are chosen elsewhere (`batches`), any client may answer, and
    amplification is not charged.
    """

    numbers: type[ClientNumbers] = ClientNumbers
    gathers: type[Cohort] = Cohort

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        run: str | Path | Run | TrainingRun | None = None,
        *,
        clients: int | None = None,
        repeatable: bool = False,
        device: str | None = None,
        progress: bool = False,
        update: Update | None = None,
        scheduler: object = None,
        batches: ForeignBatches | None = None,
    ) -> None:
        check_parts(model, optimizer, plan)
        check_unit(plan.recipe.unit)
        count = check.integer(
            "clients", plan.recipe.records if clients is None else clients, most=check.RECORDS
        )
        numbers = self.numbers((torch.arange(count),), most_records=plan.recipe.unit.most_records)
        runtime = Runtime(device=device, progress=progress)
        super().__init__(
            model,
            optimizer,
            numbers,
            plan,
            run,
            runtime=runtime,
            update=update,
            scheduler=scheduler,
            batches=batches,
        )
        self.repeatable = repeatable
        self.engine, self.engine_reason = UpdateEngine(), "updates of clients"
        self._cohort: Cohort | None = None

    def _open(self) -> None:
        if self.world.count > 1:
            raise Unsupported("rounds on several ranks", "serve a federation from one process")
        super()._open()
        assert self.isolation is not None
        self.isolation.summary = UpdateChecks()
        self._cohort = None

    def cohorts(self, arrivals: Arrivals | None = None) -> Iterator[Cohort]:
        """The cohorts of all remaining rounds, also empty ones. A round ends when the next is asked
        for, or by `Cohort.close`.

        Where clients check in by themselves, `arrivals` says who takes part, of the round and those
        who may.
        """
        while (cohort := self.cohort(arrivals)) is not None:
            yield cohort
            cohort.close()

    def may_take_part(self) -> NDArray[np.int64]:
        """Clients that may check in to the round under way: who rests, or took part as often as
        planned, may not.
        """
        sampler = self._check_in_sampler()
        return self.participations.eligible(self.steps_done, sampler.separation, sampler.most)

    def check_in(self, clients: Sequence[int] | NDArray[np.int64]) -> Cohort:
        """Begin the round with these clients, which came by themselves. One that may not take part
        yet is refused, and nothing begins.
        """
        self._require_live()
        self._make_kept_round()
        if self._cohort is not None or self.steps_done == self.last_step:
            raise InvalidInput(
                "check_in", f"round {self.steps_done}", "is under way, or all rounds are over"
            )
        came = np.unique(np.asarray(clients, dtype=np.int64))
        if len(came) != len(clients):
            raise InvalidInput(
                "check_in", f"{len(clients)} clients", "a client checks in once a round"
            )
        if len(early := np.setdiff1d(came, self.may_take_part())):
            sampler = self._check_in_sampler()
            rule = (
                f"may take part every {sampler.separation} rounds, {sampler.most} times at most: "
                f"ask may_take_part()"
            )
            raise InvalidInput(f"check_in client {early[0]}", f"round {self.steps_done}", rule)
        self._save_if_due()
        self._cohort = self.gathers(self.steps_done, came, self._guard.trainable, self._end)
        return self._cohort

    @property
    def participations(self) -> Participations:
        """Who took part in which round, where clients check in by themselves."""
        made = self.kept.setdefault(TOOK_PART, [])
        if len(made) < self.steps_done:
            rule = f"must hold those of all {self.steps_done}: leave it alone"
            raise InvalidInput("rounds.kept", f"participations of {len(made)} rounds", rule)
        return Participations(len(self.records), made)

    def _check_in_sampler(self) -> CheckInSampler:
        sampler = self.plan.recipe.sampler
        if not isinstance(sampler, CheckInSampler):
            raise Unsupported(
                "check-ins under a plan that draws its clients",
                "make the plan by dpfy.federated.check_in(...)",
            )
        return sampler

    def cohort(self, arrivals: Arrivals | None = None) -> Cohort | None:
        """The cohort of the round under way; None when the last round is over."""
        self._require_live()
        self._make_kept_round()
        if self.steps_done == self.last_step:
            return None
        if self._cohort is None and isinstance(self.plan.recipe.sampler, CheckInSampler):
            if arrivals is None:
                raise Unsupported(
                    "drawing clients that check in by themselves",
                    "give arrivals, or call check_in(clients)",
                )
            return self.check_in(arrivals(self.steps_done, self.may_take_part()))
        if self._cohort is None:
            self._save_if_due()
            self._cohort = self.gathers(
                self.steps_done, self._drawn(self.steps_done), self._guard.trainable, self._end
            )
        return self._cohort

    def _drawn(self, step: int) -> NDArray[np.int64]:
        """Who may take part in a round: whom the sampler draws, or anyone, where others choose and
        nothing is claimed for it.
        """
        foreign = isinstance(self.folder, TrainingRun) and self.folder.promised.batches is not None
        if foreign:
            return np.arange(len(self.records), dtype=np.int64)
        sampler = self.plan.recipe.sampler
        rng = self.folder.randomness.generator("sampling", sampler.address(step))
        return sampler.batch(step, records=len(self.records), rng=rng)

    def computes(self, what: str, facts: str) -> None:
        """Keep a keyed fingerprint of what updates are computed by: a resumed run that would
        compute something else is refused.
        """
        self._require_live()
        with self._status.stop_on_error():
            self._state = self._state.computing(
                what, self.folder.randomness.tag(what, facts.encode())
            )

    def batches(self) -> Batches:
        """Refused: the data stays with the clients."""
        raise Unsupported(
            "batches of a federation", "ask for cohorts(), and add what each client sends"
        )

    def captured(self, losses_of: object) -> Callable[..., None]:
        """Refused, as batches are."""
        self.batches()
        raise AssertionError

    def _end(self, cohort: Cohort) -> Tally:
        """The round is over: bound what came, keep it where it could not be had again, and make the
        step.
        """
        self._require_live()
        if cohort is not self._cohort or cohort.step != self.steps_done:
            raise InvalidInput(
                "round", cohort.step, f"is over: round {self.steps_done} is under way"
            )
        total, tally = self._summed(cohort)
        if not self.repeatable:
            kept = Snapshot(cohort.step, {TOOK_PART: cohort.clients.tolist()}, total.value)
            checkpoint.write(self.folder.secrets / ROUND, kept, self.folder.randomness)
        self._make(total, cohort.clients.tolist())
        return tally

    def _summed(self, cohort: Cohort) -> tuple[Bounded[Grads], Tally]:
        return cohort.bounded(self.clip, self.plan.recipe.unit)

    def _make(self, total: Bounded[Grads], clients: list[int]) -> None:
        self._cohort = None
        if isinstance(self.plan.recipe.sampler, CheckInSampler):
            self.kept.setdefault(TOOK_PART, [])[self.steps_done :] = [clients]
        self._update(total)
        if not self.repeatable:
            self.save()

    def _make_kept_round(self) -> None:
        """A round whose sum was kept, and which no checkpoint holds yet, is made of that sum."""
        file = self.folder.secrets / ROUND
        if (
            self.steps_done != self._entry
            or self._cohort is not None
            or self.repeatable
            or not file.is_file()
        ):
            return
        kept = checkpoint.read(file, self.folder.randomness)
        if kept.step < self.steps_done:
            return
        if kept.step > self.steps_done:
            raise Corrupt(
                f"checkpoint/{ROUND}",
                f"is of round {kept.step}, but the checkpoint of round {self.steps_done}",
            )
        order = (
            *self._guard.trainable,
            *self.clip.coordinates,
        )  # noise is laid along the sums in their order
        sums = {name: kept.tensors[name].to(self.device) for name in order}
        self._make(Bounded(sums, self.clip.bound, self.plan.recipe.unit), kept.facts[TOOK_PART])
