"""What happens at a split point when its gradient arrives: every example's part is found, for all
parameters below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpfy.core.errors import Unsupported
from dpfy.gradients.autograd.descent import Descent, small_table
from dpfy.gradients.autograd.graph_nodes import AutogradGraph
from dpfy.gradients.autograd.tape import SAME_PLACE, Tape
from dpfy.gradients.autograd.untracked import (
    SplitPoint,
    UntrackedSplit,
    split_per_example,
)
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.outer import Direct


@dataclass(frozen=True, eq=False)
class UntrackedSource:
    """A node whose gradient no layer rule explains: a parameter's own, or the tap of a layer that
    runs without a batch.
    """

    names: tuple[str, ...]
    node: Any
    where: tuple[Any, ...] | None = None

    @property
    def target(self) -> Any:
        """What autograd is asked for."""
        return self.node.variable if self.where is None else GradientEdge(self.node, 0)

    @cached_property
    def saved(self) -> tuple[Tensor, ...]:
        """What the layer saved; under activation checkpointing it may be read only once."""
        return self.node.saved_tensors  # type: ignore[no-any-return]

    def parts(
        self, part: Contribution, names: Mapping[Tensor, str], separate: bool
    ) -> list[tuple[str, Contribution]]:
        """Contributions to parameters from a contribution to this node. `separate`: row i was made
        from example i alone.
        """
        if self.where is None:
            return [(self.names[0], part)]
        (_, _, explain, shape, _), saved = self.where, self.saved
        grads = part.per_example(slice(0, part.batch))
        stacked = grads.reshape(
            len(grads), *(self.node._input_metadata[0].shape if shape is None else shape)
        )
        if len(saved) == 1 and not saved[0].is_floating_point():
            # A table looked up at the same places for every example (position embeddings): all
            # examples at once.
            found = explain(
                stacked, saved, lambda t: t if t is stacked else t.expand(len(stacked), *t.shape)
            )
            # more positions than rows (relative position biases): a table for every example
            found = [(p, small_table(q)) for p, q in found]
            return [
                (names[p], q if separate else Direct(q.per_example(slice(0, len(stacked)))))
                for p, q in found
            ]
        rows: dict[Tensor, list[Tensor]] = {}
        for g in stacked:
            for p, each in explain(g, saved, lambda t: t[None]):
                rows.setdefault(p, []).append(each.per_example(slice(0, 1))[0])
        return [(names[p], Direct(torch.stack(each))) for p, each in rows.items()]


class Receiver(Protocol):
    """Who is told what arrives."""

    def receive(self, name: str, part: Contribution, separate: bool) -> None:
        """A contribution to parameter `name`."""
        ...

    def note(self, names: tuple[str, ...], route: str) -> None:
        """The gradients of `names` were sent through the graph example by example: by "vmap" or in
        a "loop".
        """
        ...


@dataclass
class Arrival:
    """A hook at one split point, for all sources that are split there."""

    node: Any
    batch: int
    tape: Tape
    names: Mapping[Tensor, str]
    receiver: Receiver
    uses: list[tuple[UntrackedSource, SplitPoint, set[Any]]] = field(default_factory=list)
    asked: GradientEdge | None = None
    """An edge below the node that backward must be asked for, because it would not come here
    otherwise.
    """
    awake: set[Any] = field(default_factory=set)
    """Nodes that run in the backward pass anyway."""

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        """Take the gradients apart."""
        if self.tape.passive:
            return
        with self.tape.muted():
            for g in grads:
                if g is not None and not all(
                    point.axis.fits(g, self.batch) for _, point, _ in self.uses
                ):
                    name, axis = self.uses[0][0].names[0], self.uses[0][1].axis
                    what = (
                        f"{name}: a batch that lies in the {axis.name} at first and elsewhere "
                        f"later (shape {list(g.shape)})"
                    )
                    raise Unsupported(what, SAME_PLACE)
            self._by_rule(grads[0])
            for source, point, _ in self.uses:
                if not point.makers:
                    self._one_by_one(source, point, grads)

    def _by_rule(self, grad: Tensor | None) -> None:
        by_input: dict[int, list[tuple[UntrackedSource, SplitPoint, set[Any]]]] = {}
        for use in self.uses:
            for i in use[1].makers:
                by_input.setdefault(i, []).append(use)
        for i, uses in by_input.items() if grad is not None else ():
            assert grad is not None
            sources = {source.node: source for source, _, _ in uses}
            between = set().union(*[nodes for _, _, nodes in uses])
            names = tuple(name for source in sources.values() for name in source.names)
            descent = Descent(
                list(sources),
                between,
                partial(self.receiver.note, names),
                bool(between & self.awake),
            )
            child, number = self.node.next_functions[i]
            for goal, part in descent.down(child, number, uses[0][1].makers[i](grad, self.batch)):
                self._hand_out(sources[goal], part, separate=True)

    def _one_by_one(
        self, source: UntrackedSource, point: SplitPoint, grads: tuple[Tensor | None, ...]
    ) -> None:
        found, route = split_per_example(self.node, point, grads, source.target, self.batch)
        if found is not None:
            self.receiver.note(source.names, route)
            self._hand_out(source, Direct(found), separate=False)

    def _hand_out(self, source: UntrackedSource, part: Contribution, separate: bool) -> None:
        for name, each in source.parts(part, self.names, separate):
            self.receiver.receive(name, each, separate)


def arrivals(
    graph: AutogradGraph,
    splits: Mapping[UntrackedSource, UntrackedSplit],
    batch: int,
    tape: Tape,
    names: Mapping[Tensor, str],
    receiver: Receiver,
) -> list[Arrival]:
    """What to do at every split point. Backward runs to the tape's anchor, and to the edges that
    the arrivals ask for: the smallest below a node that it would not come to, so that no gradient
    is made without effect.
    """
    awake = graph.above(node for leaf, node in graph.leaves.items() if leaf is tape.anchor)
    found: dict[Any, Arrival] = {}
    for source, split in splits.items():
        for node, point in split.points.items():
            arrival = found.setdefault(
                node, Arrival(node, batch, tape, names, receiver, awake=awake)
            )
            arrival.uses.append((source, point, split.between))
    for node, arrival in sorted(
        found.items(), key=lambda item: item[0]._sequence_nr()
    ):  # what ran first lies lowest
        if node not in awake:
            arrival.asked = min(
                (GradientEdge(*edge) for edge in node.next_functions if edge[0] is not None),
                key=_elements,
            )
            awake |= graph.above([node], awake)
    return list(found.values())


def _elements(edge: GradientEdge) -> int:
    return torch.Size(edge.node._input_metadata[edge.output_nr].shape).numel()
