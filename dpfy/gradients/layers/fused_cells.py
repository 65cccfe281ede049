"""The recurrence of one direction on CUDA, step by step with torch's fused cells: LSTM and GRU of wide states.

cuDNN takes fewer launches, but as it must be handed the gates (:mod:`dpfy.gradients.layers.cudnn`) it works with twice the memory of an
ordinary step. Where the work of a step takes as long as its launches, this is as fast.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfy.gradients.layers.recurrence import Back, Grad, Kept, Made, Steps, Weights, reset_gates

LARGE = 2**17
"""Gates at a step, of all examples, from which on the cells are used."""

TOGETHER = 4
"""Steps whose gradients are put in place by one launch."""

_lstm: Any = torch.ops.aten._thnn_fused_lstm_cell.default
_lstm_back: Any = torch.ops.aten._thnn_fused_lstm_cell_backward_impl.default
_gru: Any = torch.ops.aten._thnn_fused_gru_cell.default
_gru_back: Any = torch.ops.aten._thnn_fused_gru_cell_backward.default


def usable(kind: str, gates: Tensor, weights: Weights, steps: Steps) -> bool:
    """Whether the cells serve here: no projection, no step that an example does not have."""
    wide = gates.shape[1] * gates.shape[2] >= LARGE
    return gates.is_cuda and wide and kind in ("LSTM", "GRU") and weights.project is None and steps.sizes is None


def lstm(gates: Tensor, weights: Weights, h: Tensor, c: Tensor, steps: Steps) -> Made:
    """See :mod:`dpfy.gradients.layers.recurrence`; `gates` stays as it is."""
    matrix, each, order = weights.hidden.t(), gates.unbind(0), [t for t, _ in steps.order(gates.shape[1])]
    cells, done = [c], []
    outputs: list[Tensor] = [h] * len(each)
    for t in order:
        h, c, work = _lstm(each[t], torch.mm(h, matrix), c)
        outputs[t] = h
        cells.append(c)
        done.append(work)

    def back(kept: Kept, output: Grad, hidden: Grad, cell: Grad) -> Back:
        length, matrix = (len(kept) - 2) // 2, kept[0]
        cells, done = kept[1 : length + 2], kept[length + 2 :]
        gathered = _Gathered(done[0], length, done[0].shape[1])
        dh, dc, grads = hidden, cell, None if output is None else output.unbind(0)
        for place in reversed(range(length)):
            t = order[place]
            dh = _added(dh, None if grads is None else grads[t])
            dgates, dc, _ = _lstm_back(dh, dc, cells[place], cells[place + 1], done[place], False)
            gathered.add(t, dgates)
            dh = torch.mm(dgates, matrix)
        return Back(gathered.whole(), dh, dc)  # type: ignore[arg-type]

    return Made(torch.stack(outputs), h.clone(), c.clone(), (weights.hidden, *cells, *done), back)


def gru(gates: Tensor, weights: Weights, h: Tensor, steps: Steps) -> Made:
    """See :mod:`dpfy.gradients.layers.recurrence`; `gates` stays as it is."""
    width, matrix, each = h.shape[1], weights.hidden.t(), gates.unbind(0)
    shifts = () if weights.shift is None else (h.new_zeros(3 * width), F.pad(weights.shift, (2 * width, 0)))
    order = [t for t, _ in steps.order(gates.shape[1])]
    outputs: list[Tensor] = [h] * len(each)
    done: list[Tensor] = [h] * len(each)
    first = h
    for t in order:
        h, done[t] = _gru(each[t], torch.mm(h, matrix), h, *shifts)
        outputs[t] = h

    def back(kept: Kept, output: Grad, hidden: Grad, cell: Grad) -> Back:
        matrix, done = kept[0], kept[1:]
        gathered = _Gathered(done[0], len(done), 3 * width)
        dh, grads = hidden, None if output is None else output.unbind(0)
        for t in reversed(order):
            dgates, inner, passed, _, _ = _gru_back(_added(dh, None if grads is None else grads[t]), done[t], False)
            gathered.add(t, dgates)
            dh = passed.addmm_(inner, matrix)
        return Back(gathered.whole(), dh)  # type: ignore[arg-type]

    whole = torch.stack(outputs)
    outputs.clear()  # the reset gates find their memory
    return Made(whole, h.clone(), None, (weights.hidden, *done), back, reset=reset_gates(gates, weights, whole, first, steps))


class _Gathered:
    """Gradients that come step by step, in order or against it, gathered some at a time: fewer launches than one by one."""

    def __init__(self, like: Tensor, length: int, width: int) -> None:
        self._found = like.new_empty(length, like.shape[0], width)
        self._waiting: dict[int, Tensor] = {}

    def add(self, t: int, part: Tensor) -> None:
        """The gradient of step `t`."""
        self._waiting[t] = part
        if len(self._waiting) == TOGETHER:
            self._put()

    def whole(self) -> Tensor:
        """[step, example, width]"""
        if self._waiting:
            self._put()
        return self._found

    def _put(self) -> None:
        times = sorted(self._waiting)
        torch.stack([self._waiting[t] for t in times], out=self._found[times[0] : times[-1] + 1])
        self._waiting.clear()


def _added(a: Grad, b: Grad) -> Tensor:
    """The sum of two gradients, of which one may be missing."""
    if a is None or b is None:
        return a if b is None else b  # type: ignore[return-value]
    return a + b
