"""Tensor parallel training (``parallelize_module``): the weights of linear layers and tables lie in
parts on the ranks, which all work on the same records.

A layer runs here with the part of its weight that this rank holds, as any other layer does; what
its input and output are to the other ranks, torch's own styles say. Of an example's gradient every
rank has its part, and the squares of its norm are added over the ranks. What every rank holds
whole, a bias behind the sum over the ranks, say, counts once: it is rank 0's.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from dpfy.core.errors import Unsupported
from dpfy.core.values import Private
from dpfy.gradients.clip import Clip
from dpfy.gradients.engine import Engine, Grads, trainable, zeros
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.per_example.clipped_sum import ShardedNorms
from dpfy.isolation.check import IsolationCheck
from dpfy.noise.coordinate_slice import CoordinateSlice
from dpfy.noise.gaussian import dtype_of
from dpfy.noise.stream import NoiseStream, Shard
from dpfy.training.integrity.guard import checksum
from dpfy.training.integrity.state import generators, set_generators
from dpfy.training.parallel.data_parallel import SingleDevice
from dpfy.training.parallel.dtensor import local, spread_like
from dpfy.training.parallel.world import World

COLUMNS, ROWS = "ColwiseParallel", "RowwiseParallel"
KINDS = {(nn.Linear, 0): COLUMNS, (nn.Linear, 1): ROWS, (nn.Embedding, 1): COLUMNS}
"""The style of a layer, by its type and the dimension in which its weight is cut."""

WAY_OUT = (
    "parallelize nn.Linear (ColwiseParallel, RowwiseParallel) and nn.Embedding (ColwiseParallel) "
    "over all ranks of the run; "
    "else use fully_shard"
)
CLOSE = 2.0**-6
"""How far copies of a sum on different ranks may be apart, relatively to its largest coordinate."""


@dataclass
class TensorParallel(SingleDevice):
    """Every rank holds some rows or columns of the large weights, and a copy of the others; all of
    them compute on the whole batch.

    Guarantees: the norm of an example's gradient is that over all ranks, with what every rank holds
    counted once, on the rank whose sum is released. Each coordinate's noise is made on one rank, at
    the scale of the whole sum. Where ranks have different gradients for a parameter that they all
    hold, the run ends at a step that is looked at.
    """

    own = ("model", "optimizer", "average", "noise", "random")
    model_sharded = True
    _engine: BookkeepingEngine | None = field(default=None, init=False)
    _copied: dict[str, torch.Size] = field(default_factory=dict, init=False)
    _look: bool = field(default=False, init=False)

    @property
    def readers(self) -> World:
        """Every rank reads the whole batch."""
        return World()

    def attach(self, engine: Engine) -> None:
        """Let the engine see the parts that lie here, and count every norm once."""
        if not isinstance(engine, BookkeepingEngine):
            raise Unsupported(
                f"engine {engine.name} with tensor parallel weights", "use engine='bookkeeping'"
            )
        sharded = None
        if self.world.count > 1:
            counted = {
                name
                for name, p in trainable(self.model).items()
                if self.world.first or not _everywhere(p)
            }
            sharded = ShardedNorms(frozenset(counted), self.world.all_reduce)
        layers = {m: _Layer.of(m, self.world) for m in self.model.modules() if _parted(m)}
        for module, layer in layers.items():
            module._parameters.update(layer.here)
        try:
            engine.attach(self.model, sharded=sharded)
        finally:
            for module, layer in layers.items():
                module._parameters.update(layer.held)
        for module, layer in layers.items():
            if (inner := vars(module).get("forward")) is not None:
                layer.inner = inner
                _LAYERS[module] = layer
                module.forward = MethodType(_run, module)  # type: ignore[method-assign]
        self._engine = engine

    def zeros(self, parameters: dict[str, nn.Parameter], clip: Clip) -> Grads:
        """The sum over no records, as this rank makes it."""
        return zeros({name: local(p) for name, p in parameters.items()}, clip)  # type: ignore[misc]

    def gather_params(self, step: int, isolation: IsolationCheck, first: bool) -> None:
        """Where one rank must measure, all of them do: they wait for each other inside of the
        model.
        """
        assert self._engine is not None
        tape = self._engine.sums.tape
        tape.unsettled = any(self.world.exchange(f"a batch of step {step}", tape.unsettled))

    def stream(self, whole: NoiseStream, parameters: Grads, clip: Clip) -> NoiseStream:
        """The stream of the coordinates that this rank releases."""
        world = self.world
        copied = {name: p.shape for name, p in parameters.items() if _everywhere(p)}
        self._copied = copied | {name: torch.Size() for name in clip.coordinates}
        places, runs = self._places(world.rank), list[tuple[int, int]]()
        totals = [p.numel() for p in parameters.values()] + [1] * len(clip.coordinates)
        for start, name in zip(accumulate(totals, initial=0), [*parameters, *clip.coordinates]):
            if name in places:
                runs.append((start + places[name].start, start + places[name].stop))
            else:
                runs += [
                    (start + first, start + last) for first, last in _held(parameters[name], world)
                ]
        return Shard(world.rank, world.count).stream(whole, CoordinateSlice.of(runs, totals))

    def local_shard(self, parameters: Grads) -> Grads:
        """The coordinates whose noise this rank makes, flat."""
        places, flat = (
            self._places(self.world.rank),
            {name: local(p).detach().reshape(-1) for name, p in parameters.items()},
        )
        return {name: t[places[name]] if name in places else t for name, t in flat.items()}

    def agree(
        self,
        step: int,
        facts: dict[str, object],
        parameters: Mapping[str, nn.Parameter],
        look: bool,
    ) -> None:
        """With what every rank holds, where `look`."""
        self._look = look
        copies = [local(p) for p in parameters.values() if _everywhere(p)]
        super().agree(
            step,
            {**facts, "weights": int(checksum(copies))} if look and copies else facts,
            parameters,
            look,
        )

    def reduce(self, sums: Grads) -> Grads:
        """The sums of what lies here, flat; of what every rank holds, rank 0's, cut."""
        dtype = dtype_of(sums)
        flat = {
            name: (t.to_dense() if t.is_sparse else t).reshape(-1).to(dtype)
            for name, t in sums.items()
        }
        if self.world.count == 1 or not self._copied:
            return flat
        copies = torch.cat([flat[name] for name in self._copied])
        if self._look:
            self._compare(copies)
        mine = self.world.reduce_scatter(
            copies if self.world.first else torch.zeros_like(copies), self._sizes(len(copies))
        )
        pieces = mine.split(
            [place.stop - place.start for place in self._places(self.world.rank).values()]
        )
        return flat | dict(zip(self._copied, pieces, strict=True))

    def grad_buffers(self, sums: Grads, parameters: Mapping[str, nn.Parameter]) -> Grads | None:
        """None: what is released is rounded afterwards."""
        return None

    def gather_grads(
        self, released: Private[Grads], parameters: Mapping[str, nn.Parameter]
    ) -> Private[Grads]:
        """Gradients that are spread as the parameters are; of what every rank holds, the parts of
        all ranks.
        """
        found = dict(released.value)
        if self.world.count > 1 and self._copied:
            mine, total = (
                torch.cat([found[name] for name in self._copied]),
                sum(s.numel() for s in self._copied.values()),
            )
            whole = self.world.all_gather(mine, self._sizes(total)).split(
                [s.numel() for s in self._copied.values()]
            )
            found |= zip(self._copied, whole, strict=True)
        return Private(
            {
                name: spread_like(t.to(p.dtype).view(local(p).shape), p)
                if (p := parameters.get(name)) is not None
                else t
                for name, t in found.items()
            }
        )

    def _compare(self, copies: Tensor) -> None:
        """End the run on all ranks if they have different sums for a parameter that they all
        hold.
        """
        first = copies.clone()
        self.world.broadcast([first])
        far = (first - copies).abs().max() > CLOSE * first.abs().max()
        self.world.agree(
            "what every rank holds",
            {"gradient of a parameter that every rank holds": self.world.rank if far else 0},
        )

    def _sizes(self, total: int) -> list[int]:
        bounds = [Shard(rank, self.world.count).bounds(total) for rank in range(self.world.count)]
        return [last - first for first, last in bounds]

    def _places(self, rank: int) -> dict[str, slice]:
        """Which coordinates of each parameter that all ranks hold, laid end to end and cut evenly,
        are those of `rank`.
        """
        ends = list(accumulate((shape.numel() for shape in self._copied.values()), initial=0))
        first, last = Shard(rank, self.world.count).bounds(ends[-1])
        found = {}
        for start, (name, shape) in zip(ends, self._copied.items()):
            low = min(max(first - start, 0), shape.numel())
            found[name] = slice(low, max(low, min(last - start, shape.numel())))
        return found


@dataclass
class _Layer:
    """A layer of which this rank holds a part: its weights as torch spreads them, and what stands
    in for them while it computes.
    """

    style: str
    mesh: Any
    width: int
    held: dict[str, nn.Parameter]
    here: dict[str, nn.Parameter]
    inner: Any = None

    @classmethod
    def of(cls, module: nn.Module, world: World) -> _Layer:
        """Of a sum over the ranks, the bias is added by the first of them: the others add zeros."""
        held = {name: p for name, p in module._parameters.items() if p is not None}
        weight: Any = held["weight"]
        style = _style(module)
        here = {
            name: nn.Parameter(local(p), requires_grad=p.requires_grad) for name, p in held.items()
        }
        if style == ROWS and "bias" in here and not world.first:
            here["bias"] = nn.Parameter(
                torch.zeros_like(here["bias"]), requires_grad=held["bias"].requires_grad
            )
        return cls(
            style,
            weight.device_mesh,
            weight.shape[1 if isinstance(module, nn.Embedding) else 0],
            held,
            here,
        )

    @contextmanager
    def standing_in(self, module: nn.Module) -> Iterator[None]:
        module._parameters.update(self.here)
        try:
            yield
        finally:
            module._parameters.update(self.held)


_LAYERS: weakref.WeakKeyDictionary[nn.Module, _Layer] = weakref.WeakKeyDictionary()


@_disable_dynamo
def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stands in for ``module.forward``: the engine's own, on what lies here. A copy of the module
    runs its own forward.
    """
    layer = _LAYERS.get(module)
    if layer is None:
        return type(module).forward(module, *args, **kwargs)  # type: ignore[attr-defined]
    from torch.distributed.tensor import DTensor, Partial, Replicate
    from torch.distributed.tensor import Shard as Cut

    x: Any = args[0] if args else kwargs.get("input")
    wanted: Any = Replicate() if layer.style == COLUMNS else Cut(x.dim() - 1)
    if not isinstance(x, DTensor) or x.placements != (wanted,):
        raise Unsupported(
            f"an input of a {layer.style} layer that is not {wanted} over the ranks",
            "leave input_layouts as they are",
        )
    given = x.to_local(grad_placements=[Partial()]) if layer.style == COLUMNS else x.to_local()
    with layer.standing_in(module):
        y = layer.inner(given)
    shape = torch.Size((*y.shape[:-1], layer.width))
    placed: Any = Cut(y.dim() - 1) if layer.style == COLUMNS else Partial()
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, layer.mesh, [placed], run_check=False, shape=shape, stride=stride)


def _parted(module: nn.Module) -> bool:
    """Whether torch's DTensor spreads parameters of this very module."""
    return any(p is not None and local(p) is not p for p in module._parameters.values())


def _everywhere(p: Tensor) -> bool:
    """Whether every rank holds all of `p`."""
    return local(p) is p or all(placement.is_replicate() for placement in p.placements)  # type: ignore[attr-defined]


def _style(module: nn.Module) -> str:
    """How the weight of `module` is cut; refused if it is in another way than the layers here
    know.
    """
    weight: Any = module._parameters.get("weight")
    kind = next((kind for kind in (nn.Linear, nn.Embedding) if type(module) is kind), None)
    cut = (
        None
        if weight is None or local(weight) is weight or len(weight.placements) != 1
        else weight.placements[0]
    )
    style = (
        KINDS.get((kind, cut.dim))
        if kind is not None and cut is not None and cut.is_shard()
        else None
    )
    if style is None:
        raise Unsupported(
            f"{type(module).__name__}: a layer whose weights torch's DTensor spreads in another "
            f"way than it can be trained",
            WAY_OUT,
        )
    return style


def _held(p: Any, world: World) -> list[tuple[int, int]]:
    """The coordinates of `p` that lie on this rank, as runs."""
    (cut,), shape = p.placements, p.shape
    rows = -(-shape[cut.dim] // world.count)
    first, last = (min(rows * rank, shape[cut.dim]) for rank in (world.rank, world.rank + 1))
    if cut.dim == 0:
        width = shape.numel() // shape[0]
        return [(first * width, last * width)]
    return [(row * shape[1] + first, row * shape[1] + last) for row in range(shape[0])]


def same_generators(world: World, device: torch.device) -> None:
    """Put torch's own generators (dropout and the like) on all ranks where they are on rank 0: they
    compute on the same activations.
    """
    mine = (
        {name: bytes(t.tolist()).hex() for name, t in generators(device).items()}
        if world.count > 1
        else {}
    )
    told = world.broadcast_object("the generators", lambda: mine) if mine else {}
    if told and not world.first:
        set_generators(
            {
                name: torch.frombuffer(bytearray.fromhex(t), dtype=torch.uint8)
                for name, t in told.items()
            },
            device,
        )


def check_parallel(model: nn.Module, world: World) -> None:
    """Refuse weights that are spread in another way than by the styles that are known here, over
    all ranks of the run, in their order.
    """
    for module in filter(_parted, model.modules()):
        style = _style(module)
        for name, p in module._parameters.items():
            if p is None:
                continue
            spread: Any = p
            mesh = getattr(spread, "device_mesh", None)
            if (
                mesh is None
                or mesh.ndim != 1
                or mesh.size() != world.count
                or mesh.get_local_rank() != world.rank
            ):
                raise Unsupported(
                    f"{name} of a {style} layer that is not spread over the {world.count} ranks of "
                    f"the run",
                    WAY_OUT,
                )
            if not _everywhere(p) and p.shape[spread.placements[0].dim] <= (world.count - 1) * -(
                -p.shape[spread.placements[0].dim] // world.count
            ):
                raise Unsupported(
                    f"{name} of a {style} layer, of shape {list(p.shape)}: a rank would hold "
                    f"nothing of it",
                    WAY_OUT,
                )
