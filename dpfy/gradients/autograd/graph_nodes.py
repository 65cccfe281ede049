"""The autograd graph of a step, and what its nodes tell: the tensors that they saved, shapes, and
where the numbers of a view lie in the tensor that is viewed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpfy.gradients.autograd.tape import BatchAxis
from dpfy.gradients.per_example.contribution import Contribution, Places
from dpfy.gradients.per_example.placed import ViewGradient


@dataclass
class AutogradGraph:
    """The nodes above every node of one autograd graph."""

    root: Any
    parents: dict[Any, list[tuple[Any, int]]] = field(default_factory=dict)
    leaves: dict[Tensor, Any] = field(default_factory=dict)
    taps: list[Any] = field(default_factory=list)

    @property
    def operations(self) -> tuple[str, ...]:
        """What the graph does, in the order in which it was walked."""
        return tuple([node.name() for node in self.parents])

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


Maker = Callable[[Tensor, int], Contribution]
"""The gradient that arrives at a node, and the number of examples, to the contribution at one input
of the node.
"""

Rule = Callable[[Any, int, BatchAxis], Maker | None]
"""A node, the number of its input, and where the batch lies in its gradient, to the maker of
contributions there.
"""


def saved(node: Any, *names: str) -> tuple[Any, ...] | None:
    """Tensors that `node` saved; None if a hook guards them: under activation checkpointing only
    the node itself may unpack them.
    """
    for name in names:
        raw = getattr(node, f"_raw_saved_{name}", None)
        if raw is None or getattr(raw, "unpack_hook", True) is not None:
            return None
    found = tuple(getattr(node, f"_saved_{name}") for name in names)
    return None if any(t is None for t in found) else found


def saved_again(node: Any, name: str) -> Any:
    """A tensor that `node` saved, also under activation checkpointing: read in a backward pass of
    its own, for which the part of the model around it is computed once more. The pass that is under
    way will find it unread.
    """
    if (found := saved(node, name)) is not None:
        return found[0]
    read: list[Any] = []
    with torch.enable_grad():
        start = torch.zeros((), requires_grad=True)
        end = start * 1
    end.register_hook(lambda grad: read.append(getattr(node, f"_saved_{name}")))
    torch.autograd.grad(end, start)
    return read[0]


def input_shape(node: Any, i: int) -> torch.Size:
    """The shape of input `i` of `node`."""
    child, number = node.next_functions[i]
    return torch.Size(child._input_metadata[number].shape)


def output_meta(node: Any, number: int) -> tuple[torch.Size, torch.dtype]:
    meta = node._input_metadata[number]
    return torch.Size(meta.shape), meta.dtype


def placed(node: Any, number: int, part: Contribution) -> Contribution:
    """What arrives at the input of a view from `part` at its output."""
    view, shape, name = output_meta(node, number)[0], input_shape(node, 0), node.name()
    if len(view) == 2 and name in TRANSPOSES and (turned := part.transposed()) is not None:
        return turned
    places = VIEWS[name](node, number, view, shape)

    def key() -> tuple[object, ...]:
        facts = [str(getattr(node, each)) for each in dir(node) if each.startswith("_saved_")]
        return ((name, number, view, shape, tuple(facts)),)

    found = part.through_view(places, view, shape, key)
    if found is None:
        found = ViewGradient(part, places, view, shape, key())
    return _simplified(found) if isinstance(found, ViewGradient) else found


_ORDERS: dict[tuple[object, ...], str] = {}
"""What chains of views come to for a matrix: nothing, a transposition, or something else."""


def _simplified(placed: ViewGradient) -> Contribution:
    """Chains of views that bring a matrix back to itself, or transpose it, as einsum makes them."""
    part, turned_part = placed.part, placed.part.transposed()
    own = part.matrix_shape
    fits = len(placed.shape) == 2 and placed.width == part.width
    if own is None or turned_part is None or not fits:
        return placed
    rows, columns = own
    key = (*placed.key, rows, columns)
    if key not in _ORDERS:
        numbers = torch.arange(rows * columns)
        found = placed.places(numbers.view(1, *placed.view))[0]
        same = found.shape == (rows, columns) and torch.equal(found.flatten(), numbers)
        turned = found.shape == (columns, rows) and torch.equal(found.t().flatten(), numbers)
        _ORDERS[key] = "same" if same else "turned" if turned else ""
    return {"same": part, "turned": turned_part}.get(_ORDERS[key], placed)


def _reshaped(node: Any, number: int, view: torch.Size, shape: torch.Size) -> Places:
    return lambda t: t.reshape(-1, *shape)


def _transposed(node: Any, number: int, view: torch.Size, shape: torch.Size) -> Places:
    first, second = (
        (0, 1)
        if node.name() == "TBackward0"
        else (_dim(d, len(view)) for d in (node._saved_dim0, node._saved_dim1))
    )
    return (lambda t: t) if len(view) < 2 else lambda t: t.transpose(first + 1, second + 1)


def _permuted(node: Any, number: int, view: torch.Size, shape: torch.Size) -> Places:
    dims = [_dim(d, len(view)) for d in node._saved_dims]
    return lambda t: t.permute(0, *[dims.index(d) + 1 for d in range(len(dims))])


def _between(dim: int, cut: slice, shape: torch.Size) -> Places:
    def places(t: Tensor) -> Tensor:
        whole = t.new_zeros(len(t), *shape)
        whole.movedim(dim + 1, 0)[cut] = t.movedim(dim + 1, 0)
        return whole

    return places


def _sliced(node: Any, number: int, view: torch.Size, shape: torch.Size) -> Places:
    dim = _dim(node._saved_dim, len(shape))
    return _between(
        dim,
        slice(
            *slice(
                *[
                    n if n is None else _signed(n)
                    for n in (node._saved_start, node._saved_end, node._saved_step)
                ]
            ).indices(shape[dim])
        ),
        shape,
    )


def _selected(node: Any, number: int, view: torch.Size, shape: torch.Size) -> Places:
    dim = _dim(node._saved_dim, len(shape))
    index = _dim(node._saved_index if node.name() == "SelectBackward0" else number, shape[dim])
    inner = _between(dim, slice(index, index + 1), shape)
    return lambda t: inner(t.unsqueeze(dim + 1))


def _cut_off(node: Any, number: int, view: torch.Size, shape: torch.Size) -> Places:
    dim = _dim(node._saved_dim, len(shape))
    sizes = (
        node._saved_split_sizes
        if node.name() == "SplitWithSizesBackward0"
        else [node._saved_split_size] * number
    )
    start = sum(sizes[:number])
    return _between(dim, slice(start, start + view[dim]), shape)


def _flipped(node: Any, number: int, view: torch.Size, shape: torch.Size) -> Places:
    return lambda t: t.flip([_dim(d, len(shape)) + 1 for d in node._saved_dims])


def _dim(dim: int, count: int) -> int:
    return _signed(dim) % count


def _signed(number: int) -> int:
    """Negative numbers are saved as large ones."""
    return number - 2**64 if number >= 2**63 else number


TRANSPOSES = {"TBackward0", "TransposeBackward0"}

VIEWS: dict[str, Callable[[Any, int, torch.Size, torch.Size], Places]] = {
    **dict.fromkeys(TRANSPOSES, _transposed),
    **dict.fromkeys(
        ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0"),
        _reshaped,
    ),
    **dict.fromkeys(("SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"), _reshaped),
    "PermuteBackward0": _permuted,
    "SliceBackward0": _sliced,
    **dict.fromkeys(("SelectBackward0", "UnbindBackward0"), _selected),
    **dict.fromkeys(("SplitBackward0", "SplitWithSizesBackward0"), _cut_off),
    "FlipBackward0": _flipped,
}
"""Operations that show numbers of their input at other places, each at most once."""
