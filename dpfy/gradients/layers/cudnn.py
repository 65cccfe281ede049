"""The recurrence of one direction on CUDA, by cuDNN.

cuDNN gives gradients of inputs, states and weights, the last summed over the batch; what a layer
must report is the gradient of the gates. So cuDNN is handed the gates as its input, with the
identity for the input's weight: the gradient of that input is the gradient of the gates. The
product with the identity is one more parallel product. Where cuDNN may use TF32
(``torch.backends.cudnn.allow_tf32``, on by default) it rounds the gates and their gradients as it
would round its own factors; else it is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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


def usable(gates: Tensor, weights: RecurrentWeights) -> bool:
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


def recur(
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
    matrices, memory = _weights(weights.hidden, weights.shift, width, how)
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
        matrices, memory = _weights(given[0], given[1] if len(given) > 1 else None, width, how)
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


def _weights(
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
