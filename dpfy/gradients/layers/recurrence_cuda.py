"""The recurrence of one direction on CUDA: by cuDNN, or step by step with torch's fused cells.

cuDNN gives gradients of inputs, states and weights, the last summed over the batch; what a layer
must report is the gradient of the gates. So cuDNN is handed the gates as its input, with the
identity for the input's weight: the gradient of that input is the gradient of the gates. The
product with the identity is one more parallel product. Where cuDNN may use TF32
(``torch.backends.cudnn.allow_tf32``, on by default) it rounds the gates and their gradients as it
would round its own factors; else it is exact.

The fused cells serve LSTM and GRU of wide states. cuDNN takes fewer launches, but with the identity
it works with twice the memory of an ordinary step. The launches of some steps are one
(:class:`dpfy.gradients.cuda_graphs.graphs.RepeatedLoop`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfy.gradients.cuda_graphs.graphs import GraphPool, RepeatedLoop, Tensors, Work
from dpfy.gradients.layers.recurrence import (
    Back,
    Grad,
    Kept,
    RecurrenceResult,
    RecurrentSteps,
    RecurrentWeights,
    reset_gates,
)

MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}

_flat: Any = torch._cudnn_rnn_flatten_weight  # type: ignore[attr-defined]
_forward: Any = torch._cudnn_rnn  # type: ignore[attr-defined]
_backward: Any = torch.ops.aten._cudnn_rnn_backward.default
_graph_is_kept: Any = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]


WIDEST = 8192
"""Of wider gates the identity would cost more, in time and memory, than is gained."""


def cudnn_usable(gates: Tensor, weights: RecurrentWeights) -> bool:
    """Whether cuDNN can do it, and better than the loop would; projections do not fit the
    scheme.
    """
    fits = weights.project is None and len(gates) > 1 and gates.shape[-1] <= WIDEST
    return gates.is_cuda and fits and torch.cudnn_is_acceptable(gates)


@dataclass(frozen=True)
class _Order:
    """How cuDNN, which only runs forward and takes no step that an example does not have, is handed
    the steps.
    """

    length: int
    batch: int
    reverse: bool
    rows: Tensor | None

    @classmethod
    def of(cls, steps: RecurrentSteps, batch: int, device: torch.device) -> _Order:
        """For these steps."""
        if steps.sizes is None:
            return cls(steps.length, batch, steps.reverse, None)
        exists = torch.arange(batch) < torch.tensor(steps.sizes)[:, None]
        time, example = exists.nonzero().unbind(1)
        if steps.reverse:
            time = exists.sum(0)[example] - 1 - time
        return cls(steps.length, batch, steps.reverse, (time * batch + example).to(device))

    def into(self, t: Tensor) -> Tensor:
        """[step, example, ...] as cuDNN runs it."""
        if self.rows is not None:
            return t.flatten(0, 1).index_select(0, self.rows)
        return t.flip(0) if self.reverse else t

    def out_of(self, t: Tensor, rest: Tensor) -> Tensor:
        """What cuDNN made as [step, example, ...]; `rest` is where an example has no step."""
        if self.rows is not None:
            whole = rest.expand(self.length, self.batch, t.shape[-1]).flatten(0, 1)
            return whole.index_copy(0, self.rows, t).unflatten(0, (self.length, self.batch))
        return t.flip(0) if self.reverse else t


def cudnn_recur(
    kind: str,
    gates: Tensor,
    weights: RecurrentWeights,
    h: Tensor,
    c: Tensor | None,
    steps: RecurrentSteps,
) -> RecurrenceResult:
    """See :mod:`dpfy.gradients.layers.recurrence`; `gates` stays as it is."""
    width, order = gates.shape[2], _Order.of(steps, gates.shape[1], gates.device)
    how = (MODES[kind], weights.hidden.shape[1], 0, 1, False)
    call = (*how, 0.0, True, False, list(steps.sizes or ()), None)
    first = [t[None].contiguous() for t in (h, c) if t is not None]
    matrices, memory = _matrices(weights.hidden, weights.shift, width, how)
    made, hn, cn, reserve, _ = _forward(
        order.into(gates).contiguous(), matrices, 4, memory, *_pair(first), *call
    )
    given = [weights.hidden] if weights.shift is None else [weights.hidden, weights.shift]

    def back(kept: Kept, output: Grad, hidden: Grad, cell: Grad) -> Back:
        (made, reserve), first, given = kept[:2], kept[2 : 2 + len(start)], kept[2 + len(start) :]
        if _graph_is_kept():
            reserve = reserve.clone()  # which the way back overwrites
        arrived = None if output is None else order.into(output).contiguous()
        last = [None if t is None else t[None].to(made.dtype).contiguous() for t in (hidden, cell)]
        like = made.new_empty(1).expand(
            *made.shape[:-1], width
        )  # nothing is asked about the values of the input
        matrices, memory = _matrices(given[0], given[1] if len(given) > 1 else None, width, how)
        wanted = [True, True, len(first) > 1, False]
        found, dh, dc, _ = _backward(
            like, matrices, 4, memory, *_pair(first), made, arrived, *last, *call, reserve, wanted
        )
        return Back(
            order.out_of(found, found.new_zeros(1)), dh[0], dc[0] if len(first) > 1 else None
        )

    output, start = order.out_of(made, h), range(len(first))
    reset = reset_gates(gates, weights, output, h, steps) if kind == "GRU" else None
    return RecurrenceResult(
        output, hn[0], None if c is None else cn[0], (made, reserve, *first, *given), back, reset
    )


def _pair(states: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """State and cell, or state and nothing."""
    return states[0], states[1] if len(states) > 1 else None


def _matrices(
    hidden: Tensor, shift: Tensor | None, width: int, how: tuple[Any, ...]
) -> tuple[list[Tensor], Tensor]:
    """What cuDNN multiplies with, and the same in one piece of memory, for which it asks. Made
    twice: the identity is large.
    """
    inner = hidden.new_zeros(width)
    if shift is not None:
        inner[-len(shift) :] = shift
    identity = torch.eye(width, dtype=hidden.dtype, device=hidden.device)
    matrices = [
        identity,
        hidden.clone(),
        hidden.new_zeros(width),
        inner,
    ]  # all our own: they are moved to the common memory
    return matrices, _flat(matrices, 4, width, *how, False)


LARGE = 2**17
"""Gates at a step, of all examples, from which on the cells are used."""

_lstm: Any = torch.ops.aten._thnn_fused_lstm_cell.default
_lstm_back: Any = torch.ops.aten._thnn_fused_lstm_cell_backward_impl.default
_gru: Any = torch.ops.aten._thnn_fused_gru_cell.default
_gru_back: Any = torch.ops.aten._thnn_fused_gru_cell_backward.default

Loops = dict[str, Any]
"""The loops of an attached engine by what they do, and the memory of their graphs."""


def cells_usable(
    kind: str, gates: Tensor, weights: RecurrentWeights, steps: RecurrentSteps
) -> bool:
    """Whether the cells serve here: no projection, no step that an example does not have."""
    wide = gates.shape[1] * gates.shape[2] >= LARGE
    return (
        gates.is_cuda
        and wide
        and kind in ("LSTM", "GRU")
        and weights.project is None
        and steps.sizes is None
    )


def lstm_cells(
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


def gru_cells(
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
