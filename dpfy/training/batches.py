"""The physical batches of a run: which records each step takes, how many fit in memory at once, in
what order they go out, and the sum over those of one step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, tee
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bounded
from dpfy.data.batch import Batch, Draw, Look
from dpfy.data.lazy import LazyRecords, RecordSource
from dpfy.data.owners import DrawnRecords
from dpfy.gradients.clip import Clip
from dpfy.gradients.cuda_graphs.captured import CapturedSum, LossesOf
from dpfy.gradients.engine import Grads
from dpfy.isolation.check import IsolationCheck
from dpfy.isolation.inspection import Inspected, Mixing, secret_steps
from dpfy.plan.recipe import Plan, Recipe
from dpfy.training import metrics
from dpfy.training.parallel.world import World
from dpfy.training.runtime import Runtime


@dataclass(frozen=True, repr=False)
class Piece:
    """One physical batch of `step`, the `place`-th of it: the records in its rows, and which rows
    count.
    """

    step: int
    place: int
    indices: NDArray[np.int64]
    counts: NDArray[np.bool_]

    def mask(self, device: torch.device, padded: bool) -> Tensor | None:
        """Which rows count; None if all do and no shape is `padded`."""
        return torch.from_numpy(self.counts).to(device) if padded or not self.counts.all() else None


@dataclass(repr=False)
class Drawing:
    """Draws the records of a run's steps, cuts them into physical batches and has them read, in the
    order of the steps.

    Guarantees: which records a step takes, and in which rows of which batch, is a function of the
    run's secret and the step, so that a resumed run gives the same batches, and they may be read
    ahead; each is read once, in its order, and none before it is asked for.
    """

    recipe: Recipe
    randomness: Randomness
    records: RecordSource
    isolation: IsolationCheck
    most: int
    row_multiple: int
    world: World = field(default_factory=World)
    _reading: Generator[Batch] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._due = secret_steps(self.recipe.steps, self.randomness.generator("checked batches", 0))

    def pieces(self, step: int) -> list[Piece]:
        """The physical batches of a step; none if it takes no record.

        Of several ranks each takes a share of the step's records, and all take equally many
        batches, so that they stay together: one whose share is smaller, or empty, ends with batches
        of rows that do not count.
        """
        sampler = self.recipe.sampler
        rng = self.randomness.generator("sampling", sampler.address(step))
        indices = sampler.batch(step, records=len(self.records), rng=rng)
        cut = self._cut(step, self.world.share(indices))
        most = (
            len(self._cut(step, self.world.largest_share(indices)))
            if self.world.count > 1
            else len(cut)
        )
        cut += [(np.zeros(self.row_multiple, np.int64), np.zeros(self.row_multiple, bool))] * (
            most - len(cut)
        )
        return [Piece(step, place, rows, counts) for place, (rows, counts) in enumerate(cut)]

    def _cut(
        self, step: int, indices: NDArray[np.int64]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        return self.isolation.pieces(step, indices, self.most, self.row_multiple)

    def since(
        self, step: int, device: torch.device
    ) -> tuple[Iterator[list[Piece]], Iterator[Batch]]:
        """The pieces of each step from `step` on, and on `device` the batches of all of them, one
        after the other.

        Guarantees: where a batch was found to mix records it is not given; the refusal is final, as
        one of the check is.
        """
        self.close()
        drawn, ahead, again = tee(
            (self.pieces(later) for later in range(step, self.recipe.steps)), 3
        )
        self._reading = self.records.read(map(self._draw, chain.from_iterable(ahead)), device)
        return drawn, self._sound(chain.from_iterable(again), self._reading)

    def _sound(self, pieces: Iterator[Piece], reading: Iterator[Batch]) -> Iterator[Batch]:
        """The batches of these pieces. A refusal is given to the isolation, which keeps it in the run's
        folder once steps were released.
        """
        for piece in pieces:
            try:
                batch = next(reading)
            except Mixing as refusal:
                self.isolation.refuse(refusal, released=piece.step > 0)
                raise
            yield batch

    @property
    def inspected(self) -> Inspected:
        """What the readers of this process checked for records that mix before they reach the
        model.
        """
        source = self.records
        while isinstance(source, DrawnRecords):
            source = source.base
        return source.inspected if isinstance(source, LazyRecords) else Inspected()

    def close(self) -> None:
        """Stop reading ahead."""
        if self._reading is not None:
            self._reading.close()

    def _draw(self, piece: Piece) -> Draw:
        """What a reader is told: of the run's secret it learns the key of one step's augmentation,
        no more.
        """
        look = Look.ALWAYS if piece.place == 0 and piece.step in self._due else Look.IF_NEW
        return Draw(
            piece.indices, piece.place, self.randomness.key("augmentation", piece.step, 32), look
        )


class Batches:
    """What `PrivateTraining.batches` gives: an iterator over physical batches whose length is the
    number of steps that remain.

    How many physical batches these steps take is not known before, and no public number: it follows
    from the sizes of random batches. A step may have none.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        plan: Plan,
        steps: int,
        steps_done: Callable[[], int],
        shown: bool,
    ) -> None:
        self._steps, self._steps_done = steps, steps_done
        self._bar = self._show(batches, plan) if shown else None
        self._batches = batches if self._bar is None else self._bar

    def close(self) -> None:
        """End the bar now, and not when Python gets round to it: what is told next comes after
        it.
        """
        if self._bar is not None:
            self._bar.close()

    def __len__(self) -> int:
        return self._steps - self._steps_done()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def _show(self, batches: Iterator[Batch], plan: Plan) -> Generator[Batch, None, None]:
        """The batches, with a bar that moves as they go out."""
        with metrics.bar(plan, self._steps_done()) as show:
            for batch in batches:
                yield batch
                show(self._steps_done())
            show(self._steps_done())


class Captures:
    """Captured sums of batches of any structure: the tensors of a batch are what a graph copies."""

    def __init__(self, engine: object, losses_of: LossesOf) -> None:
        self._engine, self._losses_of = engine, losses_of
        self._structure: Any = None
        self._sum: CapturedSum | None = None

    def __call__(self, batch: tuple[Batch, ...], clip: Clip, mask: Tensor | None) -> Bounded[Grads]:
        """The bounded sum of ``losses_of(*batch)``. With another structure another graph is
        made.
        """
        found, structure = pytree.tree_flatten(batch)
        places = [place for place, leaf in enumerate(found) if isinstance(leaf, Tensor)]
        if self._sum is None or structure != self._structure:

            def losses_of(*tensors: Tensor) -> Tensor:
                filled = list(found)
                for place, tensor in zip(places, tensors, strict=True):
                    filled[place] = tensor
                return self._losses_of(*pytree.tree_unflatten(filled, structure))

            self._structure, self._sum = structure, CapturedSum(self._engine, losses_of)
        return self._sum(tuple(found[place] for place in places), clip, mask)


class GradAccumulator:
    """Which physical batch is out and waits for its losses, whether it was added, and the sum so
    far.
    """

    def __init__(self, pieces: int) -> None:
        self.left = pieces
        self.waiting = False
        self.idle = True
        self.rows = 0
        self.mask: Tensor | None = None
        self.total: Grads = {}

    def expect(self, mask: Tensor | None, rows: int) -> None:
        """A physical batch of `rows` rows is handed out; of these `mask` says which count."""
        self.mask, self.rows, self.waiting, self.idle = mask, rows, True, False

    def add(self, part: Grads, keep: bool = True) -> None:
        """Add the sum over the physical batch that is out. Without `keep` its tensors will be
        overwritten.
        """
        if self.left > 1 or self.total:
            part = {
                name: value.to_dense() if value.is_sparse else value for name, value in part.items()
            }
        if self.total:
            torch._foreach_add_([self.total[name] for name in part], list(part.values()))
        else:
            copy = not keep and self.left > 1
            self.total = {name: value.clone() if copy else value for name, value in part.items()}
        self.left -= 1
        self.idle = True

    @property
    def complete(self) -> bool:
        """Whether every physical batch was added."""
        return self.left == 0

    def require_added(self) -> None:
        """Refuse to go on before the physical batch that is out was added."""
        if not self.idle:
            raise InvalidInput(
                "step", "no call", "every batch must be followed by exactly one step(losses)"
            )

    def check_losses(self, losses: Tensor) -> None:
        """Refuse what is not one loss for each row of the batch that is out."""
        if not isinstance(losses, Tensor) or losses.dim() == 0:
            raise InvalidInput(
                "losses",
                "a scalar",
                'must hold one loss per example: compute the loss with reduction="none"',
            )
        if losses.shape != (self.rows,):
            rule = f"must have shape ({self.rows},): one loss per example of the batch"
            raise InvalidInput("losses", f"shape {tuple(losses.shape)}", rule)
        if not losses.requires_grad:
            raise InvalidInput(
                "losses", "no graph", "must depend on the model's trainable parameters"
            )


MOST = 1 << 16
SHARE = 0.4
"""Share of the free memory that activations and the engine's work may take: the backward pass needs
about as much again.
"""


def find_microbatch_size(
    model: nn.Module,
    records: RecordSource,
    runtime: Runtime,
    expected: float,
    device: torch.device,
    held: int | None,
) -> int:
    """The most units in a physical batch, for logical ones of `expected`; a captured step has room
    for little more than those.

    What was found by measuring is measured once: a resumed run keeps what it `held`.
    """
    most = runtime.max_physical_batch
    if not isinstance(most, int):
        most = max(1, largest_batch(model, records.flat, device) // records.rows_each)
        if held is not None:
            return held
    return min(most, padded_size(expected)) if runtime.graph else most


def largest_batch(model: nn.Module, records: Sequence[Tensor], device: torch.device) -> int:
    """The largest power of two whose forward and backward pass fit on `device`, by what one more
    example makes autograd keep.

    Guarantees: depends on shapes, the model and the machine only; torch's generators are left as
    they were.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        two, four = (_kept_bytes(model, records, rows, device) for rows in (2, 4))
    each = max(1.0, (four - two) / 2)
    fits = SHARE * _free_bytes(device) / each
    return 1 << (max(1, int(min(fits, MOST))).bit_length() - 1)


def padded_size(expected: float) -> int:
    """Rows for a random batch of `expected` records on average: four standard deviations more, a
    multiple of eight.
    """
    return -8 * (-math.ceil(expected + 4 * math.sqrt(expected)) // 8)


def _kept_bytes(
    model: nn.Module, records: Sequence[Tensor], rows: int, device: torch.device
) -> int:
    """Bytes that a forward pass on `rows` made-up records keeps for its backward pass."""
    seen: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return t

    example = torch.zeros(rows, *records[0].shape[1:], dtype=records[0].dtype, device=device)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            output = model(example)
    except (RuntimeError, TypeError, ValueError, IndexError) as problem:
        what = (
            f"max_physical_batch 'auto' with a model that does not take the first tensor of a "
            f"record alone ({problem})"
        )
        raise Unsupported(what, "give the number of examples") from None
    del output
    return sum(seen.values()) + example.numel() * example.element_size()


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
