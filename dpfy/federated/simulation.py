"""A simulated federation in one call: clients drawn by the plan train locally, and a verified run
folder is left at the end.

Virtual clients (Xu et al. 2022): small users joined in fixed groups, large ones cut into parts.
The unit of privacy changes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import Unit
from dpfy.data.batch import Batch
from dpfy.data.given import as_source
from dpfy.data.lazy import RecordSource
from dpfy.data.records import Records, as_records
from dpfy.data.users import UserRecords, by_user
from dpfy.federated.local import LocalTraining, LocalUpdates
from dpfy.federated.recipes import OwnTimes, check_unit
from dpfy.federated.rounds import Arrivals, PrivateRounds
from dpfy.federated.shares.rounds import DistributedRounds
from dpfy.gradients.engine import per_user
from dpfy.noise.shares import Shares
from dpfy.plan.recipe import Plan
from dpfy.runs.run import Run
from dpfy.sampling.samplers import CheckInSampler
from dpfy.training import metrics
from dpfy.training.evaluation import (
    PUBLIC,
    PrivateTest,
    TestData,
    TestFigures,
    measure,
    public,
    use_of,
)
from dpfy.training.fit import Result, ended, finished
from dpfy.training.integrity import computation
from dpfy.training.loop import PrivateTraining
from dpfy.training.losses import Loss
from dpfy.training.metrics import spent
from dpfy.training.objective import BatchLosses, Objective
from dpfy.training.run import TrainingRun
from dpfy.training.runtime import Runtime
from dpfy.training.step import Update


@dataclass(frozen=True, repr=False)
class VirtualClients(UserRecords):
    """Records by virtual client. `unit` is what a plan for them must name; a user's records lie in
    at most `parts` of them.

    A plan that shall hold for whole users is calibrated for groups: ``recipe.calibrate(epsilon,
    delta, group=clients.parts)``.
    """

    name: str = "virtual client"
    parts: int = 1

    @property
    def unit(self) -> Unit:
        """One virtual client, by its full name."""
        return Unit(self.name, self.rows_each)


def grouped(
    records: object, users: Tensor | np.ndarray, most: int, *, together: int
) -> VirtualClients:
    """Clients of up to `together` users each, in the order of their numbers; each user gives at
    most `most` records.

    Guarantees: a user is in one group, so that what is promised to the group holds for each user in
    it. Who is grouped with whom follows from the numbers alone: give numbers that are public and do
    not depend on the records.
    """
    check.integer("together", together)
    names, which = np.unique(_numbers(users), return_inverse=True)
    kept = np.flatnonzero(_places(which) < check.integer("most", most))
    count = min(together, len(names))
    made = by_user(_rows(records, kept), which[kept] // together, most * together)
    assert isinstance(made, UserRecords)
    return VirtualClients(made.tensors, name=f"virtual client (a group of up to {count} users)")


def parted(records: object, users: Tensor | np.ndarray, most: int, *, parts: int) -> VirtualClients:
    """Clients that are one of up to `parts` parts of a user, of at most `most` records each: a
    user's records are dealt out in turn.

    Guarantees: holds for one part. All of a user's parts together have the guarantee of a group of
    `parts` units.
    """
    check.integer("parts", parts)
    _, which = np.unique(_numbers(users), return_inverse=True)
    turn = _places(which)
    made = by_user(
        _rows(records, np.arange(len(which))),
        which * parts + turn % parts,
        check.integer("most", most),
    )
    assert isinstance(made, UserRecords)
    return VirtualClients(
        made.tensors, name=f"virtual client (one of up to {parts} parts of a user)", parts=parts
    )


def _numbers(users: Tensor | np.ndarray) -> np.ndarray:
    return users.cpu().numpy() if isinstance(users, Tensor) else np.asarray(users)


def _places(which: np.ndarray) -> np.ndarray:
    """For each record, how many of its user come before it."""
    order = np.argsort(which, kind="stable")
    counts = np.bincount(which)
    places = np.empty(len(which), np.int64)
    places[order] = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    return places


def _rows(records: object, kept: np.ndarray) -> object:
    return Records(as_records(records).take(torch.from_numpy(kept)))


def fit(
    model: nn.Module,
    clients: UserRecords,
    *,
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    local: LocalTraining = LocalTraining(),  # noqa: B008  (frozen)
    loss: str | Loss = "cross_entropy",
    objective: BatchLosses | None = None,
    arrivals: Arrivals | None = None,
    run: str | Path | Run | TrainingRun | None = None,
    evaluation: TestData | None = None,
    device: str | None = None,
    progress: bool = False,
    update: Update | None = None,
    scheduler: object = None,
) -> Result:
    """Train `model` on `clients` (:func:`dpfy.by_user`, one client a row) in the rounds of `plan`;
    return as :func:`dpfy.fit` does.

    In each round the clients that the plan draws take the steps of `local`; the mean of their
    clipped updates, with noise, is the gradient of the server's `optimizer`: SGD with rate 1 is
    federated averaging, Adam is FedAdam.

    Where clients check in by themselves (:func:`dpfy.federated.check_in`), `arrivals` says who
    does, of the round and those who may; by default :class:`dpfy.federated.OwnTimes`. With a plan
    of :func:`dpfy.federated.shares.plan` every client adds its share of the noise.

    One local step on all records of a client is a gradient at the common weights, and is computed
    as one, by the engines of
    :class:`dpfy.PrivateTraining`: DP-FedAvg of one step *is* DP-SGD over users.

    Guarantees: those of :class:`dpfy.federated.PrivateRounds`.
    """
    if not isinstance(clients, UserRecords):
        raise InvalidInput(
            "clients",
            type(clients).__name__,
            "must be records by client: dpfy.by_user(records, clients, most)",
        )
    if not isinstance(local, LocalTraining):
        raise InvalidInput("local", type(local).__name__, "must be a LocalTraining")
    check_unit(plan.recipe.unit)
    if plan.recipe.unit.most_records not in (1, clients.records_each):
        rule = (
            f"must be {clients.records_each}, as the data's: give the recipe unit=clients.unit, or "
            f"dpfy.federated.CLIENT"
        )
        raise InvalidInput("plan unit.most_records", plan.recipe.unit.most_records, rule)
    if isinstance(clients, VirtualClients) and plan.recipe.unit != clients.unit:
        rule = f"must be the data's, a {clients.unit.name}: give the recipe unit=clients.unit"
        raise InvalidInput("plan unit", plan.recipe.unit.name, rule)
    aim = Objective(loss, None, objective)
    aim.check("clients", clients)
    if aim.record is not None:
        raise Unsupported(
            "a loss for one record in federated training",
            "give a loss of (outputs, targets), or objective=",
        )
    use = use_of(evaluation)
    if isinstance(evaluation, PrivateTest):
        raise Unsupported(
            "a charged evaluation where the unit is a client",
            "use dpfy.PublicTest(data) or dpfy.WithheldTest(data)",
        )
    if (done := finished(model, run, plan)) is not None:
        return done
    started = time.monotonic()
    training: PrivateTraining
    drawn = not isinstance(plan.recipe.sampler, CheckInSampler)
    if drawn and arrivals is not None:
        raise InvalidInput(
            "arrivals",
            "given",
            "go with a plan whose clients check in: dpfy.federated.check_in(...)",
        )
    shared = isinstance(plan.recipe.strategy, Shares)
    gradient = local.is_gradient and drawn and not shared
    if gradient:
        runtime = Runtime(device=device, progress=progress)
        rows = WholeClients(clients.tensors, most_records=plan.recipe.unit.most_records)
        training = PrivateTraining(
            model, optimizer, rows, plan, run, runtime=runtime, update=update, scheduler=scheduler
        )
    else:
        training = (DistributedRounds if shared else PrivateRounds)(
            model, optimizer, plan, run,
            clients=len(clients), repeatable=True, device=device, progress=progress, update=update, scheduler=scheduler,
        )  # fmt: skip
    with training:
        held_out = None
        if evaluation is not None and evaluation.data is not None:
            held_out = as_source(evaluation.data)
        model.train()
        noting = _Noting(training, aim, held_out if use == PUBLIC else None)
        if gradient:
            _gradients(training, local, aim, noting)
        else:
            assert isinstance(training, PrivateRounds)
            _rounds(training, clients, local, aim, noting, arrivals)
        utility = measure(training, aim, held_out)
        found = (
            TestFigures(use, {})
            if held_out is None or use != PUBLIC
            else public(training, aim, held_out)
        )
        return ended(training, found, utility, model, started)


@dataclass(frozen=True, repr=False)
class WholeClients(UserRecords):
    """Records by client under a unit that may count a client as one, however many records it
    has.
    """

    most_records: int = 1

    @property
    def records_each(self) -> int:
        """As the plan's unit says."""
        return self.most_records

    @property
    def rows_each(self) -> int:
        """Places for the records of a client."""
        return self.tensors[-1].shape[1]


class _Noting:
    """Between rounds, the marked ones leave a row in metrics.jsonl, also where a crash lost it."""

    def __init__(
        self, training: PrivateTraining, aim: Objective, test: RecordSource | None
    ) -> None:
        self._training, self._aim, self._test = training, aim, test
        self._epsilons, self._noted = spent(training.plan), metrics.last_step(training.folder.path)

    def __call__(self) -> None:
        done = self._training.steps_done
        if done > self._noted and done in self._epsilons:
            measured = measure(self._training, self._aim, self._test)
            self._training._note(epsilon=self._epsilons[done], **measured)
        self._noted = max(self._noted, done)


def _gradients(
    training: PrivateTraining, local: LocalTraining, aim: Objective, noting: _Noting
) -> None:
    """One step on all records: the mean loss of each client, times the rate, through the engine."""
    model, rate = training.model, local.learning_rate
    losses_of = aim.losses_of(model)

    def losses(batch: Batch) -> torch.Tensor:
        *fields, real = batch
        each = losses_of(tuple(field.flatten(0, 1) for field in fields))
        means = per_user(each, real, reduction="mean")
        return means if rate == 1 else means * rate

    step = training.captured(losses)
    noting()
    for batch in training.batches():
        step(batch)
        noting()


def _rounds(
    training: PrivateRounds,
    clients: UserRecords,
    local: LocalTraining,
    aim: Objective,
    noting: _Noting,
    arrivals: Arrivals | None,
) -> None:
    """Local training of every cohort."""
    arrivals = arrivals or OwnTimes(round(training.plan.recipe.expected_batch))
    secret = training.folder.randomness
    code = computation.of_function(aim.losses_of(training.model))
    training.computes("local", f"{local} {code} {clients.fingerprint(secret)}")
    held = clients.to(training.device)
    assert isinstance(held, UserRecords)
    updates = LocalUpdates(training.model, held, local, aim, secret)
    noting()
    for cohort in training.cohorts(arrivals):
        cohort.add_all(updates(cohort.step, cohort.clients))
        cohort.close()
        noting()
