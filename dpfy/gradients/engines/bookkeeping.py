"""The fast engine: one backward without weight gradients, norms layer by layer, one weighted
product per layer.

Book-keeping (Bu, Wang, Zha and Karypis 2023, "Differentially private optimization on large model at
small cost"): the per-example gradient of a layer is a product of its input and its output gradient,
so its norm and its weighted sum need no per-example tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from dpfy.core.errors import Unsupported
from dpfy.core.values import Bounded
from dpfy.gradients.autograd.arrival import UntrackedSource, arrivals
from dpfy.gradients.autograd.batch_axes import BatchAxes
from dpfy.gradients.autograd.graph_nodes import AutogradGraph
from dpfy.gradients.autograd.tape import BatchAxis, LayerReport, Site, Tape
from dpfy.gradients.autograd.untracked import UntrackedSplit, split_points
from dpfy.gradients.clip import Clip
from dpfy.gradients.cuda_graphs.recorder import Recorder, bucket_size
from dpfy.gradients.engine import Engine, Grads, attached, checked, no_autocast, trainable, zeros
from dpfy.gradients.engines.bounded_sum import BoundedSum, Parts
from dpfy.gradients.engines.loop import SingleExample, alone_where_needed
from dpfy.gradients.layers.bare import BARE, bare_rule, run_bare, without_alias
from dpfy.gradients.layers.rule import LayerRule
from dpfy.gradients.layers.table import rule_for, run_lifted
from dpfy.gradients.one_record import active, transformed
from dpfy.gradients.per_example.clipped_sum import ShardedNorms
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.joined import Buffers
from dpfy.gradients.per_example.outer import Direct

MOST_GRAPHS = 64
"""Of so many graphs the batch axes are remembered."""

EachSum = Callable[[str, Tensor], Tensor]
"""Takes the sum of a parameter, by name, and gives back what is to be kept of it."""

_SITES: weakref.WeakKeyDictionary[nn.Module, tuple[LayerRule, Tape, Site]] = (
    weakref.WeakKeyDictionary()
)


def _tapped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stands in for ``module.forward`` while an engine is attached; a copy of the module made
    meanwhile runs its own forward.
    """
    if torch.compiler.is_compiling():
        return _outside(module, *args, **kwargs)
    entry = _SITES.get(module)
    if entry is None:
        return type(module).forward(module, *args, **kwargs)  # type: ignore[attr-defined]
    rule, tape, site = entry
    if transformed():
        return type(module).forward(module, *args, **kwargs)  # type: ignore[attr-defined]
    if rule.run is not run_bare and _swapped(module):
        return type(module).forward(module, *args, **kwargs)  # type: ignore[attr-defined]
    if (
        "input" in kwargs and not args and rule.run is not run_bare
    ):  # what torch's layers call what rules take by place
        args = (kwargs.pop("input"),)
    if (call := active()) is not None and rule.run is not run_bare:
        return run_lifted(call, rule, module, tape, site, args, kwargs)
    return rule.run(module, tape, site, *args, **kwargs)


def _swapped(module: nn.Module) -> bool:
    """Whether something else stands in the place of a parameter (`torch.func.functional_call`):
    autograd finds what that is made of.
    """
    return any(
        p is not None and type(p) is not nn.Parameter and not isinstance(p, nn.Parameter)
        for p in module._parameters.values()
    )


def _with_aliases(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The same for modules of the user's own: a compiled graph keeps them, and their parameters are
    then untracked in it.
    """
    if torch.compiler.is_compiling():
        return type(module).forward(module, *args, **kwargs)  # type: ignore[attr-defined]
    return _tapped(module, *args, **kwargs)


@_disable_dynamo
def _outside(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Outside of a compiled model's graphs: traced, a tap would be bound to the wrong layer or lose
    its report.
    """
    return without_alias(_tapped(module, *args, **kwargs))


class BookkeepingEngine(Engine):
    """Hooks on supported layers; any other use of a parameter is found at every step and goes
    through the batched route.

    Guarantees: exact for shared parameters and for modules used several times. A use that no layer
    rule explains is never missed: supported layers run with constant weights, so any gradient that
    autograd still finds for a parameter is such a use. The place of the batch in each layer's
    tensors follows from the autograd graph, and is checked on the first batch.
    """

    name = "bookkeeping"

    def __init__(self, *, sparse: bool = False) -> None:
        """An engine without a model.

        Args:
            sparse: Whether the sum of a table may be a sparse tensor, of the rows in use. Noise
                takes either.
        """
        self._sparse = sparse
        self._each: EachSum | None = None
        self._sharded: ShardedNorms | None = None
        self._sums: BoundedSum | None = None
        self._recorder: Recorder | None = None
        self._single: SingleExample | None = None
        self._watches = False  # whether the model's calls are remembered
        self._sites: dict[nn.Module, Site] = {}
        self._without_batch = False  # whether some site has no batch axis
        self._routes: dict[str, str] = {}
        self._suspects: set[str] = set()
        self._received: dict[str, int] = {}
        self._ever: set[str] = set()  # parameters that had untracked uses
        self._axes: dict[tuple[str, ...], tuple[BatchAxis | None, ...]] = {}

    def attach(
        self,
        model: nn.Module,
        *,
        each: EachSum | None = None,
        sharded: ShardedNorms | None = None,
    ) -> None:
        """Patch the supported layers that have trainable parameters.

        Args:
            model: The model whose losses will come.
            each: Takes the sum of every parameter as soon as it is made, in their order, and gives
                back what the total holds.
            sharded: How norms are added over ranks that hold parts of the parameters.
        """
        self.detach()
        self._each, self._sharded = each, sharded
        self._sums, self._single = BoundedSum(trainable(model)), SingleExample(model)
        self._watches = True
        self._recorder = Recorder(self._sums)
        for name, module in model.named_modules():
            rule = rule_for(module) or bare_rule(module)
            if rule is None or not any(p.requires_grad for p in module.parameters()):
                continue
            site = Site(
                name or type(module).__name__,
                tuple(module.parameters(recurse=False)),
                batch_dims=rule.batch_dims,
            )
            self._sites[module] = site
            _SITES[module] = (rule, self._sums.tape, site)
            module.forward = MethodType(_with_aliases if rule is BARE else _tapped, module)  # type: ignore[method-assign]

    def detach(self) -> None:
        """Unpatch every layer, and forget the model and how it was attached."""
        self._each = self._sharded = None
        for module in list(self._sites):
            self._release(module)
        if self._single is not None:
            self._single.close()
            self._single = None
        self._sums, self._recorder, self._axes, self._without_batch = None, None, {}, False
        self._routes, self._suspects, self._ever = {}, set(), set()

    def _release(self, module: nn.Module) -> None:
        self._sites.pop(module, None)
        _SITES.pop(module, None)
        vars(module).pop("forward", None)

    def row_multiple(self, expected: float, device: torch.device) -> int:
        """On a GPU its part of a step is recorded, so random sizes should repeat."""
        return bucket_size(expected) if device.type == "cuda" else 1

    def bounded_sum(self, losses: Tensor, clip: Clip, mask: Tensor | None = None) -> Bounded[Grads]:
        """See :class:`dpfy.gradients.engine.Engine`."""
        sums, recorder = attached(self._sums), attached(self._recorder)
        mask = checked(losses, mask)
        with torch.no_grad(), no_autocast(losses.device.type):
            may = losses.is_cuda and len(losses) and recorder.on and sums.steady and self.alone
            if may and (total := recorder.bounded_sum(losses, clip, mask)) is not None:
                return total
            parts = self._contributions(losses) if len(losses) and sums.params else {}
            # what was measured and is not needed for the sums is let go
            scaled = sums.weigh(parts, clip, mask, self._sharded) if parts else None
            del parts
            if scaled is not None and self.alone:
                sums.look_for_lost(scaled)
            if self._each is not None:
                return sums.one_by_one(scaled, clip, self._each)
            if scaled is None:
                return Bounded(zeros(sums.params, clip), clip.bound)
            return sums.total(scaled, Buffers({}, sparse=True) if self._sparse else None)

    @property
    def alone(self) -> bool:
        """Whether no other ranks have a part in norms and sums: only such work may be recorded."""
        return self._each is None and self._sharded is None

    @property
    def sums(self) -> BoundedSum:
        """The stages of the bounded sum for the attached model."""
        return attached(self._sums)

    @property
    def per_example_parameters(self) -> dict[str, str]:
        """The parameters whose gradients went through a part of the graph example by example, in
        the last batch that was summed.

        "vmap": vectorised over the examples. "loop": one by one, where torch has no vectorised
        backward.
        """
        return dict(self._routes)

    @property
    def example_by_example(self) -> frozenset[str]:
        """The names in :attr:`per_example_parameters`."""
        return frozenset(self._routes)

    def _contributions(self, losses: Tensor) -> Parts:
        """What every parameter receives, use by use."""
        sums = attached(self._sums)
        parts: Parts = {}
        if sums.steady and not self._watches:
            self._routes, self._suspects, self._received = {}, set(), {}
            sums.gather(losses, parts)
            return parts
        unseen = len(sums.seen) < len(sums.params)
        graph = (
            AutogradGraph.of(losses) if sums.tape.unsettled or sums.untracked or unseen else None
        )
        splits = {} if graph is None else self._splits(losses, graph)
        sound = not splits or bool(losses.isfinite().all())
        inbox = _Inbox(sums, parts)
        found = (
            arrivals(graph, splits, len(losses), sums.tape, sums.names, inbox)
            if graph and splits
            else []
        )
        handles = [arrival.node.register_prehook(arrival) for arrival in found]
        edges = [arrival.asked for arrival in found if arrival.asked is not None]
        try:
            sums.gather(losses, parts, keep=not sound, edges=edges)
        finally:
            for handle in handles:
                handle.remove()
        self._routes, self._suspects, self._received = inbox.routes, inbox.suspects, inbox.received
        self._isolate(losses, parts, sound)
        if self._single is not None:
            self._single.calls.clear()  # those before a bounded sum do not belong to the next one
            if self._watches and not sums.tape.unsettled and not sums.untracked:
                # only untracked uses need it, and it keeps the model's output alive
                self._single.close()
                self._watches = False
        return parts

    def _splits(
        self, losses: Tensor, graph: AutogradGraph
    ) -> dict[UntrackedSource, UntrackedSplit]:
        """Where the gradients of every untracked use are split."""
        if not self._unsettled(graph) and not self._sources(graph):
            self.sums.untracked = set(self._ever)
            return {}
        before = sum(site.without_batch for site in self._reached(graph))
        axes = self._batch_axes(losses, graph)
        sources = self._sources(graph)
        names = {name for source in sources for name in source.names}
        self.sums.untracked = self._ever | names
        if before == sum(site.without_batch for site in self._reached(graph)):
            self._ever |= names  # others may yet run so that they are no longer untracked
        return {source: split_points(graph, axes, source.node) for source in sources}

    def _reached(self, graph: AutogradGraph) -> set[Site]:
        return {node.where[1] for node in graph.taps}

    def _unsettled(self, graph: AutogradGraph) -> bool:
        """Whether these losses reach a layer of which the batch axis is not known. One that they do
        not reach (an unused pooler or head) tells nothing, and adds nothing.
        """
        tape = self.sums.tape
        tape.unsettled = any(not node.where[1].settled for node in graph.taps)
        return tape.unsettled

    def _batch_axes(self, losses: Tensor, graph: AutogradGraph) -> dict[Any, BatchAxis | None]:
        """The batch axis of what arrives at every node; those of all layers are settled by it.
        Known for a graph of the same operations.
        """
        batch, operations = len(losses), graph.operations
        known = self._axes.get(operations)
        if known is not None and not self.sums.tape.unsettled:
            return dict(zip(graph.parents, known, strict=True))
        found = BatchAxes(graph, batch)
        axes = {node: found.of(node) for node in graph.parents}
        fresh = [node for node in graph.taps if not node.where[1].settled]
        for node in fresh:
            _, site, _, shape, _ = node.where
            if not site.settled or batch == 1:
                shape = _shape(node) if shape is None else tuple(shape)
                site.settle(found.of(node, shape), shape, batch)
            elif not site.without_batch and found.of(node, shape) != site.axis:
                site.settle(None, _shape(node), batch)
        if batch > 1:
            while self._refuted(losses, graph, axes, {node.where[1] for node in fresh}):
                pass
            while len(self._axes) >= MOST_GRAPHS:
                del self._axes[next(iter(self._axes))]
            self._axes[operations] = tuple(axes.values())
        self._without_batch |= any(node.where[1].without_batch for node in fresh)
        self._unsettled(graph)
        return axes

    def _refuted(
        self,
        losses: Tensor,
        graph: AutogradGraph,
        axes: dict[Any, BatchAxis | None],
        fresh: set[Site],
    ) -> bool:
        """Whether a gradient belies its axis, which is then taken away: where the losses of some
        examples have no weight, theirs must be exactly zero. A hook of the user's may mix what no
        operation of the graph does.
        """
        idle = torch.arange(len(losses), device=losses.device).mul(0.6180339887).remainder(1) < 0.5
        weights = torch.where(idle, torch.zeros_like(losses), torch.ones_like(losses))
        seen: list[tuple[Site | None, Any, Tensor]] = []

        def look(site: Site | None, node: Any, axis: BatchAxis, g: Tensor | None) -> None:
            if g is not None:
                rows = axis.rows_first(g, len(losses))[idle]
                seen.append((site, node, ((rows != 0) & rows.isfinite()).any()))

        def received(report: LayerReport) -> None:
            site = report.site
            if site in fresh and not site.without_batch and site.axis is not None:
                look(site, None, site.axis, report.grad)

        points = {
            node: axes[node]
            for source in self._sources(graph)
            for node in split_points(graph, axes, source.node).points
            if node is not graph.root
        }

        def watched(node: Any, axis: BatchAxis) -> Any:
            def arrived(grads: tuple[Tensor | None, ...]) -> None:
                for g in grads:
                    look(None, node, axis, g)

            return node.register_prehook(arrived)

        hooks = [watched(node, axis) for node, axis in points.items() if axis is not None]
        try:
            with self.sums.tape.into(received):
                self.sums.backward(losses, list(self.sums.params), True, weights)
        finally:
            for hook in hooks:
                hook.remove()
        wrong = [(site, node) for site, node, mixed in seen if bool(mixed)]
        for site, node in wrong:
            if site is None:
                axes[node] = None
            else:
                site.without_batch = True
        return bool(wrong)

    def _sources(self, graph: AutogradGraph) -> list[UntrackedSource]:
        """Where gradients go that no layer rule explains: parameters still in the graph, and layers
        that run without a batch.
        """
        leaves = [
            UntrackedSource((self.sums.names[p],), node)
            for p, node in graph.leaves.items()
            if p in self.sums.names
        ]
        taps = [(node, node.where) for node in graph.taps if node.where[1].without_batch]
        return leaves + [
            UntrackedSource(
                tuple(self.sums.names[p] for p in where[1].params if p in self.sums.names),
                node,
                where,
            )
            for node, where in taps
        ]

    def _isolate(self, losses: Tensor, parts: Parts, sound: bool) -> None:
        """Below a split one bad example may have spoilt others: run the suspects alone. Layers with
        rows never have that trouble.
        """
        for name in self._suspects & set(parts):
            stored = [part.stored_grads for part in parts[name]]
            own = [grads.isfinite().all() for grads in stored if grads is not None]
            if not own or bool(torch.stack(own).all()):
                continue
            # The example alone gives all that autograd finds for the parameter, and nothing of what
            # layers report.
            if sound or self._received[name] != len(parts[name]) or self._without_batch:
                raise Unsupported(
                    f"{name}: a non-finite gradient outside of a supported layer",
                    "keep the losses finite",
                )
            each = [part.per_example(slice(0, len(losses))) for part in parts[name]]
            total = [sum(each[1:], start=each[0])]
            with self.sums.tape.muted():
                fixed = alone_where_needed(
                    self._single, losses, slice(0, len(losses)), [self.sums.params[name]], total
                )
            parts[name] = [Direct(fixed[0])]


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node._input_metadata[0].shape)


class _Inbox:
    """Takes what arrives at split points."""

    def __init__(self, sums: BoundedSum, parts: Parts) -> None:
        self.sums, self.parts = sums, parts
        self.suspects: set[str] = set()
        self.received: dict[str, int] = {}
        self.routes: dict[str, str] = {}

    def receive(self, name: str, part: Contribution, separate: bool) -> None:
        """Where one bad example may have spoilt others, all parts of the parameter are suspect."""
        self.sums.add(name, part, self.parts)
        self.received[name] = self.received.get(name, 0) + 1
        if not separate:
            self.suspects.add(name)

    def note(self, names: tuple[str, ...], route: str) -> None:
        """A loop somewhere counts more than a vectorised backward elsewhere."""
        self.routes |= {name: min(route, self.routes.get(name, route)) for name in names}
