"""Parameters that no layer rule explains: bare ones, functional uses, layers that run on tensors
without a batch.

From the parameter the autograd graph is climbed until a node is met whose incoming gradient still
has one part per example. Below that node examples are mixed, above it they are not: there the
gradient is split, example by example, and sent down again. Which nodes those are is measured on the
first batch, by two backward passes with different weights on the losses. At worst it is the losses
themselves, which is the batched route.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpfy.gradients.autograd.descent import sent_down
from dpfy.gradients.autograd.graph_nodes import Maker
from dpfy.gradients.autograd.split_rules import maker
from dpfy.gradients.autograd.tape import BATCH_AXES, BatchAxis, fitting_axes, tells
from dpfy.gradients.per_example.arithmetic import row_chunks

Path = tuple[tuple[str, int], ...]
"""How a node is reached from a source: the names of the nodes on the way up, and by which input
each was entered.
"""

AGREEING = 3
"""Batches that must tell the same before it counts as known."""

SPLIT_ELEMENTS = 2**24
"""How many gradient elements may exist at once while examples are sent down one by one."""


@dataclass
class AutogradGraph:
    """The nodes above every node of one autograd graph."""

    root: Any
    parents: dict[Any, list[tuple[Any, int]]] = field(default_factory=dict)
    leaves: dict[Tensor, Any] = field(default_factory=dict)
    taps: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, losses: Tensor) -> AutogradGraph:
        """Walk the graph under `losses` once."""
        graph = cls(losses.grad_fn)
        graph.parents[graph.root] = []
        todo = [graph.root]
        while todo:
            node = todo.pop()
            if hasattr(node, "variable"):
                graph.leaves[node.variable] = node
            elif hasattr(node, "where"):
                graph.taps.append(node)
            for i, (child, _) in enumerate(node.next_functions):
                if child is None:
                    continue
                if child not in graph.parents:
                    graph.parents[child] = []
                    todo.append(child)
                graph.parents[child].append((node, i))
        return graph

    def above(self, targets: Iterable[Any], known: Collection[Any] = ()) -> set[Any]:
        """The nodes from which one of `targets` can be reached, those targets with them, but for
        what lies above `known` ones.
        """
        todo = [target for target in targets if target in self.parents]
        seen = set(todo)
        while todo:
            for parent, _ in self.parents[todo.pop()]:
                if parent not in seen and parent not in known:
                    seen.add(parent)
                    todo.append(parent)
        return seen


@dataclass
class SplitPoint:
    """A node of the split: how the examples lie in its incoming gradient, and by which of its
    inputs the source is reached (if known).

    `makers`: how each of these inputs gets its contributions, if all have a rule.
    """

    axis: BatchAxis
    inputs: set[int] = field(default_factory=set)
    makers: dict[int, Maker] = field(default_factory=dict)

    def edges(self, node: Any) -> list[GradientEdge]:
        """Where the gradients go that are asked for at this point."""
        return [
            GradientEdge(*edge)
            for i, edge in enumerate(node.next_functions)
            if edge[0] and (i in self.inputs or not self.inputs)
        ]


@dataclass
class UntrackedSplit:
    """The split points above one source, and the nodes between it and them, the source itself with
    them.
    """

    points: dict[Any, SplitPoint]
    between: set[Any]


@dataclass
class SplitPoints:
    """Where the gradients of one kind of source are split: paths known to be separable (and how),
    and paths known not to be.
    """

    separable: dict[Path, BatchAxis] = field(default_factory=dict)
    mixed: set[Path] = field(default_factory=set)
    untold: set[Path] = field(default_factory=set)
    """Paths of which the batch did not tell: their sources are split at the losses, until another
    batch does.
    """
    told: bool = True
    """Whether the last batch that was measured told all of it."""
    batches: int = 0
    """How many batches told it so far."""

    @property
    def settled(self) -> bool:
        """Whether enough batches agreed: by chance, one may look as if numbers of a parameter
        belonged to examples.
        """
        return self.told and self.batches >= AGREEING

    def above(self, graph: AutogradGraph, name: str, source: Any) -> UntrackedSplit | None:
        """The split points above `source` in this graph; None if the graph has a path not seen
        before.
        """
        found: dict[Any, SplitPoint] = {}
        frontier: list[tuple[Any, Path]] = [(source, ((name, 0),))]
        between = {source}
        while frontier:
            node, path = frontier.pop()
            for parent, i in graph.parents[node]:
                way = (*path, (parent.name(), i))
                if way in self.untold:
                    return UntrackedSplit({graph.root: SplitPoint(BATCH_AXES[0])}, between)
                if way in self.separable:
                    found.setdefault(parent, SplitPoint(self.separable[way])).inputs.add(i)
                elif way not in self.mixed:
                    return None
                elif parent not in between:
                    between.add(parent)
                    frontier.append((parent, way))
        for node, point in found.items():
            made = {i: maker(node, i, point.axis) for i in point.inputs}
            point.makers = (
                {i: make for i, make in made.items() if make is not None}
                if None not in made.values()
                else {}
            )
        if _overlapping(found):
            return UntrackedSplit({graph.root: SplitPoint(BATCH_AXES[0])}, between)
        return UntrackedSplit(found, between)


def _overlapping(points: dict[Any, SplitPoint]) -> bool:
    """Whether gradients sent down from one of the points would pass through another, where they are
    counted too.

    Points with a rule hand gradients to the inputs that lead to the source, others send them
    wherever autograd does.
    """
    if len(points) < 2:
        return False
    todo = [
        edge.node
        for node, point in points.items()
        for edge in (point if point.makers else SplitPoint(point.axis)).edges(node)
    ]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node in points:
            return True
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                todo.append(child)
    return False


Arrived = dict[Any, tuple[Tensor | None, ...]]


def arriving_gradients(nodes: Iterable[Any], run: Callable[[], object]) -> Arrived:
    """The gradients that arrive at `nodes` while `run` goes backward."""
    seen: Arrived = {}

    def keeper(node: Any) -> Callable[[tuple[Tensor | None, ...]], None]:
        def keep(grads: tuple[Tensor | None, ...]) -> None:
            seen[node] = grads

        return keep

    handles = [node.register_prehook(keeper(node)) for node in nodes]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def find_split_points(
    points: SplitPoints,
    graph: AutogradGraph,
    sources: list[tuple[str, Any]],
    backward: Callable[[Tensor | None], object],
    weights: Tensor,
) -> None:
    """Measure, level by level above the named sources, which nodes still have one part per example;
    remember it in `points`.

    Zero gradients tell nothing, and one example alone neither: then the split is right for this
    batch but not settled.
    """
    level: dict[Any, list[Path]] = {}
    for name, source in sources:
        level.setdefault(source, []).append(((name, 0),))
    points.told, points.untold = len(weights) > 1, set()
    while level:
        above: dict[Any, list[Path]] = {}
        for node, paths in level.items():
            for parent, i in graph.parents[node]:
                above.setdefault(parent, []).extend((*path, (parent.name(), i)) for path in paths)
        plain = arriving_gradients(above, lambda: backward(None))
        tilted = arriving_gradients(above, lambda: backward(weights))
        for node, paths in above.items():
            axes, told = [BATCH_AXES[0]], True
            if node is not graph.root:
                axes, told = _common_axes(plain.get(node, ()), tilted.get(node, ()), weights)
            points.told = points.told and told
            for path in paths:
                _learn(points, path, axes[0] if axes else None, told)
        mixed = {node: [p for p in paths if p in points.mixed] for node, paths in above.items()}
        level = {
            node: [p for p in paths if p not in points.untold] for node, paths in mixed.items()
        }
        level = {node: paths for node, paths in level.items() if paths}
    points.batches += points.told


def _learn(points: SplitPoints, path: Path, axis: BatchAxis | None, told: bool) -> None:
    """A path is separable only if every node ever reached by it was, in the same way, in every
    batch that told.
    """
    if not told:
        points.untold.add(path)
    elif axis is not None and path not in points.mixed and points.separable.get(path, axis) is axis:
        points.separable[path] = axis
    else:
        points.separable.pop(path, None)
        points.mixed.add(path)


def _common_axes(
    plain: tuple[Tensor | None, ...], tilted: tuple[Tensor | None, ...], weights: Tensor
) -> tuple[list[BatchAxis], bool]:
    """The axes along which every gradient that arrived at a node is separable, and whether the
    gradients tell that.
    """
    pairs = [(a, b) for a, b in zip(plain, tilted, strict=True) if a is not None and b is not None]
    fitting = [fitting_axes(a, b, weights) for a, b in pairs]
    good = [axis for axis in BATCH_AXES if fitting and all(axis in found for found in fitting)]
    return good, len(good) <= 1 and all(
        any(tells(axis, a, weights) for a, _ in pairs) for axis in good
    )


def split_per_example(
    node: Any, point: SplitPoint, grads: tuple[Tensor | None, ...], target: Any, batch: int
) -> tuple[Tensor | None, str]:
    """Per-example gradients at `target` (a parameter or an edge) from the gradients that arrive at
    `node`, and how they were made.

    Every example's part is sent down by itself, with zeros in the place of all others. Where one of
    them is not finite it may spoil the others' parts.
    """
    arriving = {i: g for i, g in enumerate(grads) if g is not None}
    some = next(iter(arriving.values()))
    zero, spread = some.new_zeros(()), point.axis.spread
    pieces, routes = [], {"vmap"}
    for rows in row_chunks(batch, sum(g.numel() for g in arriving.values()), SPLIT_ELEMENTS):
        picks = torch.zeros(rows.stop - rows.start, batch, dtype=torch.bool, device=some.device)
        picks[torch.arange(len(picks)), torch.arange(rows.start, rows.stop)] = True
        sent = [torch.where(spread(picks, g), g, zero.to(g.dtype)) for g in arriving.values()]
        (piece,), route = sent_down([GradientEdge(node, i) for i in arriving], sent, [target])
        pieces.append(piece)
        routes.add(route)
    found = [piece for piece in pieces if piece is not None]
    return torch.cat(found) if found else None, min(routes)
