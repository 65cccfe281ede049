"""How sums, noise and gradients are spread over the ranks of a run. Each layout is a small class;
one process is the identity.

Every rank sums over its share of the batch; the sum over all ranks is cut into parts, one a rank;
each rank makes the noise of its part, once; and the released means go where the optimizer needs
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from dpfy.core.randomness import Randomness
from dpfy.core.values import Private
from dpfy.gradients.clip import Clip
from dpfy.gradients.engine import Engine, Grads, zeros
from dpfy.isolation.check import IsolationCheck
from dpfy.noise.gaussian import dtype_of
from dpfy.noise.stream import NoiseStream, Shard
from dpfy.training.integrity import checkpoint
from dpfy.training.integrity.checkpoint import Snapshot
from dpfy.training.integrity.guard import checksum
from dpfy.training.parallel.world import World
from dpfy.training.step import rounded


@dataclass
class SingleDevice:
    """One process holds everything. `own` are the parts of a checkpoint that a rank does not share
    with rank 0.
    """

    own: ClassVar[tuple[str, ...]] = ()
    model_sharded: ClassVar[bool] = False
    """Whether the ranks hold parts of the model, so that all of them must run it together."""

    world: World = field(default_factory=World)
    model: nn.Module = field(default_factory=nn.Module, repr=False)

    def __post_init__(self) -> None:
        self.alone = type(self) is SingleDevice and self.world.count == 1
        """Whether this process has the whole sum, and makes all of its noise."""

    @property
    def readers(self) -> World:
        """The ranks among which the records of a batch are shared out."""
        return self.world

    @property
    def aliases(self) -> Mapping[int, Tensor]:
        """What may stand in for a parameter in its module, by identity: nothing."""
        return {}

    def attach(self, engine: Engine) -> None:
        """Attach the engine to the model."""
        engine.attach(self.model)

    def zeros(self, parameters: dict[str, nn.Parameter], clip: Clip) -> Grads:
        """The sum over no records."""
        return zeros(parameters, clip)

    def gather_params(self, step: int, isolation: IsolationCheck, first: bool) -> None:
        """Make the model ready for a batch of `step`, the `first` of it or not."""

    def stream(self, whole: NoiseStream, parameters: Grads, clip: Clip) -> NoiseStream:
        """The noise stream of what this rank releases."""
        return whole

    def local_shard(self, parameters: Grads) -> Grads:
        """The coordinates whose noise this rank makes."""
        return parameters

    def reduce(self, sums: Grads) -> Grads:
        """Of the sum over all ranks, what this rank releases."""
        return sums

    def grad_buffers(self, sums: Grads, parameters: Mapping[str, nn.Parameter]) -> Grads | None:
        """Memory for the released means, where they are to be rounded as they are made."""
        return rounded(sums, parameters)

    def gather_grads(
        self, released: Private[Grads], parameters: Mapping[str, nn.Parameter]
    ) -> Private[Grads]:
        """The released means as the optimizer takes them."""
        return released

    def agree(
        self,
        step: int,
        facts: dict[str, object],
        parameters: Mapping[str, nn.Parameter],
        look: bool,
    ) -> None:
        """Refuse to go on unless all ranks stand before `step`, with the same facts and, where
        `look`, the same weights.
        """
        self.world.agree(f"step {step}", facts)

    def save(self, state: Path, snapshot: Snapshot, randomness: Randomness) -> None:
        """Write a checkpoint, on all ranks together."""
        checkpoint.write_ranks(state, snapshot, randomness, self.world, self.own)

    def tally(self, sums: Grads, part: int) -> Tensor:
        """A checksum of the sum over all ranks."""
        return self.world.all_reduce(checksum(sums.values(), part))


@dataclass
class Replicated(SingleDevice):
    """Every rank holds the whole model (data parallel). Noise is made by parts of the parameters
    laid end to end.

    Guarantees: the noise of a coordinate is made on one rank, at the scale of the whole sum; all
    ranks get the same means, bit for bit.
    """

    own = ("noise", "random")
    shapes: dict[str, torch.Size] = field(default_factory=dict, init=False)
    sizes: list[int] = field(default_factory=list, init=False)

    @property
    def shard(self) -> Shard:
        """The part of this rank."""
        return Shard(self.world.rank, self.world.count)

    def stream(self, whole: NoiseStream, parameters: Grads, clip: Clip) -> NoiseStream:
        """The stream of this rank's part."""
        like = next(iter(parameters.values()))
        every = parameters | {name: like.new_zeros(()) for name in clip.coordinates}
        total = sum(t.numel() for t in every.values())
        self.shapes = {name: t.shape for name, t in every.items()}
        bounds = [Shard(rank, self.world.count).bounds(total) for rank in range(self.world.count)]
        self.sizes = [last - first for first, last in bounds]
        return self.shard.stream(whole, self.shard.part(every))

    def local_shard(self, parameters: Grads) -> Grads:
        """The part of this rank."""
        return self.shard.of(parameters)

    def reduce(self, sums: Grads) -> Grads:
        """The sums of all ranks, added, and cut: the part of this rank, in one piece of memory."""
        dtype = dtype_of(sums)
        flat = torch.cat(
            [(t.to_dense() if t.is_sparse else t).reshape(-1).to(dtype) for t in sums.values()]
        )
        mine, first, start = (
            self.world.reduce_scatter(flat, self.sizes),
            sum(self.sizes[: self.world.rank]),
            0,
        )
        parts, at = {}, 0
        for name, t in sums.items():
            length = max(0, min(first + len(mine), start + t.numel()) - max(first, start))
            parts[name] = mine[at : at + length]
            at, start = at + length, start + t.numel()
        return parts

    def agree(
        self,
        step: int,
        facts: dict[str, object],
        parameters: Mapping[str, nn.Parameter],
        look: bool,
    ) -> None:
        """In words, before the sums are added up."""
        weights = {"weights": int(checksum(parameters.values()))} if look else {}
        super().agree(step, {**facts, **weights}, parameters, look)

    def grad_buffers(self, sums: Grads, parameters: Mapping[str, nn.Parameter]) -> Grads | None:
        """None: what is gathered is rounded afterwards."""
        return None

    def gather_grads(
        self, released: Private[Grads], parameters: Mapping[str, nn.Parameter]
    ) -> Private[Grads]:
        """The parts of all ranks, in the shapes and types of the parameters."""
        flat = self.world.all_gather(
            torch.cat([t.reshape(-1) for t in released.value.values()]), self.sizes
        )
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        named = {
            name: part.view(shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }
        return Private(
            {
                name: t.to(parameters[name].dtype) if name in parameters else t
                for name, t in named.items()
            }
        )
