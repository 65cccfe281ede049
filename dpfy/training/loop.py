"""The private training loop: sample, bound, sum, noise, update. Nothing here knows which sampler, clip, engine or strategy runs."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from dpfy.core.errors import Busy, InvalidInput, Unsupported
from dpfy.core.guarantee import Guarantee
from dpfy.core.values import Bounded
from dpfy.data.records import Records, as_records, rows_of
from dpfy.gradients.captured import CapturedSum, LossesOf
from dpfy.gradients.checker import check_model
from dpfy.gradients.clip import Clip
from dpfy.gradients.engine import Grads, zeros
from dpfy.gradients.select import choose
from dpfy.noise.stream import NoiseStream
from dpfy.plan.recipe import Plan
from dpfy.training import computation, finish, guard, metrics, progress, public, state
from dpfy.training.averaging import swapped
from dpfy.training.guard import Guard
from dpfy.training.journal import Journal
from dpfy.training.physical import largest_batch, snug
from dpfy.training.run import Run, RunFolder
from dpfy.training.runtime import Runtime
from dpfy.training.update import Update, check_optimizer, hand_over, rounded
from dpfy.training.watch import Watch


class PrivateTraining:
    """Private training around your own loop, your own model object and any `torch.optim` optimizer.

        with dpfy.PrivateTraining(model, optimizer, train, plan, run="runs/x") as training:
            for x, y in training.batches():
                losses = F.cross_entropy(model(x), y, reduction="none")
                training.step(losses)

    Guarantees: the plan is reserved in the ledger, durably, before `train` is read; each unit adds at most the clip bound to each
    step; every step (also an empty one) is noised and divided by the expected batch size; more steps than planned are refused. The
    model keeps its class and its `state_dict` keys, and every hook is gone when the block is left, also by an exception. A run that
    was killed and is entered again with ``Run(path, resume=True)`` and the same arguments releases the same bits, and one that would
    release others stops. The noise of a step is made for one sum: after an error between noise and the end of a step the run goes no
    further here. Weights, buffers, optimizer and the fields of this object are changed by the run alone.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train: object,
        plan: Plan,
        run: str | Path | Run | RunFolder | None = None,
        *,
        runtime: Runtime | None = None,
        update: Update | None = None,
    ) -> None:
        self._entered = False
        check_model(model)
        guard.check_state(model)
        self.model, self.optimizer, self.plan = model, optimizer, plan
        self.runtime = runtime or Runtime()
        self.rule = update or Update()
        self.run = run if isinstance(run, Run | RunFolder) else Run(run if run is not None else state.fresh_path())
        fresh = isinstance(self.run, Run) and not self.run.resume
        check_optimizer(model, optimizer, empty=fresh and not self.rule.public_state)
        self._check_records(train.rows_each if isinstance(train, Records) else 1, rows_of(train))
        self.engine, self.engine_reason = choose(model, self.runtime.engine)
        self.identity: dict[str, Any] = {}
        self._factors = self.rule.factors(plan.recipe.steps)
        self._rates_made: list[tuple[int, list[float]]] = []
        self._recorded: set[str] = set()
        self._computed: dict[str, str] = {}
        self._sealed: dict[str, str] = {}
        self._steps_done = 0
        self._train = train
        self._stopped: str | None = None
        self._journal: Journal | None = None
        self._losses: Tensor | None = None
        self._asked: object = None
        self._pieces: _Pieces | None = None
        self.watch: Watch | None = None

    @property
    def steps_done(self) -> int:
        """The steps made so far."""
        return self._steps_done

    @property
    def clip(self) -> Clip:
        """The clip rule of the next step."""
        return self._clip

    def __setattr__(self, name: str, value: object) -> None:
        """The fields of a run that was entered are read-only."""
        if not name.startswith("_") and (self.__dict__.get("_entered") or name in ("clip", "steps_done")):
            raise InvalidInput(f"training.{name}", type(value).__name__, "is read-only: the plan says what a run does")
        object.__setattr__(self, name, value)

    def __reduce_ex__(self, protocol: object) -> Any:
        """No copies: each would make the noise of the same steps for sums of its own."""
        raise Unsupported("a copy of a private training", "copy the model, or begin another run")

    def __enter__(self) -> PrivateTraining:
        """Reserve the plan in the ledger, then read the data, restore a checkpoint if there is one, and attach the engine."""
        if self._entered:
            raise InvalidInput("training", "entered twice", "one block at a time")
        self._stopped, self._pieces = None, None
        self.folder = self.run if isinstance(self.run, RunFolder) else RunFolder(self.run, self.plan)
        if self.folder.in_use:
            raise Busy(f"run {self.run_path.name}: another training is using it; wait for it to end or choose another folder")
        self.folder.in_use = True
        try:
            self.device = torch.device(self.runtime.device or next(self.model.parameters()).device)
            self.model.to(self.device)
            self.records = as_records(self._train).to(self.device)
            self._check_records(self.records.rows_each, len(self.records))
            self._noise = self._stream()
            self.average = MappingProxyType(self.rule.averaging.init(self.model))
            private: dict[str, Tensor] = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
            self._noise_state = self._noise.init(private)
            self._noise.require_lattice(private, self.plan.recipe.clip.bound.l2)
            self.physical_batch = self._physical_batch()
            self._clip = self.plan.recipe.clip
            self._base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
            state.restore_or_begin(self)
            self.row_multiple = self._row_multiple()
            self._journal = Journal(self.folder.secrets, self.folder.randomness, self.steps_done)
            self._random = state.generators(self.device)
            self.engine.attach(self.model)
            self.watch = self._watch()
            self._guard = Guard(self.model, self.optimizer, self.average, self.records.tensors)
        except BaseException as error:
            self._detach()
            self.folder.in_use = False
            self.folder.__exit__(type(error), error, None)
            raise
        self._last_save = time.monotonic()
        self._entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Detach everything. A complete run is finished: model and card written, secrets erased. Otherwise it can be resumed."""
        self._detach()
        _clear_gradients(self.model, self.optimizer)
        try:
            if kind is None and not self.folder.finished:
                self._require_sound()
            if kind is None and self._stopped is None and self.steps_done == self.plan.recipe.steps:
                self.finish()
            elif not self.folder.finished:
                self._leave(error)
        finally:
            self._entered = self.folder.in_use = False
            if self._journal is not None:
                self._journal.close()
            self.folder.__exit__(kind, error, trace)

    def _leave(self, error: BaseException | None) -> None:
        """Leave an unfinished run, with a checkpoint of where it is unless it was stopped, and say how to go on."""
        if isinstance(error, Exception) and not self.folder.begun:
            return
        unsaved = self._stopped
        try:
            if unsaved is None:
                self.save()
        except Exception as problem:
            if error is None:
                raise
            unsaved = str(problem)
        words = (
            f"run {self.run_path}: unfinished, {self.steps_done} of {self.plan.recipe.steps} steps made; its secrets are kept in "
        )
        words += f"its checkpoint folder; {RESUME}" + (f" (from its last checkpoint: {unsaved})" if unsaved else "")
        if error is None:
            warnings.warn(words, stacklevel=3)
        else:
            error.add_note(words)

    def batches(self) -> Iterator[tuple[Tensor, ...]]:
        """The physical batches of all remaining steps. Follow each by exactly one `step`. Empty logical batches are handled inside.

        With `pad`, `graph`, and on a GPU, a batch may be filled up with repeats of record 0, which `step` leaves out of the sum.
        """
        self._require_live()
        with progress.bar(self.plan, self.steps_done, self.runtime.progress) as show:
            for batch in self._remaining():
                yield batch
                show(self.steps_done)
            show(self.steps_done)

    def _remaining(self) -> Iterator[tuple[Tensor, ...]]:
        recipe, grain, watch = self.plan.recipe, self.row_multiple, self._require_sound()
        self._asked = mine = object()
        while self.steps_done < recipe.steps:
            self._require_live()
            step, self._random = self.steps_done, state.generators(self.device)
            rng = self.folder.randomness.generator("sampling", recipe.sampler.address(step))
            indices = recipe.sampler.batch(step, records=len(self.records), rng=rng)
            pieces = watch.pieces(step, indices, self.physical_batch, grain)
            self._pieces = _Pieces(len(pieces))
            if not pieces:
                self._update(Bounded(zeros(self._guard.trainable, self.clip), self.clip.bound, recipe.unit))
            for place, (piece, mask) in enumerate(pieces):
                batch = self.records.take(torch.from_numpy(piece).to(self.device))
                needed = grain > 1 or not mask.all()
                self._pieces.expect(torch.from_numpy(mask).to(self.device) if needed else None, len(piece))
                watch.begin(step, batch, first=place == 0)
                yield batch
                self._require_live()
                if self._asked is not mine:
                    raise InvalidInput("batches", "two at a time", "ask for batches() again only when done with the ones before")
                if self._pieces is not None and not self._pieces.idle:
                    raise InvalidInput("step", "no call", "every batch must be followed by exactly one step(losses)")

    def step(self, losses: Tensor) -> None:
        """Clip and add this physical batch; at the end of the logical batch add noise and let the optimizer move.

        `losses` holds one loss per row of the batch last handed out, with its graph (``reduction="none"``).
        """
        pieces = self._awaited()
        _check_losses(losses, pieces.rows)
        pieces.waiting, self._losses = False, losses.detach()
        with self._final():
            self._require_sound().end(losses, self.steps_done > 0)
        self._take(self.engine.bounded_sum(losses, self.clip, pieces.mask))

    def captured(self, losses_of: LossesOf) -> Callable[..., None]:
        """A function of a batch that does what ``step(losses_of(*batch))`` does, with ``Runtime(graph=True)`` as CUDA graphs.

            step = training.captured(lambda x, y: F.cross_entropy(model(x), y, reduction="none"))
            for batch in training.batches():
                step(*batch)

        What `losses_of` computes must depend on the batch and on the model's weights alone: a graph repeats what it did once, with
        the values that Python had then. The first steps run as usual.
        """
        self._require_live()
        self._same_as_before("losses", self.folder.randomness.tag("losses", computation.of_function(losses_of).encode()))
        capture = CapturedSum(self.engine, losses_of) if self.runtime.graph else None

        def step(*batch: Tensor) -> None:
            if capture is None or self._require_sound().looking:
                self.step(losses_of(*batch))
            else:
                pieces = self._awaited()
                pieces.waiting = False
                self._take(capture(batch, self.clip, pieces.mask), keep=False)

        return step

    def _awaited(self) -> _Pieces:
        """The logical batch that a call of `step` belongs to."""
        self._require_live()
        if self.steps_done >= self.plan.recipe.steps:
            raise InvalidInput("step", self.steps_done, f"the plan allows {self.plan.recipe.steps} steps and all are done")
        if self._pieces is None or not self._pieces.waiting:
            raise InvalidInput("step", "an extra call", "step(losses) follows a batch from batches(), once")
        with self._final():
            self._guard.check_shape()
        return self._pieces

    def _take(self, part: Bounded[Grads], keep: bool = True) -> None:
        """Add the sum of one physical batch. Without `keep` the next one will overwrite it."""
        assert self._pieces is not None
        self._pieces.add(part.value, keep)
        if self._pieces.complete:
            self._update(Bounded(self._pieces.total, part.bound, self.plan.recipe.unit))

    def guarantee(self) -> Guarantee:
        """The guarantee of the whole reserved plan: it holds from the reservation on, however many steps were made."""
        self._require_entered()
        return state.guarantee(self)

    def record(self, **values: float) -> None:
        """Append a row to metrics.jsonl. Only what may be published belongs there: nothing computed from the training data.

        The card names the values, as stated by the caller to be public. Losses of the batch are refused where they are recognised.
        """
        self._require_live()
        for name, value in values.items():
            public.check_number(f"record {name}", value, self._losses)
        self._recorded |= values.keys()
        self._note(**values)

    def _note(self, **values: float) -> None:
        metrics.append(self.folder.path, {"step": self.steps_done, **values})

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the model holds the averaged weights (its own, if there is no averaging): use it to evaluate."""
        self._check_untouched()
        if not self.average:
            yield
            return
        with swapped(self._guard.trainable, self.average, self._guard.restored):
            yield

    def save(self) -> None:
        """Write a checkpoint now."""
        self._check_untouched()
        state.save(self)

    def finish(
        self, utility: dict[str, float] | None = None, confusion: list[list[int]] | None = None, test: str | None = None
    ) -> Path:
        """End the run: write model and card, erase the secrets. Ending early keeps the bill of the whole plan. Returns the folder.

        `utility` and `confusion` (rows: true class, columns: predicted) are published as they are. Who gives them declares the data
        they were measured on public, and the card says so; `test` is for those who released them with a bill (:func:`dpfy.fit`).
        """
        self._check_untouched()
        self._detach()
        with self._final():
            finish.write(self, utility or {}, confusion, test or ("public" if utility or confusion else "none"))
        self._stopped = "the run is finished"
        return self.folder.path

    def _update(self, total: Bounded[Grads]) -> None:
        """Noise, divide by the expected batch size, step: the logical boundary.

        Guarantees: noise is made once the step's sum is bound in the journal, for a model that nobody else has changed. From then to
        the end of the step the run counts as stopped, so that no error, wherever it comes from, lets the step be made again here.
        """
        assert self._journal is not None
        step, recipe = self.steps_done, self.plan.recipe
        parameters = self._guard.trainable
        with self._final():
            self._guard.check()
            rates = self._rates(step)
            self._journal.bind(step, total.value, rates)
        self.folder.note_begun()
        self._stopped = f"step {step} failed after its noise was made"
        into = rounded(total.value, parameters)
        released, self._noise_state = self._noise.release(total, step, self._noise_state, self.folder.permit, into)
        self._clip = self._clip.after(released.value, recipe.expected_batch)
        hand_over(released, parameters)
        for p in self._guard.frozen:
            p.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.rule.project is not None:
            with torch.no_grad():
                self.rule.project(self.model)
        self.rule.averaging.update(self.average, parameters, step)
        self._guard.accept(look=guard.looks(step + 1, recipe.steps, self.folder.randomness))
        if self._factors is None and (not self._rates_made or self._rates_made[-1][1] != rates):
            self._rates_made.append((step, rates))
        self._steps_done, self._pieces = step + 1, None
        self._stopped = None
        if time.monotonic() - self._last_save >= self.folder.run.checkpoint_every:
            state.save(self)
            self._last_save = time.monotonic()

    def _rates(self, step: int) -> list[float]:
        """The learning rates of a step, by the schedule or as the caller has set them."""
        if self._factors is not None:
            for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
                group["lr"] = base * self._factors[step]
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        if not all(map(math.isfinite, rates)):
            raise InvalidInput("learning rate", rates, "must be a finite number")
        return rates

    @contextmanager
    def _final(self) -> Iterator[None]:
        """Whatever is refused inside stops the run for good: who catches the refusal cannot go on."""
        try:
            yield
        except BaseException as error:
            self._stopped = str(error) or type(error).__name__
            raise

    def _same_as_before(self, what: str, fingerprint: str) -> None:
        """Stop a resumed run whose `what` is not the one that earlier steps were made with."""
        if self._computed.setdefault(what, fingerprint) != fingerprint:
            with self._final():
                raise InvalidInput(f"resume {what}", f"other {what}", "must be what the run was started with")

    def _check_untouched(self) -> None:
        """Refuse, and stop, if anything was changed outside of `step`."""
        self._require_live()
        with self._final():
            self._guard.check()

    def _stream(self) -> NoiseStream:
        recipe = self.plan.recipe
        return NoiseStream(recipe.strategy, self.plan.scale, self.folder.randomness, divisor=recipe.expected_batch, in_place=True)

    def _physical_batch(self) -> int:
        most = self.runtime.max_physical_batch
        if not isinstance(most, int):
            most = max(1, largest_batch(self.model, self.records.flat, self.device) // self.records.rows_each)
        return min(most, snug(self.plan.recipe.expected_batch)) if self.runtime.graph else most

    def _row_multiple(self) -> int:
        """Rows that physical batches are filled up to a multiple of."""
        if self.runtime.padded:
            return self.physical_batch
        return self.engine.row_multiple(min(self.plan.recipe.expected_batch, self.physical_batch), self.device)

    def _check_records(self, held: int, found: int | None) -> None:
        most, expected = self.plan.recipe.unit.most_records, self.plan.recipe.records
        if most != held:
            rule = f"the plan's unit owns up to {most}; group the data with dpfy.by_user and give its unit to the recipe"
            raise InvalidInput("train", f"{held} records in a row", rule)
        if found is not None and abs(found - expected) > max(1, expected // 100):
            raise InvalidInput("train", f"{found} records", f"the plan was made for {expected}; make a plan for this data")

    def _watch(self) -> Watch:
        randomness, file = self.folder.randomness, self.folder.secrets / "watch.json"
        return Watch(self.model, self.engine, self.records, randomness, self.plan.recipe.steps, file)

    def _detach(self) -> None:
        self.engine.detach()
        if self.watch is not None:
            self.watch.close()

    def _require_entered(self) -> None:
        if not self._entered:
            raise InvalidInput("training", "not entered", "use it as a context: with dpfy.PrivateTraining(...) as training")
        self._require_sound()

    def _require_sound(self) -> Watch:
        """A refusal ends the run, also where the caller caught it."""
        assert self.watch is not None
        self.watch.require_sound()
        return self.watch

    def _require_live(self) -> None:
        self._require_entered()
        if self._stopped is not None:
            raise Unsupported(f"going on with a run that stopped ({self._stopped})", f"leave the block; {RESUME}")

    @property
    def run_path(self) -> Path:
        """The folder of the run."""
        return self.run.path if isinstance(self.run, RunFolder) else Path(self.run.path)


RESUME = "resume it with Run(path, resume=True) (dpfy train --resume), the same code and the same arguments"


class _Pieces:
    """The logical batch under way: which piece is out and waits for its losses, whether it was added, and the sum so far."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.waiting = False
        self.idle = True
        self.rows = 0
        self.mask: Tensor | None = None
        self.total: Grads = {}

    def expect(self, mask: Tensor | None, rows: int) -> None:
        self.mask, self.rows, self.waiting, self.idle = mask, rows, True, False

    def add(self, part: Grads, keep: bool = True) -> None:
        if self.total:
            torch._foreach_add_([self.total[name] for name in part], list(part.values()))
        else:
            copy = not keep and self.left > 1
            self.total = {name: value.clone() if copy else value for name, value in part.items()}
        self.left -= 1
        self.idle = True

    @property
    def complete(self) -> bool:
        return self.left == 0


def _check_losses(losses: Tensor, rows: int) -> None:
    if not isinstance(losses, Tensor) or losses.dim() == 0:
        raise InvalidInput("losses", "a scalar", 'must hold one loss per example: compute the loss with reduction="none"')
    if losses.shape != (rows,):
        raise InvalidInput(
            "losses", f"shape {tuple(losses.shape)}", f"must have shape ({rows},): one loss per example of the batch"
        )
    if not losses.requires_grad:
        raise InvalidInput("losses", "no graph", "must depend on the model's trainable parameters")


def _clear_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """No gradient that was not released may reach the optimizer."""
    for p in (*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])):
        p.grad = None
