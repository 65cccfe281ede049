"""Parameters that no layer rule explains: bare ones, functional uses, layers that run on tensors
without a batch.

From the parameter the autograd graph is climbed until a node is met whose incoming gradient still
has one part per example. Below that node examples are mixed, above it they are not: there the
gradient is split, example by example, and sent down again. Which nodes those are follows from the
graph (`batch_axes.py`). At worst it is the losses themselves, which is the batched route.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpfy.gradients.autograd.descent import sent_down
from dpfy.gradients.autograd.graph_nodes import AutogradGraph, Maker
from dpfy.gradients.autograd.split_rules import maker
from dpfy.gradients.autograd.tape import FIRST, BatchAxis
from dpfy.gradients.per_example.arithmetic import row_chunks

SPLIT_ELEMENTS = 2**24
"""How many gradient elements may exist at once while examples are sent down one by one."""


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


def split_points(
    graph: AutogradGraph, axes: Mapping[Any, BatchAxis | None], source: Any
) -> UntrackedSplit:
    """The lowest nodes above `source` whose gradients still have one part per example."""
    found: dict[Any, SplitPoint] = {}
    todo, between = [source], {source}
    while todo:
        for parent, i in graph.parents[todo.pop()]:
            axis = axes[parent]
            if axis is not None:
                found.setdefault(parent, SplitPoint(axis)).inputs.add(i)
            elif parent not in between:
                between.add(parent)
                todo.append(parent)
    for node, point in found.items():
        made = {i: maker(node, i, point.axis) for i in point.inputs}
        point.makers = (
            {i: make for i, make in made.items() if make is not None}
            if None not in made.values()
            else {}
        )
    if _overlapping(found):
        return UntrackedSplit({graph.root: SplitPoint(FIRST)}, between)
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
