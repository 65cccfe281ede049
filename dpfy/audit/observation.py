"""Training under audit: the real loop, with canaries in it, watched by an attacker who sees every
update.

Two kinds of canaries. A *table* canary owns one row of an embedding that is added to the user's
model; its gradient is that row and nothing else, through the same engine, clip, sampler and noise
as every other record. A *gradient* canary is any direction in the space of the model's own
parameters, for small models: its loss is linear in them.

The seams, for tests of the audit itself, are here and nowhere else: `Seams` replaces the engine,
the sampler or the noise stream of an entered training, while plan, ledger and claim stay what they
were. No production module knows of them.
"""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dpfy.core import events
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput
from dpfy.core.guarantee import Curve
from dpfy.core.ledger_rules import rehearsal
from dpfy.core.storage import PRIVATE_MODE, append, write_atomically
from dpfy.core.values import Bound, Bounded
from dpfy.data.records import Records
from dpfy.gradients.engine import trainable
from dpfy.gradients.engines.per_user import per_user
from dpfy.noise.stream import NoiseStream
from dpfy.plan.recipe import Plan
from dpfy.runs.mark import UPDATES
from dpfy.training.loop import PrivateTraining
from dpfy.training.run import Run, RunFolder
from dpfy.training.runtime import Runtime

LENGTH = 10.0
"""Canary gradients before clipping, in clip norms: clipping has work to do."""

Array = NDArray[np.float64]
ROW = np.dtype("<f8")


class Seams(Protocol):
    """What to put in place of the engine, the sampler and the noise stream, each given the real
    one; and another number of steps.
    """

    @property
    def engine(self) -> Callable[[Any], Any]: ...
    @property
    def sampler(self) -> Callable[[Any], Any]: ...
    @property
    def stream(self) -> Callable[[Any], Any]: ...
    @property
    def steps(self) -> int | None: ...


class WithCanaries(nn.Module):
    """A model and a table of canaries beside it; row `canaries` of the table is for records that
    are none.
    """

    def __init__(self, model: nn.Module, canaries: int) -> None:
        super().__init__()
        self.model = model
        self.table = nn.Embedding(canaries + 1, 1)
        nn.init.zeros_(self.table.weight)

    def forward(self, features: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """The model's outputs, and the canary's own parameter."""
        return self.model(features), self.table(token)


def claimed_curve(plan: Plan) -> Callable[[float], Curve]:
    """The curve of the plan, by its own accountant, with its noise divided by a factor: what an
    audit measures the leak against.
    """

    def at(strength: float) -> Curve:
        return (
            dataclasses.replace(plan, noise_multiplier=plan.noise_multiplier / strength)
            .guarantee()
            .curve
        )

    return at


def observe_table(
    model: nn.Module,
    real: tuple[Tensor, Tensor],
    plan: Plan,
    weights: NDArray[np.floating[Any]],
    *,
    run: Run | RunFolder | None = None,
    seed: int | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    runtime: Runtime | None = None,
    keep: Callable[[Array], None] | None = None,
) -> Array:
    """Train `model` on `real` records and table canaries by `plan`; what the attacker sees, [steps,
    canaries], in clip norms.

    `weights` holds each canary's gradient in clip norms (before clipping): 0 is out. The plan must
    be for real and canary records together. `keep` is given all of it before the run ends. A run
    that was killed and is resumed goes on with what was seen before.

    Guarantees: the training is :class:`PrivateTraining`, unchanged; its bill is in the ledger of
    `run` like any other.
    """
    wrapped = WithCanaries(model, len(weights))
    features, targets = real
    tokens = torch.full((len(features),), len(weights))
    blank = features.new_zeros(len(weights), *features.shape[1:])
    records = Records(
        (
            torch.cat([features, blank]),
            torch.cat([targets, targets.new_zeros(len(weights), *targets.shape[1:])]),
            torch.cat([tokens, torch.arange(len(weights))]),
        )
    )
    gains = torch.tensor([*weights, 0.0], dtype=torch.float32) * plan.recipe.clip.bound.l2
    mover = (
        optimizer(wrapped)
        if optimizer is not None
        else torch.optim.SGD(wrapped.parameters(), lr=0.05)
    )
    with _folder(run, seed) as place:
        training = PrivateTraining(wrapped, mover, records, plan, place, runtime=runtime)
        diary = _Diary(len(weights))

        def look(training: PrivateTraining) -> None:
            diary.write(training, _released(plan, {"table.weight": wrapped.table.weight})[:-1])

        with watched(training, look, keep=run is not None):
            diary.open(training)
            for x, y, token in training.batches():
                outputs, own = wrapped(x, token)
                losses = functional.cross_entropy(outputs, y, reduction="none")
                training.step(
                    torch.where(token < len(weights), gains[token] * own.squeeze(-1), losses)
                )
            seen = diary.read(plan.recipe.steps)
            if keep is not None:
                keep(seen)
    return seen


class _Diary:
    """What the attacker saw, one row a step, in a file beside the checkpoint: it outlives a crash
    as the checkpoint does.
    """

    def __init__(self, canaries: int) -> None:
        self.size = canaries * ROW.itemsize

    def open(self, training: PrivateTraining) -> None:
        """Begin after the steps that the checkpoint holds; rows of later steps will be written
        again.
        """
        self.file = training.folder.secrets / UPDATES
        before = self.file.read_bytes() if self.file.is_file() else b""
        if len(before) < training.steps_done * self.size:
            raise Corrupt(
                f"checkpoint/{UPDATES}",
                "holds fewer updates than the checkpoint has steps: start a new run",
            )
        write_atomically(self.file, before[: training.steps_done * self.size], mode=PRIVATE_MODE)

    def write(self, training: PrivateTraining, row: Array) -> None:
        append(self.file, row.astype(ROW).tobytes())

    def read(self, steps: int) -> Array:
        rows = np.frombuffer(self.file.read_bytes(), dtype=ROW).reshape(steps, -1)
        return rows.astype(np.float64)


def observe_gradients(
    model: nn.Module,
    rows: Array,
    plan: Plan,
    *,
    seams: Seams | None = None,
    seed: int = 0,
    physical: int = 4096,
    interrupt: int | None = None,
    by: Callable[[Records], object] = lambda records: records,
) -> Array:
    """Run `plan` on records whose gradients are `rows` [records, parameters], in clip norms; the
    noisy sums [steps, parameters].

    `by` arranges the records, by their owners say.

    The whole loop runs: sampler, engine, accumulation over physical batches, noise, divisor. With
    `interrupt`, the run is left after that many steps and resumed from its checkpoint.
    """
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen: dict[int, Array] = {}
    runtime = Runtime(engine="batched", max_physical_batch=physical)
    records = Records((torch.arange(len(rows)),))
    with tempfile.TemporaryDirectory() as folder:
        for leave in [interrupt, None] if interrupt else [None]:
            _reset(model, initial)
            directions = (
                torch.tensor(rows, dtype=next(model.parameters()).dtype) * plan.recipe.clip.bound.l2
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            run = Run(Path(folder) / "run", resume=True, seed=seed, checkpoint_every=1e9)
            training = PrivateTraining(model, optimizer, by(records), plan, run, runtime=runtime)

            def look(t: PrivateTraining) -> None:
                seen[t.steps_done] = _released(plan, trainable(t.model))

            with watched(training, look, keep=False), seamed(training, seams):
                for index, *real in training.batches():
                    flat = torch.cat([p.reshape(-1) for p in trainable(model).values()])
                    losses = functional.linear(directions[index.flatten()], flat[None]).squeeze(1)
                    training.step(per_user(losses, *real) if real else losses)
                    if leave is not None and training.steps_done >= leave:
                        break
    _reset(model, initial)
    return np.array([seen[step] for step in sorted(seen)])


def observe_error(
    model: nn.Module,
    rows: tuple[Array, Array],
    plan: Plan,
    then: Callable[[PrivateTraining], object],
) -> list[tuple[int, Array]]:
    """What is released, (step, noisy sum), when step 1 fails behind its noise and the loop, after
    `then`, goes on with other rows.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        _rows_of(model, rows[0], plan, Path(folder)) as attempt,
    ):
        with suppress(_Discarded):
            attempt.all(fail=1)
        then(attempt.training)
        attempt.rows = rows[1]
        with suppress(DpfyError):
            attempt.all()
        raise _Discarded
    return attempt.seen


def observe_crash(
    model: nn.Module,
    rows: tuple[Array, Array],
    plan: Plan,
    entered: Callable[[PrivateTraining], object],
) -> list[tuple[int, Array]]:
    """The same when the process dies at step 3 and the run is resumed with other rows; `entered` is
    given the resumed training first.
    """
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        with _rows_of(model, rows[0], plan, Path(folder)) as attempt, suppress(_Discarded):
            attempt.all(fail=3)
        _reset(model, initial)
        with suppress(DpfyError), _rows_of(model, rows[1], plan, Path(folder)) as again:
            entered(again.training)
            again.seen = attempt.seen
            again.all()
    _reset(model, initial)
    return attempt.seen


def observe_write(
    model: nn.Module,
    rows: Array,
    plan: Plan,
    entered: Callable[[PrivateTraining], object],
    write: Callable[[PrivateTraining], object],
) -> int:
    """How many steps a training makes after `write` was done to it between steps 1 and 2; `entered`
    is given it first.
    """
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    with (
        tempfile.TemporaryDirectory() as folder,
        suppress(DpfyError),
        _rows_of(model, rows, plan, Path(folder)) as attempt,
    ):
        entered(attempt.training)
        attempt.all(between=lambda training: write(training) if training.steps_done == 2 else None)
    _reset(model, initial)
    return attempt.training.steps_done - 2


class _Attempt:
    """A training on records with given gradients, of which every release is kept."""

    def __init__(self, training: PrivateTraining, rows: Array) -> None:
        self.training, self.rows, self.fail = training, rows, -1
        self.seen: list[tuple[int, Array]] = []

    def look(self, training: PrivateTraining) -> None:
        """Keep a release; fail behind the noise where asked."""
        self.seen.append((training.steps_done, _released(training.plan, trainable(training.model))))
        if training.steps_done == self.fail:
            raise _Discarded

    def all(
        self, fail: int = -1, between: Callable[[PrivateTraining], object] = lambda training: None
    ) -> None:
        """Make all steps that are left."""
        self.fail, model = fail, self.training.model
        directions = (
            torch.tensor(self.rows, dtype=next(model.parameters()).dtype)
            * self.training.plan.recipe.clip.bound.l2
        )
        for (index,) in self.training.batches():
            between(self.training)
            flat = torch.cat([p.reshape(-1) for p in trainable(model).values()])
            self.training.step(functional.linear(directions[index], flat[None]).squeeze(1))


@contextmanager
def _rows_of(model: nn.Module, rows: Array, plan: Plan, folder: Path) -> Iterator[_Attempt]:
    run = Run(folder / "run", resume=True, seed=7, checkpoint_every=1e9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    records = Records((torch.arange(len(rows)),))
    training = PrivateTraining(
        model,
        optimizer,
        records,
        plan,
        run,
        runtime=Runtime(engine="batched", max_physical_batch=64),
    )
    attempt = _Attempt(training, rows)
    with watched(training, attempt.look, keep=False):
        yield attempt


def observe_stream(stream: NoiseStream, contributions: Array) -> Array:
    """What a noise stream by itself releases, [steps, canaries], for bounded sums `contributions`
    in clip norms, one step a row.
    """
    permit = rehearsal(stream.event or events.NotPrivate(), len(contributions))
    state = stream.init({"canaries": torch.zeros(contributions.shape[1], dtype=torch.float64)})
    seen = []
    for step, row in enumerate(contributions):
        total = Bounded({"canaries": torch.tensor(row, dtype=torch.float64)}, Bound(1.0))
        released, state = stream.release(total, step, state, permit)
        seen.append(released.value["canaries"].numpy())
    return np.array(seen)


@contextmanager
def seamed(training: PrivateTraining, seams: Seams | None) -> Iterator[None]:
    """Inside the block, parts of an entered training are replaced. The claim (plan, ledger, card)
    is restored before it ends.
    """
    if seams is None:
        yield
        return
    claimed, recipe = training.plan, training.plan.recipe
    training.engine.detach()
    _set(training, "engine", seams.engine(training.engine))
    training.engine.attach(training.model)
    sampler = seams.sampler(recipe.sampler)
    changed = dataclasses.replace(recipe, sampler=sampler, steps=seams.steps or recipe.steps)
    plan, real = dataclasses.replace(claimed, recipe=changed), training.private_step
    _set(training, "plan", plan)
    _set(training, "drawing", dataclasses.replace(training.drawing, recipe=changed))
    _set(
        training,
        "private_step",
        dataclasses.replace(real, plan=plan, stream=seams.stream(real.stream)),
    )
    try:
        yield
    finally:
        _set(training, "plan", claimed)


def _set(training: PrivateTraining, name: str, value: object) -> None:
    """Past the lock on the fields of a run."""
    object.__setattr__(training, name, value)


@contextmanager
def _quiet(wanted: bool) -> Iterator[None]:
    """Without the word about an unfinished run, where nobody wants its folder."""
    with warnings.catch_warnings():
        if wanted:
            warnings.filterwarnings("ignore", "run .* unfinished")
        yield


class _Discarded(Exception):
    """Leaves a training whose folder nobody wants."""


@contextmanager
def watched(
    training: PrivateTraining, look: Callable[[PrivateTraining], None], *, keep: bool = True
) -> Iterator[PrivateTraining]:
    """Enter the training, and call `look` with every update, when the gradients are in place and
    the optimizer is about to move.

    Without `keep`, the run is left without a card once all its steps are made: for runs in
    temporary folders.
    """
    handle = training.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: look(training)
    )
    try:
        with suppress(_Discarded), _quiet(not keep), training:
            yield training
            if not keep and training.steps_done >= training.plan.recipe.steps:
                raise _Discarded
    finally:
        handle.remove()


def _released(plan: Plan, parameters: Mapping[str, Tensor]) -> Array:
    """The noisy sum that the update shows, in clip norms. The divisor is the planned one: another
    one would show.
    """
    flat = torch.cat(
        [p.grad.detach().reshape(-1) for p in parameters.values() if p.grad is not None]
    )
    if flat.numel() != sum(p.numel() for p in parameters.values()):
        raise InvalidInput(
            "update",
            "a parameter without a gradient",
            "every trainable parameter is released at every step",
        )
    return flat.double().numpy() * (plan.recipe.expected_batch / plan.recipe.clip.bound.l2)


@torch.no_grad()
def _reset(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        p.copy_(values[name])


@contextmanager
def _folder(run: Run | RunFolder | None, seed: int | None) -> Iterator[Run | RunFolder]:
    if run is not None:
        yield run
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Run(Path(folder) / "run", seed=seed, checkpoint_every=1e9)
