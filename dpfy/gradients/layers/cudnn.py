"""The recurrence of one direction on CUDA, by cuDNN.

cuDNN gives gradients of inputs, states and weights, the last summed over the batch; what a layer must report is the gradient of the gates.
So cuDNN is handed the gates as its input, with the identity for the input's weight: the gradient of that input is the gradient of the
gates. The product with the identity is one more parallel product. Where cuDNN may use TF32 (``torch.backends.cudnn.allow_tf32``, on by
default) it rounds the gates and their gradients as it would round its own factors; else it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpfy.gradients.layers.recurrence import Back, Grad, Kept, Made, Steps, Weights, before_each

MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}

_flat: Any = torch._cudnn_rnn_flatten_weight  # type: ignore[attr-defined]
_forward: Any = torch._cudnn_rnn  # type: ignore[attr-defined]
_backward: Any = torch.ops.aten._cudnn_rnn_backward.default
_graph_is_kept: Any = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]


def usable(gates: Tensor, weights: Weights) -> bool:
    """Whether cuDNN can do it; projections do not fit the scheme."""
    return gates.is_cuda and weights.project is None and torch.cudnn_is_acceptable(gates)


@dataclass(frozen=True)
class _Order:
    """How cuDNN, which only runs forward and takes no step that an example does not have, is handed the steps."""

    length: int
    batch: int
    reverse: bool
    rows: Tensor | None

    @classmethod
    def of(cls, steps: Steps, batch: int, device: torch.device) -> _Order:
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


def recur(kind: str, gates: Tensor, weights: Weights, h: Tensor, c: Tensor | None, steps: Steps) -> Made:
    """See :mod:`dpfy.gradients.layers.recurrence`; `gates` stays as it is."""
    batch, width = gates.shape[1:]
    order, hidden = _Order.of(steps, batch, gates.device), weights.hidden
    given = order.into(gates).contiguous()
    shift = gates.new_zeros(width)
    if weights.shift is not None:
        shift[-len(weights.shift) :] = weights.shift
    matrices = [torch.eye(width, dtype=gates.dtype, device=gates.device), hidden, gates.new_zeros(width), shift]
    how = (MODES[kind], hidden.shape[1], 0, 1, False)
    # The copies are made to lie in the common memory; the others stay where they are.
    memory = _flat([m.clone() for m in matrices], 4, width, *how, False)
    call = (*how, 0.0, True, False, list(steps.sizes or ()), None)
    first = (h[None].contiguous(), None if c is None else c[None].contiguous())
    made, hn, cn, reserve, memory = _forward(given, matrices, 4, memory, *first, *call)
    output = order.out_of(made, h)
    kept = (made, reserve, memory, *[t for t in first if t is not None])

    def back(kept: Kept, output: Grad, hidden: Grad, cell: Grad) -> Back:
        made, reserve, memory, h, *c = kept
        if _graph_is_kept():
            reserve = reserve.clone()  # which the way back overwrites
        shape = (*made.shape[:-1], width)
        arrived = None if output is None else order.into(output).contiguous()
        last = [None if t is None else t[None].to(made.dtype).contiguous() for t in (hidden, cell)]
        matrices = [made.new_empty(0)] * 4  # nothing is asked about them, nor about the values of the input
        wanted = [True, True, bool(c), False]
        found, dh, dc, _ = _backward(
            made.new_empty(1).expand(shape),
            matrices,
            4,
            memory,
            h,
            c[0] if c else None,
            made,
            arrived,
            *last,
            *call,
            reserve,
            wanted,
        )
        return Back(order.out_of(found, found.new_zeros(1)), dh[0], dc[0] if c else None)

    reset = _resets(gates, weights, before_each(output, h, steps.reverse)) if kind == "GRU" else None
    return Made(output, hn[0], cn[0] if c is not None else None, kept, back, reset)


def _resets(gates: Tensor, weights: Weights, before: Tensor) -> Tensor:
    """The reset gates of a GRU, which cuDNN keeps to itself."""
    width = gates.shape[2] // 3
    flat = torch.addmm(gates[..., :width].flatten(0, 1), before.flatten(0, 1), weights.hidden[:width].t())
    return flat.sigmoid_().view(before.shape)
