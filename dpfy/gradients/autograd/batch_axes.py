"""Where the examples lie in every gradient of one autograd graph, found from the graph alone.

The losses have one example a row. From there the batch is followed down, operation by operation:
through views by their strides, through products, normalisations and reductions by what they do to
each dimension. So neither numbers nor their precision matter, and every process finds the same. An
operation that no rule here knows is asked by itself: gradients that are zero for some examples are
sent through it, and what comes out for these examples must be exactly zero.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpfy.gradients.autograd.graph_nodes import AutogradGraph
from dpfy.gradients.autograd.passages import RULES, Rows, Shape, Step, Unknown, viewed
from dpfy.gradients.autograd.tape import FIRST, BatchAxis
from dpfy.gradients.engine import no_reentrant_checkpoints


class BatchAxes:
    """The batch axis of every gradient in one graph."""

    def __init__(self, graph: AutogradGraph, batch: int, start: Rows | None = None) -> None:
        self.graph, self.batch = graph, batch
        self._rows: dict[Any, dict[int, Rows | None]] = {graph.root: {0: start or Rows(0)}}
        waiting = {node: len(above) for node, above in graph.parents.items()}
        ready = [graph.root]
        while ready:
            node = ready.pop()
            self._down(node)
            for child, _ in node.next_functions:
                if child is not None:
                    waiting[child] -= 1
                    if not waiting[child]:
                        ready.append(child)

    def rows(self, node: Any) -> Rows | None:
        """Where the examples lie in what arrives at the first output of `node`."""
        return self._rows.get(node, {}).get(0)

    def of(self, node: Any, shape: Shape | None = None) -> BatchAxis | None:
        """The axis that all gradients have that arrive at `node`, seen in `shape` where given; None
        if there is none.
        """
        if node is self.graph.root:
            return FIRST
        found = {self._axis(node, number, rows, shape) for number, rows in self._rows[node].items()}
        return found.pop() if len(found) == 1 else None

    def _axis(
        self, node: Any, number: int, rows: Rows | None, shape: Shape | None
    ) -> BatchAxis | None:
        own, order = _shape(node, number), getattr(node, "order", None)
        if rows is not None and shape is not None:
            own, rows = tuple(shape), viewed(own, tuple(shape), rows, self.batch)
        if rows is None:
            return None
        if order is not None:  # reported in another order than it lies in
            same = torch.equal(
                rows.of(own[rows.dim], self.batch)[order.cpu()], torch.arange(self.batch)
            )
            return FIRST if rows.dim == 0 and same else None
        return rows.axis(own, self.batch)

    def _down(self, node: Any) -> None:
        arrived = self._rows[node]
        edges = [
            (i, child, number)
            for i, (child, number) in enumerate(node.next_functions)
            if child is not None
        ]
        try:
            sent = [
                [
                    self._one(node, which, rows, i, _shape(child, number))
                    for which, rows in arrived.items()
                ]
                for i, child, number in edges
            ]
        except Unknown:
            sent = [[rows] for rows in _asked(node, arrived, edges, self.batch)]
        for (_, child, number), found in zip(edges, sent, strict=True):
            given = self._rows.setdefault(child, {})
            for rows in found:
                before = given.get(number, rows)
                given[number] = rows if before == rows else self._both(before, rows, child, number)

    def _both(self, a: Rows | None, b: Rows | None, node: Any, number: int) -> Rows | None:
        """Where the examples lie in a sum of two gradients: those that lack some rows may be told
        by others.
        """
        if a is None or b is None or a.dim != b.dim or not (a.owners or b.owners):
            return None
        size = _shape(node, number)[a.dim]
        first, second = (rows.of(size, self.batch) for rows in (a, b))
        if bool(((first != second) & (first >= 0) & (second >= 0)).any()):
            return None
        owner = first.where(first >= 0, second)
        return _ordered(a.dim, owner, owner >= 0, self.batch)

    def _one(self, node: Any, number: int, rows: Rows | None, i: int, shape: Shape) -> Rows | None:
        if rows is None:
            return None
        rule = RULES.get(node.name())
        if rule is None:
            raise Unknown
        found = rule(Step(node, number, _shape(node, number), i, shape, self.batch), rows)
        return found if found is not None and found.fits(shape, self.batch) else None


def _shape(node: Any, number: int) -> Shape:
    return tuple(node._input_metadata[number].shape)


def _asked(
    node: Any, arrived: dict[int, Rows | None], edges: list[tuple[int, Any, int]], batch: int
) -> list[Rows | None]:
    """Where the examples lie at each edge, from what the operation does by itself to gradients that
    are zero for some of them.

    Guarantees: all examples are distinguished: a row is taken for one example's only if no other
    example's gradient reached it.
    """
    own = {number: rows for number, rows in arrived.items() if rows is not None}
    if batch < 2 or len(own) < len(arrived):
        return [None] * len(edges)
    outputs = [GradientEdge(node, number) for number in own]
    targets = [GradientEdge(child, number) for _, child, number in edges]
    given = [_full(node._input_metadata[number]) for number in own]
    owners = [
        rows.of(g.shape[rows.dim], batch) for g, rows in zip(given, own.values(), strict=True)
    ]
    reached: list[list[list[Tensor]]] = []
    for bit in range((batch - 1).bit_length()):
        for value in (0, 1):
            sent = [
                _masked(g, rows.dim, (each >= 0) & (each >> bit & 1 == value))
                for g, rows, each in zip(given, own.values(), owners, strict=True)
            ]
            try:
                with torch.autograd.set_multithreading_enabled(False), no_reentrant_checkpoints():
                    grads = torch.autograd.grad(
                        outputs, targets, sent, retain_graph=True, allow_unused=True
                    )
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, NotImplementedError):
                return [None] * len(edges)
            reached.append([[] if g is None else _reached(g) for g in grads])
    first = next(iter(own.values()))
    return [_decoded([each[k] for each in reached], first, batch) for k in range(len(edges))]


def _full(meta: Any) -> Tensor:
    """A gradient without zeros, of numbers that do not cancel."""
    shape = tuple(meta.shape)
    numbers = torch.arange(prod(shape), dtype=torch.float64, device=meta.device).mul_(0.6180339887)
    return numbers.remainder_(1.0).add_(0.5).view(shape).to(meta.dtype)


def _masked(t: Tensor, dim: int, kept: Tensor) -> Tensor:
    kept = kept.to(t.device).view(-1, *[1] * (t.dim() - dim - 1))
    return torch.where(kept, t, t.new_zeros(()))


def _reached(grad: Tensor) -> list[Tensor]:
    """For every dimension, which of its indices have a number other than zero."""
    if hasattr(grad, "full_tensor"):  # in parts on several devices
        grad = grad.full_tensor()
    there = (grad.to_dense() if grad.is_sparse else grad) != 0
    return [
        there.movedim(dim, 0).flatten(1).any(1).cpu() if there.dim() > 1 else there.cpu()
        for dim in range(there.dim())
    ]


def _decoded(reached: list[list[Tensor]], first: Rows, batch: int) -> Rows | None:
    """From what examples with a zero and with a one in each bit of their number reached."""
    found: list[Rows] = []
    for dim in range(len(reached[0])):
        zeros, ones = ([each[dim] for each in reached[value::2]] for value in (0, 1))
        if any(bool((a & b).any()) for a, b in zip(zeros, ones, strict=True)):
            continue
        owner = torch.zeros(len(ones[0]), dtype=torch.long)
        for bit, b in enumerate(ones):
            owner += b.long() << bit
        told = zeros[0] | ones[0]
        if bool(told.any()):
            found.append(_ordered(dim, owner, told, batch))
    found.sort(key=lambda rows: (rows != first, bool(rows.owners), rows.dim))
    return found[0] if found else None


def _ordered(dim: int, owner: Tensor, told: Tensor, batch: int) -> Rows:
    """Rows of these owners, as far as they are told, in a regular order if there is one."""
    size = len(owner)
    for inner in range(1, size // batch + 1) if len(owner[told].unique()) > 1 else ():
        rows = Rows(dim, inner)
        if size % (inner * batch) == 0 and torch.equal(rows.of(size, batch)[told], owner[told]):
            return rows
    return Rows(dim, 1, tuple(owner.where(told, -1).tolist()))
