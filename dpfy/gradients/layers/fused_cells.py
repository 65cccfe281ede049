"""The recurrence of one direction on CUDA, step by step with torch's fused cells: LSTM and GRU of
wide states.

cuDNN takes fewer launches, but as it must be handed the gates (:mod:`dpfy.gradients.layers.cudnn`)
it works with twice the memory of an ordinary step. Here the launches of some steps are one
(:mod:`dpfy.gradients.cuda_graphs.repeated`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfy.gradients.cuda_graphs.graphs import GraphPool
from dpfy.gradients.cuda_graphs.repeated import RepeatedLoop, Tensors, Work
from dpfy.gradients.layers.recurrence import (
    Back,
    Grad,
    Kept,
    RecurrenceResult,
    RecurrentSteps,
    RecurrentWeights,
    reset_gates,
)

LARGE = 2**17
"""Gates at a step, of all examples, from which on the cells are used."""

_lstm: Any = torch.ops.aten._thnn_fused_lstm_cell.default
_lstm_back: Any = torch.ops.aten._thnn_fused_lstm_cell_backward_impl.default
_gru: Any = torch.ops.aten._thnn_fused_gru_cell.default
_gru_back: Any = torch.ops.aten._thnn_fused_gru_cell_backward.default

Loops = dict[str, Any]
"""The loops of an attached engine by what they do, and the memory of their graphs."""


def usable(kind: str, gates: Tensor, weights: RecurrentWeights, steps: RecurrentSteps) -> bool:
    """Whether the cells serve here: no projection, no step that an example does not have."""
    wide = gates.shape[1] * gates.shape[2] >= LARGE
    return (
        gates.is_cuda
        and wide
        and kind in ("LSTM", "GRU")
        and weights.project is None
        and steps.sizes is None
    )


def lstm(
    gates: Tensor,
    weights: RecurrentWeights,
    h: Tensor,
    c: Tensor,
    steps: RecurrentSteps,
    loops: Loops,
) -> RecurrenceResult:
    """See :mod:`dpfy.gradients.layers.recurrence`; `gates` stays as it is."""
    length, batch, width = gates.shape[0], gates.shape[1], h.shape[1]
    output, done = gates.new_empty(length, batch, width), torch.empty_like(gates)
    cells = gates.new_empty(length + 1, batch, width)
    after = cells[:-1] if steps.reverse else cells[1:]
    cells[length if steps.reverse else 0] = c
    h, c = _loop(loops, "lstm", _lstm_steps)(
        steps.reverse, [gates], [h, c], [weights.hidden], [output, after, done]
    )

    def back(kept: Kept, output: Grad, hidden: Grad, cell: Grad) -> Back:
        matrix, cells, done = kept
        before, after = (cells[1:], cells[:-1]) if steps.reverse else (cells[:-1], cells[1:])
        first = [_or_zeros(hidden, cells[0]), _or_zeros(cell, cells[0])]
        given, found = [before, after, done, *_where_any(output)], torch.empty_like(done)
        dh, dc = _loop(loops, "lstm back", _lstm_steps_back)(
            not steps.reverse, given, first, [matrix], [found]
        )
        return Back(found, dh, dc)

    return RecurrenceResult(output, h, c, (weights.hidden, cells, done), back)


def _lstm_steps(
    times: list[int], given: Tensors, carried: Tensors, fixed: Tensors
) -> tuple[Sequence[Tensors], Tensors]:
    (h, c), matrix, gates = carried, fixed[0].t(), given[0].unbind(0)
    made = {}
    for t in times:
        h, c, work = _lstm(gates[t], torch.mm(h, matrix), c)
        made[t] = (h, c, work)
    return list(zip(*[made[t] for t in sorted(times)], strict=True)), (h, c)


def _lstm_steps_back(
    times: list[int], given: Tensors, carried: Tensors, fixed: Tensors
) -> tuple[Sequence[Tensors], Tensors]:
    (dh, dc), (matrix,), (before, after, done, *grads) = (
        carried,
        fixed,
        [t.unbind(0) for t in given],
    )
    found = {}
    for t in times:
        found[t], dc, _ = _lstm_back(
            dh + grads[0][t] if grads else dh, dc, before[t], after[t], done[t], False
        )
        dh = torch.mm(found[t], matrix)
    return [[found[t] for t in sorted(times)]], (dh, dc)


def gru(
    gates: Tensor, weights: RecurrentWeights, h: Tensor, steps: RecurrentSteps, loops: Loops
) -> RecurrenceResult:
    """See :mod:`dpfy.gradients.layers.recurrence`; `gates` stays as it is."""
    width, first = h.shape[1], h
    shifts = (
        ()
        if weights.shift is None
        else (h.new_zeros(3 * width), F.pad(weights.shift, (2 * width, 0)))
    )
    output, done = (gates.new_empty(*gates.shape[:2], parts * width) for parts in (1, 5))
    (h,) = _loop(loops, "gru", _gru_steps)(
        steps.reverse, [gates], [h], [weights.hidden, *shifts], [output, done]
    )

    def back(kept: Kept, output: Grad, hidden: Grad, cell: Grad) -> Back:
        matrix, done = kept
        found = done.new_empty(*done.shape[:2], 3 * width)
        start = [_or_zeros(hidden, done[0, :, :width])]
        (dh,) = _loop(loops, "gru back", _gru_steps_back)(
            not steps.reverse, [done, *_where_any(output)], start, [matrix], [found]
        )
        return Back(found, dh)

    reset = reset_gates(gates, weights, output, first, steps)
    return RecurrenceResult(output, h, None, (weights.hidden, done), back, reset=reset)


def _gru_steps(
    times: list[int], given: Tensors, carried: Tensors, fixed: Tensors
) -> tuple[Sequence[Tensors], Tensors]:
    (h,), (hidden, *shifts), gates = carried, fixed, given[0].unbind(0)
    matrix, made = hidden.t(), {}
    for t in times:
        h, work = _gru(gates[t], torch.mm(h, matrix), h, *shifts)
        made[t] = (h, work)
    return list(zip(*[made[t] for t in sorted(times)], strict=True)), (h,)


def _gru_steps_back(
    times: list[int], given: Tensors, carried: Tensors, fixed: Tensors
) -> tuple[Sequence[Tensors], Tensors]:
    (dh,), (matrix,), (done, *grads) = carried, fixed, [t.unbind(0) for t in given]
    found = {}
    for t in times:
        found[t], inner, passed, _, _ = _gru_back(dh + grads[0][t] if grads else dh, done[t], False)
        dh = passed.addmm_(inner, matrix)
    return [[found[t] for t in sorted(times)]], (dh,)


def _loop(loops: Loops, name: str, work: Work) -> RepeatedLoop:
    """The loop of this name; all of them share the memory in which their graphs work."""
    if name not in loops:
        loops[name] = RepeatedLoop(
            work, loops.setdefault("recurrent graphs", GraphPool(apart=False))
        )
    found: RepeatedLoop = loops[name]
    return found


def _or_zeros(state: Grad, like: Tensor) -> Tensor:
    """The gradient of the last state, or that of a state nobody used."""
    return (
        torch.zeros_like(like, memory_format=torch.contiguous_format)
        if state is None
        else state.to(like.dtype)
    )


def _where_any(grad: Grad) -> list[Tensor]:
    return [] if grad is None else [grad]
