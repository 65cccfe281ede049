"""The private training loop: sample, bound, sum, noise, update. Nothing here knows which sampler,
clip, engine or strategy runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType

import torch
from torch import Tensor, nn

from dpfy.core.errors import InvalidInput
from dpfy.core.guarantee import Guarantee
from dpfy.core.unit import varies
from dpfy.core.values import Bounded
from dpfy.data.batch import Batch, leaves
from dpfy.data.given import admitted, as_source, rows_of
from dpfy.data.owners import Owned, stored
from dpfy.data.records import Records
from dpfy.data.split import stated
from dpfy.gradients.checker import check_model
from dpfy.gradients.cuda_graphs.captured import LossesOf
from dpfy.gradients.engine import Grads, no_reentrant_checkpoints, trainable
from dpfy.gradients.engines.choice import choose
from dpfy.isolation.check import IsolationCheck
from dpfy.plan.claim import ForeignBatches
from dpfy.plan.recipe import Plan
from dpfy.runs.run import Run
from dpfy.training import finish, schedulers
from dpfy.training.batches import Batches, Captures, Drawing, GradAccumulator, find_microbatch_size
from dpfy.training.integrity import computation, guard, resume, state
from dpfy.training.integrity.guard import Guard
from dpfy.training.integrity.journal import Journal
from dpfy.training.integrity.publication import Seen
from dpfy.training.integrity.run_state import RunState, RunStatus, leave
from dpfy.training.integrity.settings import Settings
from dpfy.training.integrity.state import TrainState
from dpfy.training.parallel.layout import layout_of, placed, unwrapped
from dpfy.training.parallel.read_only_run import ReadOnlyRun, taken
from dpfy.training.parallel.world import World
from dpfy.training.run import PLAN_ALONE, TrainingClaims, TrainingRun
from dpfy.training.runtime import Runtime
from dpfy.training.schedulers import Schedules
from dpfy.training.step import (
    PrivateStep,
    Rates,
    Update,
    clear_gradients,
    rates_of,
    stream_of,
    swapped,
)
from dpfy.training.validation import (
    check_first,
    check_optimizer,
    check_owners,
    check_part,
    check_parts,
    check_records,
)


class PrivateTraining(RunState):
    """Private training around your own loop, your own model object and any `torch.optim` optimizer.

        with dpfy.PrivateTraining(model, optimizer, train, plan, run="runs/x") as training:
            for x, y in training.batches():
                losses = F.cross_entropy(model(x), y, reduction="none")
                training.step(losses)

    A run that was killed goes on with ``Run(path, resume=True)`` and the same arguments.

    Args:
        model: Your model. It keeps its class and its `state_dict` keys.
        optimizer: Any optimizer of its parameters that takes one gradient for a step.
        train: The private records: tensors, arrays, a dataset, a DataLoader, a `dpfy.Dataset`.
        plan: What is done to them, and with how much noise.
        run: The run folder, a `dpfy.Run`, or None for a new folder under runs/.
        runtime: How a step is computed.
        update: What becomes of the noisy gradient, such as averaging of weights.
        scheduler: A torch scheduler, stepped after each step.
        world: The processes that train together.
        batches: How batches are formed, if not by dpfy. Such a run is charged without
            amplification, in every ledger.
        evaluation: The noise multiplier of a charged evaluation on private held-out records.

    Raises:
        InvalidInput: An argument does not fit its rule.
        Unsupported: The model has a part that mixes examples, or that no rule covers.
        BudgetExceeded: The ledger of the data set has too little left.

    Guarantees: the plan is reserved in the ledger, durably, before `train` is read; each unit adds
    at most the clip bound to each step; every step (also an empty one) is noised and divided by the
    expected batch size; more steps than planned are refused. Every hook is gone when the block is
    left, also by an exception. A resumed run releases the same bits, and one that would release
    others stops. The noise of a step is made for one sum: after an error between noise and the end
    of a step the run goes no further here. Weights, buffers, optimizer and the fields of this
    object are changed by the run alone.

    Example:
        >>> import torch
        >>> import dpfy
        >>> x, y = torch.randn(100, 4), torch.randint(0, 2, (100,))
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> plan = dpfy.dpsgd(records=100, batch_size=20, steps=3).calibrate(3.0, 1e-5)
        >>> with dpfy.PrivateTraining(model, optimizer, (x, y), plan, run="runs/own") as training:
        ...     for inputs, targets in training.batches():
        ...         losses = torch.nn.functional.cross_entropy(
        ...             model(inputs), targets, reduction="none"
        ...         )
        ...         training.step(losses)
        ...     print(training.guarantee().epsilon(1e-5) <= 3.0)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train: object,
        plan: Plan,
        run: str | Path | Run | TrainingRun | ReadOnlyRun | None = None,
        *,
        runtime: Runtime | None = None,
        update: Update | None = None,
        scheduler: object = None,
        world: World | None = None,
        batches: ForeignBatches | None = None,
        evaluation: float | None = None,
    ) -> None:
        self._entered, train = False, admitted(train)
        self.world, self._joined = world or World(), world
        check_parts(model, optimizer, plan)
        model = unwrapped(model)
        check_model(model)
        guard.check_state(model)
        self.model, self.optimizer, self.plan = model, optimizer, plan
        self.runtime, self.rule = runtime or Runtime(), update or Update()
        self.run = run if isinstance(run, TrainingRun | ReadOnlyRun) else Run.of(run)
        self._promised = TrainingClaims(batches, evaluation)
        if isinstance(run, TrainingRun | ReadOnlyRun) and self._promised != PLAN_ALONE:
            rule = "say so when the folder is opened: dpfy.training.TrainingRun(run, plan, batches=...)"
            raise InvalidInput("run", "an opened folder", rule)
        fresh = isinstance(self.run, Run) and not self.run.resume
        check_optimizer(model, optimizer, empty=fresh and not self.rule.public_state)
        check_owners(plan.recipe, train)
        check_records(
            plan.recipe,
            train.records_each if isinstance(train, Records | Owned) else 1,
            rows_of(train),
        )
        self.engine, self.engine_reason = choose(model, self.runtime.engine, sparse=True)
        self._train, self._factors = train, self.rule.factors(plan.recipe.steps)
        self.schedules = Schedules(
            scheduler, optimizer, plan.recipe.steps, ruled=self._factors is not None
        )
        self.settings = Settings(
            optimizer, self.schedules, plan.recipe.steps, ruled=self._factors is not None
        )
        self._state = TrainState(
            0, state.weights_of(model), optimizer, {}, {}, plan.recipe.clip, {}, self.schedules
        )
        self._status = RunStatus()
        self._journal: Journal | None = None
        self._seen = Seen()
        self._asked: object = None
        self._given: Batches | None = None
        self._pieces = None
        self.isolation: IsolationCheck | None = None

    def __repr__(self) -> str:
        done = self.steps_done if self._entered else 0
        return (
            f"private training of a {type(self.model).__name__}, {done:,} of "
            f"{self.plan.recipe.steps:,} steps done, in {self.run.path}\n{self.plan}"
        )

    def __enter__(self) -> PrivateTraining:
        """Reserve the plan in the ledger, then read the data, restore a checkpoint if there is one,
        and attach the engine.
        """
        if self._entered:
            raise InvalidInput("training", "entered twice", "one block at a time")
        self._status, self._pieces, self._journal = RunStatus(), None, None
        self.world = World.joined() if self._joined is None else self._joined
        self.folder: TrainingRun | ReadOnlyRun = self.world.notify_on_error(
            lambda: taken(self.world, self.run, self.plan, self._promised)
        )
        try:
            self._open()
        except BaseException as error:
            self.world.fail(error)
            self._detach()
            self.folder.in_use = False
            self.folder.__exit__(type(error), error, None)
            self.world.close()
            raise
        self._last_save, self._saved = time.monotonic(), -1
        self._entered = True
        self._last = self.last_step
        return self

    def _open(self) -> None:
        """Read the data and make the parts of the run, and the state that it begins or goes on
        with.
        """
        recipe, model, randomness = self.plan.recipe, self.model, self.folder.randomness
        self.device = placed(model, self.runtime.device)
        self.parallel = layout_of(model, self.world)
        self.records = as_source(self._train).to(self.device)
        check_records(recipe, self.records.records_each, stated(self.records))
        check_part(self.folder.part, self.records)
        private: Grads = dict(trainable(model))
        stream = self.parallel.stream(stream_of(self.plan, self.folder), private, recipe.clip)
        self.rates = Rates(rates_of(self.optimizer), self._factors)
        average = MappingProxyType(self.rule.averaging.init(model))
        noise = stream.init(self.parallel.local_shard(private))
        stream.require_lattice(private, recipe.clip.bound.l2)
        snapshot = resume.found(self.folder, self.world)
        held = None if snapshot is None else snapshot.facts["physical"]
        rows = partial(
            find_microbatch_size,
            model,
            self.records,
            self.runtime,
            recipe.expected_batch,
            self.device,
            held,
        )
        self.physical_batch = self.world.exchange("the size of physical batches", rows())[0]
        wanted = self.engine.row_multiple(
            min(recipe.expected_batch, self.physical_batch), self.device
        )
        self.row_multiple = self.physical_batch if self.runtime.padded else wanted
        weights, random = state.weights_of(model), state.generators(self.device)
        first = TrainState(
            0, weights, self.optimizer, average, noise, recipe.clip, random, self.schedules
        )
        self.terms, self._state = resume.opened(self, first, snapshot)
        self._entry = self.steps_done
        self.settings.start(self._entry)
        self._journal = journal = resume.journal_of(self, snapshot)
        self.parallel.attach(self.engine)
        kept = self.folder.secrets / "watch.json"
        self.isolation = IsolationCheck(
            model,
            self.engine,
            self.records,
            randomness,
            recipe.steps,
            kept,
            varies(recipe.sampler.participation),
            keeps=self.world.first,
            alone=self.world.count == 1,
        )
        cut = (self.physical_batch, self.row_multiple, self.parallel.readers)
        self.drawing = Drawing(recipe, randomness, self.records, self.isolation, *cut)
        self._guard = Guard(
            model,
            self.optimizer,
            average,
            stored(self.records),
            self._state.noise,
            self.parallel.aliases,
        )
        self.private_step = PrivateStep(
            self.plan,
            self.folder,
            model,
            stream,
            self.rates,
            self.settings,
            self.rule,
            self._guard,
            journal,
            self._status,
            self.parallel,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Detach everything. A complete run is finished: model and report written, secrets erased.
        Otherwise it can be resumed.
        """
        if self._status.in_fork:
            return
        if error is not None:
            self.world.fail(error)
        if self._given is not None:
            self._given.close()
        self._detach()
        clear_gradients(self.model, self.optimizer)
        try:
            if kind is None and not self.folder.finished:
                self._require_sound()
            if kind is None and self._status.reason is None and self.steps_done == self.last_step:
                self.finish()
            elif not self.folder.finished:
                leave(self, self._status.reason, error)
        finally:
            self._entered = self.folder.in_use = False
            if self._journal is not None:
                self._journal.close()
            self.folder.__exit__(kind, error, trace)
            self.world.close()

    def batches(self) -> Batches:
        """The physical batches of all remaining steps. Follow each by exactly one `step`. Empty
        logical batches are handled inside.

        A batch is what the data gives: the tuple of its fields, or what its collate function makes.
        The length is the number of steps that remain. With `pad`, `graph`, and on a GPU, a batch
        may be filled up with repeats of record 0, which `step` leaves out.
        """
        shown = self.runtime.progress and self.world.first
        self._given = Batches(
            self._remaining(), self.plan, self.last_step, lambda: self.steps_done, shown
        )
        return self._given

    def _remaining(self) -> Iterator[Batch]:
        self._require_live()
        isolation, padded = self._require_sound(), self.row_multiple > 1
        self._asked = mine = object()
        if self._entry:
            schedulers.require_known(self)
        if self.steps_done == self.last_step:
            return
        steps, batches = self.drawing.since(self.steps_done, self.device)
        for pieces in steps:
            self._require_live()
            self._save_if_due()
            self._state = replace(self._state, random=state.generators(self.device))
            self._pieces = GradAccumulator(len(pieces))
            if not pieces:
                isolation.empty(self.steps_done)
                self._update(
                    Bounded(
                        self.parallel.zeros(self._guard.trainable, self.clip),
                        self.clip.bound,
                        self.plan.recipe.unit,
                    )
                )
            for piece in pieces:
                batch = next(batches)
                self._pieces.expect(piece.mask(self.device, padded), len(piece.indices))
                self.parallel.gather_params(piece.step, isolation, piece.place == 0)
                self._seen.batch = leaves(batch)
                isolation.begin(piece.step, self._seen.batch, first=piece.place == 0)
                yield batch
                isolation.pause()
                self._require_live()
                if self._asked is not mine:
                    raise InvalidInput(
                        "batches",
                        "two at a time",
                        "ask for batches() again only when done with the ones before",
                    )
                if self._pieces is not None:
                    self._pieces.require_added()

    def step(self, losses: Tensor) -> None:
        """Clip and add this physical batch; at the end of the logical batch add noise and let the
        optimizer move.

        `losses` holds one loss per row of the batch last handed out, with its graph
        (``reduction="none"``).
        """
        self._require_sound().pause()
        pieces = self._awaited()
        pieces.check_losses(losses)
        first, pieces.waiting = not self._seen, False
        self._seen.add(losses, new=not pieces.total)
        with self._status.stop_on_error():
            with no_reentrant_checkpoints():
                self._require_sound().end(losses, self.steps_done > 0)
            if first:
                check_first(losses)
        self._take(self.engine.bounded_sum(losses, self.clip, pieces.mask))
        self._require_sound().after()

    def captured(self, losses_of: LossesOf) -> Callable[..., None]:
        """A function of a batch that does what ``step(losses_of(*batch))`` does, with
        ``Runtime(graph=True)`` as CUDA graphs.

            step = training.captured(lambda x, y: F.cross_entropy(model(x), y, reduction="none"))
            for batch in training.batches():
                step(*batch)

        What `losses_of` computes must depend on the batch and on the model's weights alone: a graph
        repeats what it did once, with the values that Python had then. The first steps run as
        usual.
        """
        self._require_live()
        fingerprint = self.folder.randomness.tag(
            "losses", computation.of_function(losses_of).encode()
        )
        with self._status.stop_on_error():
            self._state = self._state.computing("losses", fingerprint)
        capture = (
            Captures(self.engine, losses_of)
            if self.runtime.graph and not self.parallel.model_sharded
            else None
        )

        def step(*batch: Batch) -> None:
            if capture is None or self._require_sound().recording:
                self.step(losses_of(*batch))
            else:
                pieces = self._awaited()
                pieces.waiting = False
                self._take(capture(batch, self.clip, pieces.mask), keep=False)

        return step

    def _awaited(self) -> GradAccumulator:
        """The logical batch that a call of `step` belongs to."""
        self._require_live()
        if self._state.step >= self._last:
            raise InvalidInput(
                "step", self.steps_done, f"the plan allows {self._last} steps and all are done"
            )
        if self._pieces is None or not self._pieces.waiting:
            raise InvalidInput(
                "step", "an extra call", "step(losses) follows a batch from batches(), once"
            )
        with self._status.stop_on_error():
            self._guard.check_shape()
        return self._pieces

    def _take(self, part: Bounded[Grads], keep: bool = True) -> None:
        """Add the sum of one physical batch. Without `keep` the next one will overwrite it."""
        assert self._pieces is not None
        self._pieces.add(part.value, keep)
        if self._pieces.complete:
            self._update(Bounded(self._pieces.total, part.bound, self.plan.recipe.unit))

    def guarantee(self) -> Guarantee:
        """The guarantee of the whole reserved plan: it holds from the reservation on, however many
        steps were made.
        """
        self._require_entered()
        return state.guarantee(self)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the model holds the averaged weights (its own, if there is no
        averaging): use it to evaluate.
        """
        self._check_untouched()
        if not self.average:
            yield
            return
        with swapped(self._guard.trainable, self.average, self._guard.restored):
            yield

    def save(self) -> None:
        """Write a checkpoint now. Of several ranks all must call it."""
        self._check_untouched()
        self._save()

    def _save(self) -> None:
        self.parallel.save(
            self.folder.state, self.state.snapshot(self.terms.facts()), self.folder.randomness
        )
        if self._journal is not None:
            self._journal.forget(self.steps_done)
        self._last_save, self._saved = time.monotonic(), self.steps_done

    def finish(
        self,
        utility: dict[str, float] | None = None,
        confusion: list[list[int]] | None = None,
        test: str | None = None,
    ) -> Path:
        """End the run: write model and report, erase the secrets. Returns the folder.

        Ending early keeps the charge of the whole plan, unless the plan says where a run may end
        (`stopping`): then the steps up to the next of these points are charged, and the run cannot
        go on.

        `utility` and `confusion` (rows: true class, columns: predicted) are published as they are.
        With `test="public"` you declare the data that they were measured on public, and the report
        says so ("billed" is for figures of :func:`dpfy.fit`).
        """
        self.require_figures(utility or {}, confusion, test)
        return self.finish_measured(utility or {}, confusion, test or "none")

    def finish_measured(
        self, utility: dict[str, float], confusion: list[list[int]] | None, test: str
    ) -> Path:
        """End the run with figures that the run measured itself; see :meth:`finish`."""
        self._check_untouched()
        self._detach()
        with self._status.stop_on_error():
            finish.write(self, utility, confusion, test)
        self._status.reason = "the run is finished"
        return self.folder.path

    def _update(self, total: Bounded[Grads]) -> None:
        """The logical boundary: make the private step. Only with the next state in hand may the run
        go on.
        """
        self._state, self._pieces = self.private_step(self._state, total), None
        self._status.reason = None

    def _save_if_due(self) -> None:
        """Between two steps, when the caller has asked for the next one: what its loop did after
        the last belongs to the checkpoint.
        """
        due = time.monotonic() - self._last_save >= self.folder.run.checkpoint_every
        if self.world.broadcast_object("the end of a step", lambda: due):
            self.save()

    def _check_untouched(self) -> None:
        """Refuse, and stop, if anything was changed outside of `step`."""
        self._require_live()
        with self._status.stop_on_error():
            self._guard.check()

    def _detach(self) -> None:
        self.engine.detach()
        if self.isolation is not None:
            self.isolation.close()
            self.drawing.close()

    def _require_entered(self) -> None:
        if not self._entered:
            raise InvalidInput(
                "training",
                "not entered",
                "use it as a context: with dpfy.PrivateTraining(...) as training",
            )
        self._require_sound()

    def _require_sound(self) -> IsolationCheck:
        """A refusal ends the run, also where the caller caught it."""
        assert self.isolation is not None
        self.isolation.require_sound()
        return self.isolation

    def _require_live(self) -> None:
        self._require_entered()
        self._status.require_live()
