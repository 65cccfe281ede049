"""The fast engine: one backward without weight gradients, norms layer by layer, one weighted product per layer.

Book-keeping (Bu, Wang, Zha and Karypis 2023, "Differentially private optimization on large model at small cost"): the per-example
gradient of a layer is a product of its input and its output gradient, so its norm and its weighted sum need no per-example tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import GradientEdge

from dpfy.core.errors import Unsupported
from dpfy.core.values import Bounded
from dpfy.gradients.clip import Clip
from dpfy.gradients.contributions.clipped_sum import Flag, Scaled, joins, weigh
from dpfy.gradients.contributions.contribution import Contribution, Deferred, Direct, SumJob, run_jobs
from dpfy.gradients.contributions.shared import Measured
from dpfy.gradients.contributions.sliced import pieces_of
from dpfy.gradients.contributions.uses import overlapping, together
from dpfy.gradients.cuda_graphs.buffers import Buffers
from dpfy.gradients.cuda_graphs.recorded import Recorder, bucket_size
from dpfy.gradients.engine import Engine, Grads, checked, no_autocast, trainable, zeros
from dpfy.gradients.engines.loop import alone_where_needed, attached, forget
from dpfy.gradients.layers.bare import BARE, bare_rule
from dpfy.gradients.layers.rule import LayerRule
from dpfy.gradients.layers.table import rule_for
from dpfy.gradients.tracing.arrival import Source, arrivals
from dpfy.gradients.tracing.single_example import SingleExample
from dpfy.gradients.tracing.tape import Report, Site, Tape, infer_axis, probe_weights, rows_first
from dpfy.gradients.tracing.untracked import AutogradGraph, Split, SplitPoints, find_split_points

MOST_WAITING = 36
"""How many sums over positions may wait for a common launch: the tensors of normalisation layers are held meanwhile."""

_SITES: weakref.WeakKeyDictionary[nn.Module, tuple[LayerRule, Tape, Site]] = weakref.WeakKeyDictionary()


def _tapped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stands in for ``module.forward`` while an engine is attached; a copy of the module made meanwhile runs its own forward."""
    if torch.compiler.is_compiling():
        return _outside(module, *args, **kwargs)
    entry = _SITES.get(module)
    if entry is None:
        return type(module).forward(module, *args, **kwargs)  # type: ignore[attr-defined]
    rule, tape, site = entry
    return rule.run(module, tape, site, *args, **kwargs)


def _with_aliases(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The same for modules of the user's own: a compiled graph keeps them, and their parameters are then untracked in it."""
    if torch.compiler.is_compiling():
        return type(module).forward(module, *args, **kwargs)  # type: ignore[attr-defined]
    return _tapped(module, *args, **kwargs)


@_disable_dynamo
def _outside(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Outside of a compiled model's graphs: traced, a tap would be bound to the wrong layer or lose its report."""
    return _tapped(module, *args, **kwargs)


class BookkeepingEngine(Engine):
    """Hooks on supported layers; any other use of a parameter is found at every step and goes through the batched route.

    Guarantees: exact for shared parameters and for modules used several times. A use that no layer rule explains is never missed:
    supported layers run with constant weights, so any gradient that autograd still finds for a parameter is such a use.
    The place of the batch in each layer's tensors is measured on the first batch, never assumed.
    """

    name = "bookkeeping"

    def __init__(self) -> None:
        self._params: dict[str, nn.Parameter] | None = None
        self._names: dict[Tensor, str] = {}
        self._single: SingleExample | None = None
        self._tape = Tape()
        self._sites: dict[nn.Module, Site] = {}
        self._without_batch: set[Site] = set()
        self._untracked: set[str] = set()
        self._routes: dict[str, str] = {}
        self._suspects: set[str] = set()
        self._seen: set[str] = set()
        self._several: set[str] = set()
        self._jobs: list[SumJob] = []
        self._split = SplitPoints()
        self._recorder = Recorder()

    def attach(self, model: nn.Module) -> None:
        """Patch the supported layers that have trainable parameters."""
        self.detach()
        self._params = trainable(model)
        self._names = {p: name for name, p in self._params.items()}
        self._tape, self._single = Tape(), SingleExample(model)
        for name, module in model.named_modules():
            rule = rule_for(module) or bare_rule(module)
            if rule is None or not any(p.requires_grad for p in module.parameters()):
                continue
            site = Site(name or type(module).__name__, tuple(module.parameters(recurse=False)), batch_dims=rule.batch_dims)
            self._sites[module] = site
            _SITES[module] = (rule, self._tape, site)
            module.forward = MethodType(_with_aliases if rule is BARE else _tapped, module)  # type: ignore[method-assign]

    def detach(self) -> None:
        """Unpatch every layer and forget the model."""
        for module in list(self._sites):
            self._release(module)
        if self._single is not None:
            self._single.close()
            self._single = None
        self._params, self._names, self._split, self._recorder = None, {}, SplitPoints(), Recorder()
        self._untracked, self._seen, self._several, self._without_batch = set(), set(), set(), set()

    def _release(self, module: nn.Module) -> None:
        self._sites.pop(module, None)
        _SITES.pop(module, None)
        vars(module).pop("forward", None)

    def row_multiple(self, expected: float, device: torch.device) -> int:
        """On a GPU its part of a step is recorded, so random sizes should repeat."""
        return bucket_size(expected) if device.type == "cuda" else 1

    def bounded_sum(self, losses: Tensor, clip: Clip, mask: Tensor | None = None) -> Bounded[Grads]:
        """See :class:`dpfy.gradients.engine.Engine`."""
        if losses.is_cuda and losses.dim() == 1 and len(losses) and self._recorder.on and self.steady:
            mask = checked(losses, mask)
            with torch.no_grad(), no_autocast(losses.device.type):
                return self._recorder.bounded_sum(self, losses, clip, mask)
        weighed = self.weighed(losses, clip, mask)
        if weighed is None:
            return Bounded(zeros(attached(self._params), clip), clip.bound)
        return self.total(weighed)

    def total(self, weighed: Scaled, buffers: Buffers | None = None) -> Bounded[Grads]:
        """The bounded sum, of examples without a finite norm nothing."""
        buffers = Buffers({}, sparse=True) if buffers is None and self.sparse else buffers
        flag = Flag(weighed.sound.device)
        flag.put(weighed.sound)
        flag.mark()
        total = self.summed(weighed, buffers=buffers)
        return total if flag.value() else self.summed(weighed.cleaned(), buffers=buffers)

    def weighed(self, losses: Tensor, clip: Clip, mask: Tensor | None = None) -> Scaled | None:
        """The first half of a bounded sum: every example's multiplier. None if there is nothing to add up."""
        params = attached(self._params)
        mask = checked(losses, mask)
        if not len(losses) or not params:
            return None
        with torch.no_grad(), no_autocast(losses.device.type):
            found = self._contributions(losses, params)
            self.flush()
            weighed = weigh(found, clip, params, mask) if found else None
        forget(self._single)
        if self._single is not None and not self._tape.unsettled and not self._untracked:
            self._single.close()  # only untracked uses need it, and it keeps the model's output alive
        return weighed

    def summed(self, weighed: Scaled, last: bool = False, buffers: Buffers | None = None) -> Bounded[Grads]:
        """The second half: the weighted sums, in the order of the parameters. See :meth:`Scaled.sums`."""
        params = attached(self._params)
        with torch.no_grad(), no_autocast(weighed.scale.device.type):
            sums = weighed.sums(last, buffers)
            for name in params:
                if name not in sums:
                    place = None if buffers is None else buffers.places.get(name)
                    sums[name] = zeros({name: params[name]}, weighed.clip)[name] if place is None else place.zero_()
            total = {name: sums.pop(name) for name in params} | sums
        return Bounded(total, weighed.clip.bound)

    @property
    def steady(self) -> bool:
        """Whether every batch axis is known and every use has its rule: a step then asks the device nothing on its way."""
        return not self._tape.unsettled and not self._untracked and len(self._seen) == len(attached(self._params))

    @property
    def per_example_parameters(self) -> dict[str, str]:
        """The parameters whose gradients went through a part of the graph example by example, in the last batch that was summed.

        "vmap": vectorised over the examples. "loop": one by one, where torch has no vectorised backward.
        """
        return dict(self._routes)

    @property
    def example_by_example(self) -> frozenset[str]:
        """The names in :attr:`per_example_parameters`."""
        return frozenset(self._routes)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters of the attached model."""
        return attached(self._params)

    def identity(self) -> tuple[object, ...]:
        """All that the work on reports depends on besides the reports."""
        return (*self.addresses(), *[p.requires_grad for p in self.parameters.values()], len(self._several))

    def flush(self) -> None:
        """Make the sums that wait for a common launch."""
        run_jobs(self._jobs)
        self._jobs.clear()

    def drop(self) -> None:
        """Forget the sums that wait for a common launch."""
        self._jobs.clear()

    def addresses(self) -> tuple[int, ...]:
        """Where the parameters lie: a graph is good only as long as they stay there."""
        return tuple(p.data_ptr() for p in attached(self._params).values())

    def _contributions(self, losses: Tensor, params: dict[str, nn.Parameter]) -> dict[str, Contribution]:
        """Everything each parameter receives, joined over its uses."""
        parts: dict[str, list[Contribution]] = {}
        unseen = self._seen != set(params)
        graph = AutogradGraph.of(losses) if self._tape.unsettled or self._untracked or unseen else None
        splits = {} if graph is None else self._splits(losses, graph)
        sound = not splits or bool(losses.isfinite().all())
        inbox = _Inbox(self, parts)
        found = arrivals(graph, splits, len(losses), self._tape, self._names, inbox) if graph and splits else []
        handles = [arrival.node.register_prehook(arrival) for arrival in found]
        edges = [edge for arrival in found for edge in arrival.asked]
        try:
            self.report(losses, lambda report: self.explain(report, len(losses), parts), keep=not sound, edges=edges)
        finally:
            for handle in handles:
                handle.remove()
        self._routes, self._suspects = inbox.routes, inbox.suspects
        self._isolate(losses, parts, sound)
        return self.joined(parts)

    def _splits(self, losses: Tensor, graph: AutogradGraph) -> dict[Source, Split]:
        """Where the gradients of every untracked use are split, measured if this batch needs it."""
        sources = self._sources(graph)
        known = [self._split.above(graph, source.key, source.node) for source in sources]
        if self._tape.unsettled or not self._split.settled or None in known:
            sources = self._measure(losses, graph)
            known = [self._split.above(graph, source.key, source.node) for source in sources]
        return {source: split for source, split in zip(sources, known, strict=True) if split is not None}

    def report(
        self,
        losses: Tensor,
        receive: Callable[[Report], None],
        keep: bool = False,
        weights: Tensor | None = None,
        edges: Sequence[GradientEdge] = (),
    ) -> None:
        """Run backward, to `edges` too, and hand every report to `receive`. Functions of untracked parameters are left alone."""
        with self._tape.into(receive):
            names = [name for name in self.parameters if name not in self._untracked]
            missed = self._backward(losses, names, keep, weights, edges)
        if missed:
            listed = ", ".join(sorted(missed))
            raise Unsupported(f"{listed}: a use outside of its layer that appeared after the first batch", "use engine='batched'")

    def joined(self, parts: dict[str, list[Contribution]]) -> dict[str, Contribution]:
        """What every parameter receives, over all its uses."""
        self._seen |= set(parts)
        self._several |= {name for name, uses in parts.items() if overlapping(uses)}
        return {name: together(uses) for name, uses in parts.items()}

    def _backward(
        self, losses: Tensor, names: list[str], keep: bool, weights: Tensor | None = None, edges: Sequence[GradientEdge] = ()
    ) -> set[str]:
        """Run backward to every tap; return the names of parameters that autograd itself still finds."""
        params = attached(self._params)
        weights = torch.ones_like(losses) if weights is None else weights
        targets: Any = [self._tape.anchor, *[params[name] for name in names], *edges]
        # To wake another thread for it, and to be woken by that, takes longer than it gains.
        with torch.autograd.set_multithreading_enabled(False):
            grads = torch.autograd.grad(losses, targets, weights, retain_graph=keep, allow_unused=True)
        return {name for name, g in zip(names, grads[1:], strict=False) if g is not None}

    def explain(self, report: Report, batch: int, parts: dict[str, list[Contribution]]) -> None:
        """Add the contributions of one report to `parts`."""
        if report.site not in self._without_batch:
            for p, contribution in report.explain(report.grad, report.saved, rows_first(report.site, batch, report.grad)):
                if isinstance(contribution, Deferred) and (not self._jobs or self._jobs[-1] is not contribution.job):
                    self._jobs.append(contribution.job)
                self._add(self._names[p], contribution, parts)
            if len(self._jobs) >= MOST_WAITING:
                self.flush()

    def _add(self, name: str, contribution: Contribution, parts: dict[str, list[Contribution]]) -> None:
        """Norms are taken while the layer's tensors are at hand; what is kept may be much smaller than they are. Not of a
        parameter that may have other uses: their norm would then depend on what was kept, and that on the batch."""
        if self._used_once(name) and not any(isinstance(q, Direct | Deferred) or joins(q) for q in pieces_of(contribution)):
            contribution = Measured.of(contribution)
        parts.setdefault(name, []).append(contribution)

    def _used_once(self, name: str) -> bool:
        return name in self._seen and name not in self._several

    def _sources(self, graph: AutogradGraph) -> list[Source]:
        """Where gradients go that no layer rule explains: parameters still in the graph, and layers that run without a batch."""
        leaves = [Source((self._names[p],), node) for p, node in graph.leaves.items() if p in self._names]
        taps = [(node, node.where) for node in graph.taps if node.where[1] in self._without_batch]
        return leaves + [
            Source(tuple(self._names[p] for p in where[1].params if p in self._names), node, where) for node, where in taps
        ]

    def _measure(self, losses: Tensor, graph: AutogradGraph) -> list[Source]:
        """Two backward passes with different weights show where the examples lie, in every layer and above every untracked use."""
        names, weights = list(attached(self._params)), probe_weights(losses)
        reports: list[Report] = []
        with self._tape.into(reports.append):
            self._backward(losses, names, keep=True)
        again = iter(reports)
        with self._tape.into(lambda second: self._compare(next(again), second, weights)):
            self._backward(losses, names, keep=True, weights=weights)
        self._tape.unsettled = not all(report.site.known() for report in reports if report.site not in self._without_batch)
        sources = self._sources(graph)
        self._untracked = {name for source in sources for name in source.names}
        self._split = SplitPoints()
        with self._tape.muted():
            find_split_points(
                self._split, graph, [(s.key, s.node) for s in sources], lambda w: self._backward(losses, names, True, w), weights
            )
        return sources

    def _compare(self, first: Report, second: Report, weights: Tensor) -> None:
        assert first.site is second.site
        if first.site not in self._without_batch and not infer_axis(first.site, first.grad, second.grad, weights):
            self._without_batch.add(first.site)
            first.site.settled = first.site.without_batch = True  # for good: what lies above it is measured with the strays

    def _isolate(self, losses: Tensor, parts: dict[str, list[Contribution]], sound: bool) -> None:
        """Below a split one bad example may have spoilt others: run the suspects alone. Layers with rows never have that trouble."""
        for name in self._suspects & set(parts):
            own = [part for part in parts[name] if isinstance(part, Direct)]
            if not own or bool(torch.stack([part.grads.isfinite().all() for part in own]).all()):
                continue
            if sound or len(own) != len(parts[name]) or self._without_batch:
                raise Unsupported(f"{name}: a non-finite gradient outside of a supported layer", "keep the losses finite")
            total = [sum((part.grads for part in own[1:]), start=own[0].grads)]
            with self._tape.muted():
                fixed = alone_where_needed(self._single, losses, slice(0, len(losses)), [attached(self._params)[name]], total)
            parts[name] = [Direct(fixed[0])]


class _Inbox:
    """Takes what arrives at split points."""

    def __init__(self, engine: BookkeepingEngine, parts: dict[str, list[Contribution]]) -> None:
        self.engine, self.parts = engine, parts
        self.suspects: set[str] = set()
        self.routes: dict[str, str] = {}

    def receive(self, name: str, part: Contribution, separate: bool) -> None:
        """Where one bad example may have spoilt others, all parts of the parameter are suspect."""
        self.engine._add(name, part, self.parts)
        if not separate:
            self.suspects.add(name)

    def note(self, names: tuple[str, ...], route: str) -> None:
        """A loop somewhere counts more than a vectorised backward elsewhere."""
        self.routes |= {name: min(route, self.routes.get(name, route)) for name in names}
