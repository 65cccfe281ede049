"""From the place where a function of parameters meets the batch down to the parameters themselves.

A contribution is taken through the nodes of the autograd graph without being written out: views and
slices put it elsewhere, sums pass it on, scales and matrix products change one of its factors. What
has no rule here is written out, some examples at a time, and sent through the rest of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpfy.core.errors import Unsupported
from dpfy.gradients.autograd.graph_nodes import (
    VIEWS,
    input_shape,
    output_meta,
    placed,
    saved,
    saved_again,
)
from dpfy.gradients.per_example.arithmetic import along
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.embedding import EmbeddingGradient
from dpfy.gradients.per_example.outer import Direct, Outer
from dpfy.gradients.per_example.placed import (
    FunctionGradient,
    ParameterFunction,
    RowScaled,
    ViewGradient,
)
from dpfy.gradients.per_example.shared import Shared

MOST_PIECES = 32
"""A contribution that would fall into more pieces than this is written out instead."""

Reached = tuple[Any, Contribution]
"""A node that was to be reached, and what arrives there."""


@dataclass
class Descent:
    """One way down. `goals`: the nodes of the parameters. `between`: the nodes that lead to
    them.
    """

    goals: Iterable[Any]
    between: set[Any]
    note: Callable[[str], None] = lambda route: None
    """Is told "vmap" or "loop" where gradients are sent through the graph example by example."""
    eager: bool = False
    """Whether to write out at once what must be: the graph below may be gone later."""

    def down(self, node: Any, number: int, part: Contribution) -> list[Reached]:
        """What arrives at every goal from `part`, which arrives at output `number` of `node`."""
        done: list[Reached] = []
        todo: list[tuple[Any, int, Contribution]] = [(node, number, part)]
        while todo:
            here, which, arriving = todo.pop()
            if arriving.summands:
                todo += [(here, which, each) for each in arriving.summands]
                continue
            wanted = [
                i for i, (child, _) in enumerate(here.next_functions) if child in self.between
            ]
            if here in self.goals:
                done.append((here, shaped(arriving, output_meta(here, 0)[0])))
                steps = None
            else:
                steps = step(here, which, arriving, wanted)
            if steps is None and wanted:
                done += self._written_out(here, which, arriving)
            elif steps is not None:
                todo += [(*here.next_functions[i], each) for i, each in steps]
            if len(done) + len(todo) > MOST_PIECES:
                return self._written_out(node, number, part)
        return done

    def _written_out(self, node: Any, number: int, part: Contribution) -> list[Reached]:
        edge, shape, dtype = GradientEdge(node, number), *output_meta(node, number)
        goals = [
            goal for goal in self.goals if goal is not node and _leads(node, goal, self.between)
        ]
        targets = [GradientEdge(goal, 0) for goal in goals]

        def push(each: Tensor) -> list[Tensor | None]:
            found, route = sent_down([edge], [each.reshape(-1, *shape).to(dtype)], targets)
            self.note(route)
            return found

        below = ParameterFunction(part, push, [output_meta(goal, 0)[0] for goal in goals])
        kept = below.everything(always=self.eager)
        if kept is None:
            return [(goal, FunctionGradient(below, place)) for place, goal in enumerate(goals)]
        return [(goal, Direct(grads)) for goal, grads in zip(goals, kept, strict=True)]


def _leads(node: Any, goal: Any, between: set[Any]) -> bool:
    seen, todo = {node}, [node]
    while todo:
        here = todo.pop()
        if here is goal:
            return True
        for child, _ in here.next_functions:
            if child in between and child not in seen:
                seen.add(child)
                todo.append(child)
    return False


def shaped(part: Contribution, shape: torch.Size) -> Contribution:
    """`part` as a contribution to a tensor of `shape`, where it is one to a matrix with the same
    numbers in it.
    """
    own = part.matrix_shape
    if own is None or own == shape:
        return part
    key = ("reshaped", own, shape)
    return ViewGradient(part, lambda t: t.reshape(-1, *shape), own, shape, key)


def sent_down(
    outputs: list[GradientEdge], sent: list[Tensor], targets: list[Any]
) -> tuple[list[Tensor | None], str]:
    """A backward from `outputs` to `targets` for every row of `sent`: vectorised, or one by one
    where torch cannot do that.

    Returns [rows, *target] gradients, None for a target that gets none, and "vmap" or "loop".
    """
    try:
        grads = torch.autograd.grad(
            outputs, targets, sent, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
        return [None if g is None else g.detach() for g in grads], "vmap"
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, ValueError):
        # no vectorised form: a function of the user's own, a recurrent layer of a library, control
        # flow that looks at values
        pass
    try:
        rows = [
            torch.autograd.grad(
                outputs, targets, [each[k] for each in sent], retain_graph=True, allow_unused=True
            )
            for k in range(len(sent[0]))
        ]
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Unsupported(
            f"a second backward through this model ({first})", "use engine='loop'"
        ) from error
    columns = [
        [None if g is None else _dense(g) for g in column] for column in zip(*rows, strict=True)
    ]
    return [_stacked(column) for column in columns], "loop"


def _dense(grad: Tensor) -> Tensor:
    return grad.detach().to_dense() if grad.is_sparse else grad.detach()


def _stacked(column: list[Tensor | None]) -> Tensor | None:
    some = next((g for g in column if g is not None), None)
    return (
        None
        if some is None
        else torch.stack([torch.zeros_like(some) if g is None else g for g in column])
    )


def step(
    node: Any, number: int, part: Contribution, wanted: list[int]
) -> list[tuple[int, Contribution]] | None:
    """What arrives at the `wanted` inputs of `node` from `part` at its output; None if no rule
    explains it.
    """
    name = node.name()
    if name in SAME:
        return [(0, part)]
    if name in VIEWS:
        return [(0, placed(node, number, part))]
    rule, found = STEPS.get(name), []
    for i in wanted if rule is not None else ():
        each = rule(node, i, part)  # type: ignore[misc]
        if each is None:
            return None
        found.append((i, each))
    return None if rule is None else found


SAME = {"ToCopyBackward0", "CloneBackward0", "AliasBackward0", "ViewAsBackward0"}
"""Copies, in whatever type: gradients are added in the type that they are computed in."""


def _factor_part(part: Contribution, matrix: Tensor, shape: torch.Size) -> Direct | None:
    """What a factor of `shape` receives that scales `matrix`, or its rows, or its columns; None if
    unknown.
    """
    way = along(torch.empty(shape, device="meta"), matrix.shape)
    if way == "columns" and (turned := part.transposed()) is not None:
        part, matrix, way = turned, matrix.t(), "rows"
    products = part.row_products(matrix) if way in ("all", "rows") else None
    if products is None:
        return None
    return Direct((products.sum(1) if way == "all" else products).reshape(-1, *shape))


def _add(node: Any, i: int, part: Contribution, sign: float = 1.0) -> Contribution | None:
    shape, out = input_shape(node, i), output_meta(node, 0)[0]
    factor = sign * node._saved_alpha if i else 1
    if shape == out:
        return part if factor == 1 else part.times(factor, out)
    return part.folded(out, shape, factor)


def _multiply(node: Any, i: int, part: Contribution) -> Contribution | None:
    read = saved(node, "other" if i == 0 else "self")
    if read is None:
        return None
    other, shape, out = read[0], input_shape(node, i), output_meta(node, 0)[0]
    if (found := part.folded(out, shape, other)) is not None:
        return found
    if shape == out:
        return part.times(other, out)
    return _factor_part(part, other, shape) if other.shape == out else None


def _divide(node: Any, i: int, part: Contribution) -> Contribution | None:
    read = saved(node, "other") if i == 0 else saved(node, "self", "other")
    if read is None:
        return None
    shape, out = input_shape(node, i), output_meta(node, 0)[0]
    factor = 1 / read[0] if i == 0 else -read[0] / read[1].square()
    if (found := part.folded(out, shape, factor)) is not None:
        return found
    if i == 0:
        return part.times(factor, out) if shape == out else None
    return _factor_part(part, factor, shape) if read[0].shape == out else None


def _chosen(node: Any, i: int, part: Contribution) -> Contribution | None:
    """Numbers taken where a condition holds, or (the second input of `where`, the input of
    `masked_fill`) where it does not.
    """
    if (grads := part.stored_grads) is None:
        return None
    shape, out, two = input_shape(node, i), output_meta(node, 0)[0], node.name() == "WhereBackward0"
    condition = saved_again(node, "condition" if two else "mask")
    taken = condition if two and i == 0 else ~condition
    each = grads.reshape(-1, *out)
    return Direct(torch.where(taken, each, each.new_zeros(()))).folded(out, shape)


def _mm(node: Any, i: int, part: Contribution) -> Contribution | None:
    """y = a b, both made of parameters."""
    read = saved(node, "mat2" if i == 0 else "self")
    return None if read is None else part.through_product(i, read[0])


def _mv(node: Any, i: int, part: Contribution) -> Contribution | None:
    read, grads = saved(node, "vec" if i == 0 else "self"), part.stored_grads
    if read is None or grads is None:
        return None
    other = read[0].to(part.dtype)
    if i == 0:
        return Outer(grads[:, None], other.expand(part.batch, 1, -1))
    return Direct(grads @ other)


def _dot(node: Any, i: int, part: Contribution) -> Contribution | None:
    read, grads = saved(node, "other" if i == 0 else "self"), part.stored_grads
    if read is None or grads is None or read[0].is_complex():
        return None
    return Direct(grads.reshape(-1, 1) * read[0])


def _norm(node: Any, i: int, part: Contribution) -> Contribution | None:
    """The length of a whole tensor: its gradient has the direction of the tensor."""
    read, grads = saved(node, "self", "result"), part.stored_grads
    order = node._saved_p if node.name() == "NormBackward0" else node._saved_ord
    if read is None or grads is None or order != 2:
        return None
    whole = read[1].numel() == 1 and read[0].dim() > 0
    if not whole or not float(read[1]):
        return None
    factors = grads.reshape(-1, 1).expand(-1, len(read[0]))
    return RowScaled(factors, read[0] / read[1].reshape(()))


def _weight_norm(node: Any, i: int, part: Contribution) -> Contribution | None:
    """w = g v / |v|, row by row: with u = v / |v|, g gets <G, u> and v gets g / |v| (G - <G, u>
    u).
    """
    read = saved(node, "v", "g", "result1")
    if read is None or node._saved_dim != 0:
        return None
    v, g, norms = read
    products = part.row_products(v / norms)
    if products is None:
        return None
    if i == 1:
        return Direct(products.reshape(-1, *g.shape))
    rate = (g / norms).reshape(-1)
    scaled = part.times((g / norms).reshape(-1, *[1] * (v.dim() - 1)), v.shape)
    return None if scaled is None else Shared([scaled, RowScaled(-products * rate, v / norms)])


def _table(node: Any, i: int, part: Contribution) -> Contribution | None:
    """Rows of a table made of parameters, looked up at the same places for every example."""
    name = node.name()
    if name == "IndexBackward0":
        if any(getattr(raw, "unpack_hook", True) is not None for raw in node._raw_saved_indices):
            return None
        index, *others = node._saved_indices
        if any(t is not None for t in others):
            return None
    else:
        read = saved(node, "index" if name == "IndexSelectBackward0" else "indices")
        if read is None or (name == "IndexSelectBackward0" and node._saved_dim):
            return None
        if name == "EmbeddingBackward0" and (
            node._saved_scale_grad_by_freq or 0 <= node._saved_padding_idx < 2**62
        ):
            return None
        index = read[0]
    shape = input_shape(node, i)
    if index is None or index.dtype == torch.bool or part.batch * shape.numel() > MOST_WRITTEN:
        return None
    return added_rows(part, index, shape)


def small_table(part: Contribution) -> Contribution:
    """`part`, written out if it adds more rows to a table than that has."""
    if not isinstance(part, EmbeddingGradient) or part.index.shape[1] <= part.count:
        return part
    size = part.count * part.grads.shape[2]
    if part.batch * size > MOST_WRITTEN:
        return part
    kind = torch.float64 if part.grads.dtype == torch.float64 else torch.float32
    table = torch.zeros(part.batch * part.count, part.grads.shape[2], dtype=kind)
    table = table.to(part.grads.device)
    first = torch.arange(part.batch, device=table.device)[:, None] * part.count
    table.index_add_(0, (part.index + first).flatten(), part.grads.flatten(0, 1).to(kind))
    return Direct(table.view(part.batch, part.count, -1))


def added_rows(part: Contribution, index: Tensor, shape: torch.Size) -> Direct:
    """What a table of `shape` receives, whose rows at `index` receive `part`: added up for every
    example.
    """
    grads = part.per_example(slice(0, part.batch))
    kind = torch.float64 if grads.dtype == torch.float64 else torch.float32
    flat = grads.reshape(len(grads), index.numel(), -1).to(kind)
    table = flat.new_zeros(len(flat), shape[0], flat.shape[2])
    return Direct(table.index_add_(1, index.flatten() % shape[0], flat).reshape(-1, *shape))


MOST_WRITTEN = 2**26
"""Numbers of all examples' gradients of a table that may be written out."""


def _function(slope: Callable[[Any], Tensor | None]) -> Callable[..., Contribution | None]:
    """A function of each number: what arrives times its slope."""

    def rule(node: Any, i: int, part: Contribution) -> Contribution | None:
        factor = slope(node)
        return None if factor is None else part.times(factor, input_shape(node, 0))

    return rule


def _of(name: str, slope: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor | None]:
    def found(node: Any) -> Tensor | None:
        read = saved(node, name)
        return None if read is None else slope(read[0])

    return found


STEPS: dict[str, Callable[[Any, int, Contribution], Contribution | None]] = {
    "AddBackward0": _add,
    "SubBackward0": lambda node, i, part: _add(node, i, part, -1.0),
    "NegBackward0": lambda node, i, part: part.times(-1.0, input_shape(node, 0)),
    "MulBackward0": _multiply,
    "DivBackward0": _divide,
    "WhereBackward0": _chosen,
    "MaskedFillBackward0": _chosen,
    "MmBackward0": _mm,
    "MvBackward0": _mv,
    "DotBackward0": _dot,
    "VdotBackward0": _dot,
    "NormBackward0": _norm,
    "LinalgVectorNormBackward0": _norm,
    "WeightNormInterfaceBackward0": _weight_norm,
    **dict.fromkeys(("IndexBackward0", "IndexSelectBackward0", "EmbeddingBackward0"), _table),
    "RsubBackward1": lambda node, i, part: part.times(-1.0, input_shape(node, 0)),
    "ExpBackward0": _function(_of("result", lambda y: y)),
    "SigmoidBackward0": _function(_of("result", lambda y: y * (1 - y))),
    "TanhBackward0": _function(_of("result", lambda y: 1 - y.square())),
    "SqrtBackward0": _function(_of("result", lambda y: 0.5 / y)),
    "RsqrtBackward0": _function(_of("result", lambda y: -0.5 * y * y * y)),
    "ReciprocalBackward0": _function(_of("result", lambda y: -y.square())),
    "ReluBackward0": _function(_of("result", lambda y: (y > 0).to(y.dtype))),
    "LogBackward0": _function(_of("self", lambda x: 1 / x)),
    "SinBackward0": _function(_of("self", torch.cos)),
    "CosBackward0": _function(_of("self", lambda x: -torch.sin(x))),
}
"""Operations on parameters alone, to what they do to a contribution at an input."""
