"""Fully sharded training (FSDP2, ``fully_shard``): weights, sums, noise, its past, optimizer and
average lie in parts on the ranks.

The layers run with weights that torch gathers for them, and the engine sees these. The sum of a
layer is added over the ranks and cut as soon as it is made; each rank makes the noise of the
coordinates it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from dpfy.core.errors import Unsupported
from dpfy.core.values import Private
from dpfy.gradients.clip import Clip
from dpfy.gradients.engine import Engine, Grads, trainable
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.isolation.check import IsolationCheck
from dpfy.isolation.schedule import CheckLevel
from dpfy.noise.coordinate_slice import CoordinateSlice
from dpfy.noise.stream import NoiseStream, Shard
from dpfy.training.parallel.data_parallel import SingleDevice
from dpfy.training.parallel.dtensor import local, spread_like

WAY_OUT = (
    "shard the whole model by its first dimension over all ranks of the run: fully_shard(layer) "
    "for layers, then fully_shard(model)"
)


@dataclass(repr=False)
class FullySharded(SingleDevice):
    """Every rank holds some rows of each parameter.

    Guarantees: each coordinate lies on one rank, which adds its noise, at the scale of the whole
    sum. Torch's own reduction of gradients is off. While a step is checked, and until the engine
    knows every layer, all weights are gathered, so that no rank waits for another one inside of its
    model.
    """

    own = ("model", "optimizer", "average", "noise", "random")
    model_sharded = True
    sizes: dict[str, list[int]] = field(default_factory=dict, init=False)
    dtype: torch.dtype = field(default=torch.float32, init=False)
    _engine: BookkeepingEngine | None = field(default=None, init=False)
    _aliases: dict[int, Tensor] = field(default_factory=dict, init=False)
    _reshards: list[tuple[Any, Any]] | None = field(default=None, init=False)

    def stream(self, whole: NoiseStream, parameters: Grads, clip: Clip) -> NoiseStream:
        """The stream of this rank's rows; what the clip rule counts is rank 0's."""
        world, like = self.world, {name: local(p) for name, p in parameters.items()}
        self.dtype = (
            torch.float64 if any(p.dtype == torch.float64 for p in like.values()) else torch.float32
        )
        self.sizes = {name: _rows(p, world.count) for name, p in parameters.items()}
        self.sizes |= {name: [1] + [0] * (world.count - 1) for name in clip.coordinates}
        totals = [sum(sizes) for sizes in self.sizes.values()]
        before = [
            first + sum(sizes[: world.rank])
            for first, sizes in zip(accumulate(totals, initial=0), self.sizes.values())
        ]
        runs = [
            (first, first + sizes[world.rank])
            for first, sizes in zip(before, self.sizes.values(), strict=True)
        ]
        return Shard(world.rank, world.count).stream(whole, CoordinateSlice.of(runs, totals))

    def local_shard(self, parameters: Grads) -> Grads:
        """The rows of this rank, flat."""
        return {name: local(p).detach().reshape(-1) for name, p in parameters.items()}

    @property
    def aliases(self) -> Mapping[int, Tensor]:
        """A gathered weight stands in for the part of it that is held."""
        return self._aliases

    def attach(self, engine: Engine) -> None:
        """Let the engine see the gathered weights, and take each sum as it is made."""
        if not isinstance(engine, BookkeepingEngine):
            raise Unsupported(
                f"engine {engine.name} with fully sharded weights", "use engine='bookkeeping'"
            )
        held = dict(self.model.named_parameters())
        _each(self.model, lambda m: m.unshard())
        self._aliases = {id(p): held[name] for name, p in self.model.named_parameters()}
        engine.attach(self.model, each=self._cut if self.world.count > 1 else None)
        _each(self.model, lambda m: m.reshard())
        self._engine = engine

    def zeros(self, parameters: dict[str, nn.Parameter], clip: Clip) -> Grads:
        """The sum over no records, as this rank holds it."""
        like = next(iter(parameters.values()))
        return {
            name: local(like).new_zeros(sizes[self.world.rank], dtype=self.dtype)
            for name, sizes in self.sizes.items()
        }

    def gather_params(self, step: int, isolation: IsolationCheck, first: bool) -> None:
        """Before a batch goes out: gather all weights if some rank will look at it or measure, else
        let layers gather their own.
        """
        assert self._engine is not None
        needed = (
            first and isolation.level_of(step) is not CheckLevel.NOTHING
        ) or not self._engine.sums.steady
        if any(self.world.exchange(f"a batch of step {step}", needed)):
            self._gather()
        else:
            self._let_go()

    def grad_buffers(self, sums: Grads, parameters: Mapping[str, nn.Parameter]) -> Grads | None:
        """None: what is released is rounded afterwards."""
        return None

    def gather_grads(
        self, released: Private[Grads], parameters: Mapping[str, nn.Parameter]
    ) -> Private[Grads]:
        """Gradients that are spread as the parameters are; what the clip rule counted goes to all
        ranks.
        """
        self._let_go()
        found: Grads = {}
        for name, t in released.value.items():
            if name in parameters:
                p = parameters[name]
                found[name] = spread_like(t.to(p.dtype).view(local(p).shape), p)
            else:
                found[name] = t.new_zeros(1) if not self.world.first else t
                self.world.broadcast([found[name]])
        return Private(found)

    def close(self) -> None:
        """Leave the weights in parts, as they were."""
        self._let_go()

    def _cut(self, name: str, total: Tensor) -> Tensor:
        """The sum over all ranks of what one parameter receives, of which this rank keeps its part,
        where its weights lie.
        """
        flat, sizes = total.reshape(-1).to(self.dtype), self.sizes[name]
        return self.world.reduce_scatter(flat, sizes).to(
            local(next(self.model.parameters())).device
        )

    def _gather(self) -> None:
        if self._reshards is None:
            groups = [group for m in _sharded(self.model) for group in _groups(m._get_fsdp_state())]
            self._reshards = [(group, group.post_forward_mesh_info) for group in groups]
            self.model.set_reshard_after_forward(False)  # type: ignore[operator]
            self.model.set_reshard_after_backward(False)  # type: ignore[operator]
            _each(self.model, lambda m: m.unshard())

    def _let_go(self) -> None:
        if self._reshards is not None:
            for group, after in self._reshards:
                group.post_forward_mesh_info = after
            self.model.set_reshard_after_backward(True)  # type: ignore[operator]
            _each(self.model, lambda m: m.reshard())
            self._reshards = None


def _sharded(model: nn.Module) -> Iterable[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def _groups(state: Any) -> list[Any]:
    """The groups of parameters that a module gathers together: several since torch 2.13, before it
    one at most.
    """
    if (many := getattr(state, "_fsdp_param_groups", None)) is not None:
        return list(many)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _each(model: nn.Module, action: Callable[[Any], object]) -> None:
    for module in _sharded(model):
        action(module)


def _rows(p: Tensor, count: int) -> list[int]:
    """How many coordinates of `p` each rank holds: as torch cuts rows."""
    rows = -(-p.shape[0] // count) if p.dim() else 1
    width = p.numel() // max(p.shape[0], 1) if p.dim() else 1
    return [width * max(0, min(rows, p.shape[0] - rank * rows)) for rank in range(count)]


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether fully_shard was called on some part of `model`."""
    return bool(_sharded(model))


def check_sharded(model: nn.Module, count: int) -> None:
    """Refuse weights that are spread in another way than by rows over all ranks, or only in
    part.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(model, FSDPModule):
        raise Unsupported("a model with layers under fully_shard that is not itself", WAY_OUT)
    model.set_requires_gradient_sync(False)
    for name, p in trainable(model).items():
        if (
            not isinstance(p, DTensor)
            or p.placements != (Shard(0),)
            or p.device_mesh.size() != count
        ):
            raise Unsupported(
                f"{name}: a weight that is not cut by rows over the {count} ranks of the run",
                WAY_OUT,
            )
