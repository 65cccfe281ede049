"""Training under audit: the real loop, with canaries in it, watched by an attacker who sees every
update.

A canary owns one row of an embedding that is added to the user's model; its gradient is that row
and nothing else, through the same engine, clip, sampler and noise as every other record.

A noise stream under audit by itself: which plan or matrix is claimed, and what an attacker sees
of canaries in it.
"""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dpfy.core import check, events
from dpfy.core.errors import Corrupt, InvalidInput, Unsupported
from dpfy.core.guarantee import Curve
from dpfy.core.randomness import Randomness
from dpfy.core.storage import PRIVATE_MODE, append, write_atomically
from dpfy.core.unit import FixedOrder
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.data.records import Records
from dpfy.noise.strategy import Identity
from dpfy.noise.stream import NoiseStream
from dpfy.noise.toeplitz import square_root_banded
from dpfy.plan.recipe import Plan, dpsgd
from dpfy.runs.mark import UPDATES
from dpfy.runs.run import Run
from dpfy.training.loop import PrivateTraining
from dpfy.training.run import TrainingRun
from dpfy.training.runtime import Runtime

LENGTH = 10.0
"""Canary gradients before clipping, in clip norms: clipping has work to do."""

Array = NDArray[np.float64]
ROW = np.dtype("<f8")


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
    run: Run | TrainingRun | None = None,
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

    Guarantees: the training is :class:`PrivateTraining`, unchanged; its charge is in the ledger of
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
            diary.write(training, noisy_sum(plan, {"table.weight": wrapped.table.weight})[:-1])

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


def observe_stream(stream: NoiseStream, contributions: Array) -> Array:
    """What a noise stream by itself releases, [steps, canaries], for bounded sums `contributions`
    in clip norms, one step a row.
    """
    permit = mock_permit(stream.event or events.NotPrivate(), len(contributions))
    state = stream.init({"canaries": torch.zeros(contributions.shape[1], dtype=torch.float64)})
    seen = []
    for step, row in enumerate(contributions):
        total = Bounded({"canaries": torch.tensor(row, dtype=torch.float64)}, Bound(1.0))
        released, state = stream.release(total, step, state, permit)
        seen.append(released.value["canaries"].numpy())
    return np.array(seen)


@contextmanager
def _quiet(wanted: bool) -> Iterator[None]:
    """Without the word about an unfinished run, where nobody wants its folder."""
    with warnings.catch_warnings():
        if wanted:
            warnings.filterwarnings("ignore", "run .* unfinished")
        yield


class Discarded(Exception):
    """Leaves a training whose folder nobody wants."""


@contextmanager
def watched(
    training: PrivateTraining, look: Callable[[PrivateTraining], None], *, keep: bool = True
) -> Iterator[PrivateTraining]:
    """Enter the training, and call `look` with every update, when the gradients are in place and
    the optimizer is about to move.

    Without `keep`, the run is left without a report once all its steps are made: for runs in
    temporary folders.
    """
    handle = training.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: look(training)
    )
    try:
        with suppress(Discarded), _quiet(not keep), training:
            yield training
            if not keep and training.steps_done >= training.plan.recipe.steps:
                raise Discarded
    finally:
        handle.remove()


def noisy_sum(plan: Plan, parameters: Mapping[str, Tensor]) -> Array:
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


@contextmanager
def _folder(run: Run | TrainingRun | None, seed: int | None) -> Iterator[Run | TrainingRun]:
    if run is not None:
        yield run
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Run(Path(folder) / "run", seed=seed, checkpoint_every=1e9)


MOST_STEPS = 4096
MOST_SEEN = 2**25
"""Numbers that the attacker sees, one for each canary and step: they must fit in memory several
times.
"""


@dataclass(frozen=True)
class StreamFacts:
    """What is claimed: independent noise under Poisson sampling, or banded noise with one
    participation an epoch.
    """

    noise_multiplier: float
    rate: float = 1.0
    steps: int = 16
    epochs: int = 1
    bands: int = 1
    delta: float = 1e-5

    def __post_init__(self) -> None:
        check.noise_multiplier(
            "noise_multiplier", check.positive("noise_multiplier", self.noise_multiplier)
        )
        check.sampling_rate("sampling_rate", check.rate("sampling_rate", self.rate))
        check.integer("steps", self.steps, most=MOST_STEPS)
        check.integer("bands", self.bands, most=self.steps)
        check.delta("delta", self.delta)
        if self.steps % check.integer("epochs", self.epochs):
            raise InvalidInput(
                "epochs", self.epochs, f"must divide the number of steps ({self.steps})"
            )
        if self.bands > 1 and self.rate < 1:
            raise Unsupported(
                "auditing banded noise with sampling",
                "use sampling rate 1: a unit takes part once an epoch",
            )


@dataclass(frozen=True, repr=False)
class StreamSeen:
    """What the attacker saw, [steps, canaries] with the coins, the noise alone, and what is needed
    to judge it.

    For correlated noise `encoder` and `pattern` whiten it, and the claim is Gaussian with ratio 1 /
    noise multiplier; else `curve` is the claimed curve by strength.
    """

    facts: StreamFacts
    included: NDArray[np.bool_]
    projections: Array
    alone: Array
    scale: float
    encoder: Array | None = None
    pattern: Array | None = None
    curve: Callable[[float], Curve] | None = None


def audited(facts: StreamFacts, canaries: int, seed: int | None = None) -> StreamSeen:
    """Draw coins, run the stream on the canaries' bounded sums and once on nothing."""
    randomness = Randomness.from_os() if seed is None else Randomness.for_tests(seed)
    rng = randomness.generator("audit coins", 0)
    if check.integer("canaries", canaries, least=10, most=MOST_SEEN) * facts.steps > MOST_SEEN:
        raise InvalidInput(
            "canaries",
            canaries,
            f"times the number of steps ({facts.steps}) must be at most {MOST_SEEN}",
        )
    coins = rng.integers(2, size=canaries).astype(bool)
    return (
        _correlated(facts, coins, randomness)
        if facts.bands > 1
        else _independent(facts, coins, randomness)
    )


def _independent(
    facts: StreamFacts, coins: NDArray[np.bool_], randomness: Randomness
) -> StreamSeen:
    plan = dpsgd(10**6, facts.rate * 10**6, steps=facts.steps).with_noise(
        facts.noise_multiplier, delta=facts.delta, allow_large_delta=True
    )
    there = np.zeros((facts.steps, len(coins)))
    for step in range(facts.steps):
        rng = randomness.generator("sampling", step)
        there[step, plan.recipe.sampler.batch(step, records=len(coins), rng=rng)] = 1.0
    stream = NoiseStream(Identity(), plan.scale, randomness)
    seen, alone = observe_stream(stream, there * coins), observe_stream(_other(stream), 0 * there)
    return StreamSeen(facts, coins, seen, alone, plan.scale, curve=claimed_curve(plan))


def _correlated(facts: StreamFacts, coins: NDArray[np.bool_], randomness: Randomness) -> StreamSeen:
    strategy = square_root_banded(facts.bands)
    participation = FixedOrder(facts.steps // facts.epochs, facts.epochs)
    scale = facts.noise_multiplier * strategy.sensitivity(participation, facts.steps)
    pattern = np.zeros(facts.steps)
    pattern[:: facts.steps // facts.epochs] = 1.0
    stream = NoiseStream(strategy, scale, randomness)
    seen = observe_stream(stream, pattern[:, None] * coins)
    encoder = strategy.encoder(facts.steps)
    alone = encoder @ observe_stream(_other(stream), np.zeros((facts.steps, len(coins))))
    return StreamSeen(facts, coins, seen, alone, scale, encoder, pattern)


def _other(stream: NoiseStream) -> NoiseStream:
    """The same stream with draws of its own."""
    return NoiseStream(stream.strategy, stream.scale, stream.randomness, "noise alone")
