"""Parameters that no layer rule explains: bare ones, functional uses, layers that run on tensors without a batch.

From the parameter the autograd graph is climbed until a node is met whose incoming gradient still has one part per example. Below
that node examples are mixed, above it they are not: there the gradient is split, example by example, and sent down again.
Which nodes those are is measured on the first batch, by two backward passes with different weights on the losses. At worst it is
the losses themselves, which is the batched route.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpfy.core.errors import Unsupported
from dpfy.gradients.contributions.contribution import row_chunks
from dpfy.gradients.tracing.tape import BATCH_AXES, BatchAxis, fitting_axes

Path = tuple[tuple[str, int], ...]
"""How a node is reached from a source: the names of the nodes on the way up, and by which input each was entered."""

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

    def below(self, node: Any, target: Any) -> bool:
        """Whether `target` can be reached from `node`."""
        seen, todo = {target}, [target]
        while todo:
            for parent, _ in self.parents[todo.pop()]:
                if parent is node:
                    return True
                if parent not in seen:
                    seen.add(parent)
                    todo.append(parent)
        return False


@dataclass(frozen=True)
class SplitPoint:
    """A node of the split: how the examples lie in its incoming gradient, and by which of its inputs the source is reached (if known)."""

    axis: BatchAxis
    inputs: frozenset[int] = frozenset()


@dataclass
class SplitPoints:
    """Where the gradients of one kind of source are split: paths known to be separable (and how), and paths known not to be."""

    separable: dict[Path, BatchAxis] = field(default_factory=dict)
    mixed: set[Path] = field(default_factory=set)
    settled: bool = True

    def nodes(self, graph: AutogradGraph, name: str, source: Any) -> dict[Any, SplitPoint] | None:
        """The split points above `source` in this graph; None if the graph has a path not seen before."""
        found: dict[Any, SplitPoint] = {}
        frontier: list[tuple[Any, Path]] = [(source, ((name, 0),))]
        seen = {source}
        while frontier:
            node, path = frontier.pop()
            for parent, i in graph.parents[node]:
                way = (*path, (parent.name(), i))
                if way in self.separable:
                    before = found[parent].inputs if parent in found else frozenset()
                    found[parent] = SplitPoint(self.separable[way], before | {i})
                elif way not in self.mixed:
                    return None
                elif parent not in seen:
                    seen.add(parent)
                    frontier.append((parent, way))
        if any(graph.below(a, b) for a in found for b in found if a is not b):
            return {graph.root: SplitPoint(BATCH_AXES[0])}
        return found


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
    """Measure, level by level above the named sources, which nodes still have one part per example; remember it in `points`.

    Zero gradients tell nothing, and one example alone neither: then the split is right for this batch but not settled.
    """
    level: dict[Any, list[Path]] = {}
    for name, source in sources:
        level.setdefault(source, []).append(((name, 0),))
    points.settled = len(weights) > 1
    while level:
        above: dict[Any, list[Path]] = {}
        for node, paths in level.items():
            for parent, i in graph.parents[node]:
                above.setdefault(parent, []).extend((*path, (parent.name(), i)) for path in paths)
        plain = arriving_gradients(above, lambda: backward(None))
        tilted = arriving_gradients(above, lambda: backward(weights))
        for node, paths in above.items():
            axes = [BATCH_AXES[0]] if node is graph.root else _common_axes(plain.get(node, ()), tilted.get(node, ()), weights)
            points.settled = points.settled and len(axes) <= 1
            for path in paths:
                _learn(points, path, axes[0] if axes else None)
        mixed = {node: [p for p in paths if p in points.mixed] for node, paths in above.items()}
        level = {node: paths for node, paths in mixed.items() if paths}


def _learn(points: SplitPoints, path: Path, axis: BatchAxis | None) -> None:
    """A path is separable only if every node ever reached by it was, in the same way."""
    if axis is not None and path not in points.mixed and points.separable.get(path, axis) is axis:
        points.separable[path] = axis
    else:
        points.separable.pop(path, None)
        points.mixed.add(path)


def _common_axes(plain: tuple[Tensor | None, ...], tilted: tuple[Tensor | None, ...], weights: Tensor) -> list[BatchAxis]:
    """The axes along which every gradient that arrived at a node is separable."""
    pairs = [(a, b) for a, b in zip(plain, tilted, strict=True) if a is not None and b is not None]
    fitting = [fitting_axes(a, b, weights) for a, b in pairs]
    return [axis for axis in BATCH_AXES if fitting and all(axis in found for found in fitting)]


@dataclass(frozen=True)
class PerExample:
    """Per-example gradients at a source, [batch, ...], or None if there are none. `separate`: row i was made from example i alone, so
    that it is not finite only where that example is to blame."""

    grads: Tensor | None
    separate: bool = False


def split_per_example(node: Any, point: SplitPoint, grads: tuple[Tensor | None, ...], target: Any, batch: int) -> PerExample:
    """Per-example gradients at `target` (a parameter or an edge) from the gradients that arrive at `node`."""
    arriving = {i: g for i, g in enumerate(grads) if g is not None}
    pieces: list[Tensor | None] = []
    if (own := own_rows(node, point, arriving, batch)) is not None:
        below, each = own
        if below.node is getattr(target, "node", None) or getattr(below.node, "variable", None) is target:
            return PerExample(each, separate=True)
        meant = each.to(below.node._input_metadata[below.output_nr].dtype)
        for rows in row_chunks(batch, meant[0].numel(), SPLIT_ELEMENTS):
            pieces.append(_sent_down([below], [meant[rows]], target))
    else:
        some = next(iter(arriving.values()))
        zero, spread = some.new_zeros(()), point.axis.spread
        for rows in row_chunks(batch, sum(g.numel() for g in arriving.values()), SPLIT_ELEMENTS):
            picks = torch.zeros(rows.stop - rows.start, batch, dtype=torch.bool, device=some.device)
            picks[torch.arange(len(picks)), torch.arange(rows.start, rows.stop)] = True
            sent = [torch.where(spread(picks, g), g, zero.to(g.dtype)) for g in arriving.values()]
            pieces.append(_sent_down([GradientEdge(node, i) for i in arriving], sent, target))
    found = [piece for piece in pieces if piece is not None]
    return PerExample(torch.cat(found) if found else None)


def _sent_down(outputs: list[GradientEdge], sent: list[Tensor], target: Any) -> Tensor | None:
    """A vectorised backward from `outputs` to `target`: one row of `sent` at a time."""
    try:
        (piece,) = torch.autograd.grad(outputs, [target], sent, retain_graph=True, allow_unused=True, is_grads_batched=True)
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Unsupported(f"a vectorised backward through this model ({first})", "use engine='loop'") from error
    return None if piece is None else piece.detach()


def own_rows(node: Any, point: SplitPoint, arriving: dict[int, Tensor], batch: int) -> tuple[GradientEdge, Tensor] | None:
    """The gradients of each example at the one input of `node` that leads to the source, where `node` only spreads it over the batch.

    Position embeddings are added, scales multiplied, class tokens expanded: there the part of an example is its own row of the
    incoming gradient (times what it was multiplied by), summed to the input's shape. No other example is touched, so that one that
    is not finite spoils nobody. Returns the edge below and [batch, *input]; None if `node` does something else.
    """
    if point.axis is BATCH_AXES[1] or len(point.inputs) != 1 or list(arriving) != [0]:
        return None
    (i,) = point.inputs
    child, number = node.next_functions[i]
    shape, grad = torch.Size(child._input_metadata[number].shape), arriving[0]
    extra = grad.dim() - len(shape)
    if node.name() not in SPREADING or extra < 0 or (extra == 0 and shape[0] != 1):
        return None
    local = SPREADING[node.name()](node, i, grad)
    if local is None or local.is_complex():
        return None
    rows = len(grad)  # of one example there may be several
    kept = (rows, *[1] * (extra - 1), *(shape if extra else shape[1:]))
    summed = [j for j in range(1, local.dim()) if kept[j] == 1 and local.shape[j] > 1]
    wide = torch.float64 if local.dtype == torch.float64 else torch.float32
    each = local.sum(summed, keepdim=True, dtype=wide) if summed else local
    each = each.reshape(rows, *shape)
    return GradientEdge(child, number), each if rows == batch else point.axis.rows_first(each, batch).sum(1)


def _added(node: Any, i: int, grad: Tensor) -> Tensor:
    return grad if i == 0 or node._saved_alpha == 1 else grad * node._saved_alpha


def _multiplied(node: Any, i: int, grad: Tensor) -> Tensor | None:
    saved = _read(node, "other" if i == 0 else "self")
    return None if saved is None else grad * saved[0]


def _layer_norm(node: Any, i: int, grad: Tensor) -> Tensor | None:
    """Input 1 is the scale, input 2 the shift."""
    saved = _read(node, "input", "result1", "result2") if i == 1 else None
    if saved is None:
        return grad if i == 2 else None
    x, mean, rstd = saved
    return grad * ((x - mean) * rstd)


def _group_norm(node: Any, i: int, grad: Tensor) -> Tensor | None:
    """As for LayerNorm, but with the channels brought to the end."""
    saved = _read(node, "input", "result1", "result2") if i == 1 else None
    if saved is not None:
        x, mean, rstd = (t.reshape(len(grad), node._saved_group, -1) for t in saved)
        grad = grad * ((x - mean) * rstd).view_as(grad)
    return grad.movedim(1, -1) if i == 2 or saved is not None else None


def _read(node: Any, *names: str) -> tuple[Tensor, ...] | None:
    """Tensors that `node` saved; None if a hook guards them: under activation checkpointing only the node itself may unpack them."""
    if any(getattr(getattr(node, f"_raw_saved_{name}"), "unpack_hook", True) is not None for name in names):
        return None
    return tuple(getattr(node, f"_saved_{name}") for name in names)


SPREADING: dict[str, Callable[[Any, int, Tensor], Tensor | None]] = {
    "ExpandBackward0": lambda node, i, grad: grad,
    "AddBackward0": _added,
    "MulBackward0": _multiplied,
    "NativeLayerNormBackward0": _layer_norm,
    "NativeGroupNormBackward0": _group_norm,
}
"""Operations that spread one value over the batch, to the gradient at an input before it is summed to the input's shape."""
