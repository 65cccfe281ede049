"""The recurrence of one direction of one recurrent layer, step by step in memory that is reused,
and its way back.

Everything here works on what torch calls gates: the products of the inputs, of all steps, made
before the recurrence begins, to which each step adds the product of the state before it. The way
back gives the gradient of these gates for all steps at once, from which weights and biases get
theirs as one sum over steps: a recurrent layer is then as good as a linear one. Time comes first,
then the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from dpfy.gradients.autograd.tape import Where, reads, report

NO_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


@dataclass(frozen=True)
class RecurrentSteps:
    """The order of the steps, and to how many examples, the first ones, each belongs (None: to
    all).
    """

    length: int
    reverse: bool = False
    sizes: tuple[int, ...] | None = None

    def order(self, batch: int, back: bool = False) -> list[tuple[int, int]]:
        """(step, examples) as they run, or as they are gone back."""
        times = range(self.length)
        sizes = self.sizes or (batch,) * self.length
        return [(t, sizes[t]) for t in (reversed(times) if self.reverse is not back else times)]


@dataclass(frozen=True)
class RecurrentWeights:
    """What a step multiplies the state with. `shift`: what a GRU adds inside of its reset gate.
    `project`: the projection of an LSTM.
    """

    hidden: Tensor
    shift: Tensor | None = None
    project: Tensor | None = None

    def to(self, dtype: torch.dtype) -> RecurrentWeights:
        """In another type."""
        shift, project = (None if t is None else t.to(dtype) for t in (self.shift, self.project))
        return RecurrentWeights(self.hidden.to(dtype), shift, project)


@dataclass(frozen=True)
class Back:
    """Gradients of the gates of all steps, of the first states, and of what an LSTM with a
    projection gives out at every step.
    """

    gates: Tensor
    hidden: Tensor
    cell: Tensor | None = None
    projected: Tensor | None = None


Kept = tuple[Tensor, ...]
Grad = Tensor | None


@dataclass(frozen=True)
class RecurrenceResult:
    """A recurrence that has run. `kept` is for the way back, which takes it and the gradients of
    output, last state and last cell.

    The output of a step that an example does not have is the state it has there. `reset`: the reset
    gates of a GRU at all steps; `full`: the outputs of an LSTM at all steps before their
    projection.
    """

    output: Tensor
    hidden: Tensor
    cell: Tensor | None
    kept: Kept
    back: Callable[[Kept, Grad, Grad, Grad], Back]
    reset: Tensor | None = None
    full: Tensor | None = None

    def to(self, dtype: torch.dtype) -> RecurrenceResult:
        """With outputs of another type; the way back stays as it is."""
        cell = None if self.cell is None else self.cell.to(dtype)
        return replace(self, output=self.output.to(dtype), hidden=self.hidden.to(dtype), cell=cell)


def lstm(
    gates: Tensor, weights: RecurrentWeights, h: Tensor, c: Tensor, steps: RecurrentSteps
) -> RecurrenceResult:
    """Input and forget gate, new values, output gate: i, f, g, o. `gates` is overwritten, with
    sigmoid(-2 g) in the place of tanh(g).

    On a CPU torch's tanh takes four times as long as its sigmoid, and tanh(x) = 1 - 2 sigmoid(-2 x)
    needs no pass of its own.
    """
    length, batch, width = gates.shape[0], gates.shape[1], gates.shape[2] // 4
    project, matrix = weights.project, weights.hidden.t()
    output = gates.new_empty(length, batch, h.shape[1])
    full = output if project is None else gates.new_zeros(length, batch, width)
    cells, scratch = gates.new_empty(length + 1, batch, width), gates.new_empty(batch, width)
    here, there = (1, 0) if steps.reverse else (0, 1)
    cells[length if steps.reverse else 0] = c
    i, f, g, o = (part.unbind(0) for part in gates.split(width, 2))
    each, outs, fulls, cell = gates.unbind(0), output.unbind(0), full.unbind(0), cells.unbind(0)
    for t, n in steps.order(batch):
        if n < batch:
            outs[t][n:], cell[t + there][n:] = h[n:], cell[t + here][n:]
        step, ti, tf, tg, to, out, whole = _of(
            n, each[t], i[t], f[t], g[t], o[t], outs[t], fulls[t]
        )
        before, after, room, state = _of(n, cell[t + here], cell[t + there], scratch, h)
        step.addmm_(state, matrix)
        tg.mul_(-2.0)
        step.sigmoid_()
        torch.mul(tf, before, out=after).add_(ti).addcmul_(ti, tg, value=-2.0)
        torch.mul(after, -2.0, out=room).sigmoid_()
        torch.addcmul(to, to, room, value=-2.0, out=whole)
        if project is not None:
            torch.mm(whole, project.t(), out=out)
        h = outs[t]
    kept = (
        (gates, cells, weights.hidden)
        if project is None
        else (gates, cells, weights.hidden, project)
    )

    def back(kept: Kept, output: Grad, hidden: Grad, cell: Grad) -> Back:
        return _lstm_back(kept, steps, output, hidden, cell)

    last = cells[0 if steps.reverse else length].clone()
    return RecurrenceResult(
        output, h.clone(), last, kept, back, full=None if project is None else full
    )


def _of(n: int, *parts: Tensor) -> tuple[Tensor, ...]:
    """The first `n` examples of each."""
    return parts if n == len(parts[0]) else tuple([part[:n] for part in parts])


def _lstm_back(kept: Kept, steps: RecurrentSteps, output: Grad, hidden: Grad, cell: Grad) -> Back:
    gates, cells, matrix = kept[:3]
    project = kept[3] if len(kept) > 3 else None
    length, batch, width = gates.shape[0], gates.shape[1], gates.shape[2] // 4
    before, after = (cells[1:], cells[:-1]) if steps.reverse else (cells[:-1], cells[1:])
    found, through = _lstm_slopes(gates, before, after)
    f, inward = (
        gates[..., width : 2 * width].unbind(0),
        found.view(length, batch, 4, width)[:, :, :3].unbind(0),
    )
    each, outward, passed = found.unbind(0), found[..., 3 * width :].unbind(0), through.unbind(0)
    grads = None if output is None else output.unbind(0)
    dh = (
        gates.new_zeros(batch, matrix.shape[1])
        if hidden is None
        else hidden.to(gates.dtype, copy=True)
    )
    dc = gates.new_zeros(batch, width) if cell is None else cell.to(gates.dtype, copy=True)
    projected = None if project is None else gates.new_zeros(length, batch, matrix.shape[1])
    for t, n in steps.order(batch, back=True):
        step, ti, to, tf, tc, th, tcell = _of(
            n, each[t], inward[t], outward[t], f[t], passed[t], dh, dc
        )
        if grads is not None:
            th.add_(*_of(n, grads[t]))
        wide = th
        if project is not None and projected is not None:
            projected[t, :n] = th
            wide = th @ project
        tcell.addcmul_(wide, tc)
        ti.mul_(tcell.unsqueeze(1))
        to.mul_(wide)
        tcell.mul_(tf)
        torch.mm(step, matrix, out=th)
        if n < batch:
            each[t][n:] = 0.0
    return Back(found, dh, dc, projected)


def _lstm_slopes(gates: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """What multiplies the gradient of the cell (of the output, for o) to give that of each gate;
    and the output's, to give the cell's.
    """
    i, _, g, o = gates.chunk(4, 2)
    found = torch.empty_like(gates)
    through = torch.empty_like(after, memory_format=torch.contiguous_format)
    for part in _cached(gates):
        slope, out = found[part], through[part]
        si, sf, sg, so = slope.chunk(4, 2)
        _slope(gates[part], slope)
        si.addcmul_(si, g[part], value=-2.0)
        sf.mul_(before[part])
        sg.mul_(i[part]).mul_(
            4.0
        )  # twice from tanh, twice from its argument; the sign is gone with 1 - 2 sigmoid
        torch.mul(after[part], -2.0, out=out).sigmoid_()
        so.addcmul_(so, out, value=-2.0)
        _slope(out, out).mul_(o[part]).mul_(4.0)
    return found, through


def _slope(s: Tensor, out: Tensor) -> Tensor:
    """Of a sigmoid, from its value: s (1 - s)."""
    return torch.addcmul(s, s, s, value=-1.0, out=out)


def _cached(t: Tensor) -> list[slice]:
    """Some steps at a time, so that passes over them stay in the cache of a CPU."""
    some = len(t) if t.is_cuda else max(1, 2**17 // max(1, t[0].numel()))
    return [slice(start, start + some) for start in range(0, len(t), some)]


def gru(
    gates: Tensor, weights: RecurrentWeights, h: Tensor, steps: RecurrentSteps
) -> RecurrenceResult:
    """Reset and update gate and the new values: r, z, n. `gates` is overwritten."""
    length, batch, width = gates.shape[0], gates.shape[1], gates.shape[2] // 3
    output, inner = gates.new_empty(length, batch, width), gates.new_empty(length, batch, width)
    first = h
    both, new = gates[..., : 2 * width].unbind(0), gates[..., 2 * width :].unbind(0)
    r, z = gates[..., :width].unbind(0), gates[..., width : 2 * width].unbind(0)
    outs, inners = output.unbind(0), inner.unbind(0)
    pair, last = weights.hidden[: 2 * width].t(), weights.hidden[2 * width :].t()
    shift = gates.new_zeros(width) if weights.shift is None else weights.shift
    for t, n in steps.order(batch):
        if n < batch:
            outs[t][n:], inner[t, n:] = h[n:], 0.0
        tb, tn, tr, tz, out, ti, th = _of(n, both[t], new[t], r[t], z[t], outs[t], inners[t], h)
        tb.addmm_(th, pair).sigmoid_()
        torch.addmm(shift, th, last, out=ti)
        tn.addcmul_(tr, ti).tanh_()
        torch.lerp(tn, th, tz, out=out)
        h = outs[t]

    def back(kept: Kept, output: Grad, hidden: Grad, cell: Grad) -> Back:
        return _gru_back(kept, steps, output, hidden)

    return RecurrenceResult(
        output,
        h.clone(),
        None,
        (gates, inner, output, first, weights.hidden),
        back,
        reset=gates[..., :width],
    )


def before_each(output: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """The state before every step, from the outputs and the first state."""
    return torch.cat([output[1:], first[None]] if reverse else [first[None], output[:-1]])


def reset_gates(
    gates: Tensor, weights: RecurrentWeights, output: Tensor, first: Tensor, steps: RecurrentSteps
) -> Tensor:
    """The reset gates of a GRU at all steps, from its outputs: for those who keep them to
    themselves.
    """
    width, before = gates.shape[2] // 3, before_each(output, first, steps.reverse)
    flat = torch.addmm(
        gates[..., :width].flatten(0, 1), before.flatten(0, 1), weights.hidden[:width].t()
    )
    return flat.sigmoid_().view(before.shape)


def _gru_back(kept: Kept, steps: RecurrentSteps, output: Grad, hidden: Grad) -> Back:
    gates, inner, outputs, first, matrix = kept
    batch, width = gates.shape[1], gates.shape[2] // 3
    r, z, _ = gates.split(width, 2)
    found = _gru_slopes(gates, inner, before_each(outputs, first, steps.reverse))
    slopes = found.view(*found.shape[:2], 3, width).unbind(0)
    each, grads = found.unbind(0), None if output is None else output.unbind(0)
    resets, updates, inward = r.unbind(0), z.unbind(0), gates.new_empty(batch, 3 * width)
    dh = gates.new_zeros(batch, width) if hidden is None else hidden.to(gates.dtype, copy=True)
    for t, n in steps.order(batch, back=True):
        slope, step, tr, tz, th, ti = _of(n, slopes[t], each[t], resets[t], updates[t], dh, inward)
        if grads is not None:
            th.add_(*_of(n, grads[t]))
        slope.mul_(th.unsqueeze(1))
        ti.copy_(step)[:, 2 * width :].mul_(tr)
        th.mul_(tz).addmm_(ti, matrix)
        if n < batch:
            each[t][n:] = 0.0
    return Back(found, dh)


def _gru_slopes(gates: Tensor, inner: Tensor, before: Tensor) -> Tensor:
    """What multiplies the gradient of the output to give that of each gate."""
    found = torch.empty_like(gates)
    for part in _cached(gates):
        (_, z, new), (sr, sz, sn) = gates[part].chunk(3, 2), found[part].chunk(3, 2)
        _slope(gates[part], found[part])
        torch.mul(new, new, out=sn).neg_().add_(1.0)
        sn.addcmul_(sn, z, value=-1.0)
        sz.mul_(before[part] - new)
        sr.mul_(sn).mul_(inner[part])
    return found


def plain(
    gates: Tensor, weights: RecurrentWeights, h: Tensor, steps: RecurrentSteps, positive: bool
) -> RecurrenceResult:
    """tanh of the gates, or their `positive` parts. The output lies where the gates lay."""
    batch, matrix, outs = gates.shape[1], weights.hidden.t(), gates.unbind(0)
    for t, n in steps.order(batch):
        if n < batch:
            outs[t][n:] = h[n:]
        step, state = _of(n, outs[t], h)
        step.addmm_(state, matrix)
        step.relu_() if positive else step.tanh_()
        h = outs[t]

    def back(kept: Kept, output: Grad, hidden: Grad, cell: Grad) -> Back:
        return _plain_back(kept, steps, output, hidden, positive)

    return RecurrenceResult(gates, h.clone(), None, (gates, weights.hidden), back)


def _plain_back(
    kept: Kept, steps: RecurrentSteps, output: Grad, hidden: Grad, positive: bool
) -> Back:
    outputs, matrix = kept
    found = (outputs > 0).to(outputs.dtype) if positive else 1.0 - outputs.square()
    batch, each, grads = (
        outputs.shape[1],
        found.unbind(0),
        None if output is None else output.unbind(0),
    )
    dh = (
        outputs.new_zeros(outputs.shape[1:])
        if hidden is None
        else hidden.to(outputs.dtype, copy=True)
    )
    for t, n in steps.order(batch, back=True):
        step, th = _of(n, each[t], dh)
        if grads is not None:
            th.add_(*_of(n, grads[t]))
        step.mul_(th)
        torch.mm(step, matrix, out=th)
        if n < batch:
            each[t][n:] = 0.0
    return Back(found, dh)


class GatesNode(Function):
    """[steps times examples, width] as [example, step, width], in the same memory; its gradient is
    reported.
    """

    @staticmethod
    def forward(
        ctx: Any,
        flat: Tensor,
        anchor: Tensor,
        where: Where,
        how: tuple[int, Tensor | None],
        *saved: Tensor,
    ) -> Tensor:
        ctx.where, ctx.order = where, how[1]
        ctx.save_for_backward(*saved)
        with torch._C._ExcludeDispatchKeyGuard(NO_VIEWS):
            return flat.view(how[0], -1, flat.shape[1]).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        told = (grad, *(ctx.saved_tensors if reads(ctx.where) else ()))
        if ctx.order is not None:  # losses come in the user's order
            told = tuple([t.index_select(0, ctx.order) for t in told])
        report(ctx.where, told[0], told[1:])
        flat = grad.transpose(0, 1).flatten(0, 1) if ctx.needs_input_grad[0] else None
        return (flat, *[None] * (len(ctx.needs_input_grad) - 1))


class RecurrenceNode(Function):
    """A recurrence that has run already, as a function of gates, projected outputs and first
    states.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        projected: Tensor | None,
        h: Tensor | None,
        c: Tensor | None,
        made: RecurrenceResult,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.back, ctx.like = (
            made.back,
            [None if t is None else t.dtype for t in (gates, projected, h, c)],
        )
        ctx.save_for_backward(*made.kept)
        return (
            (made.output, made.hidden)
            if made.cell is None
            else (made.output, made.hidden, made.cell)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in grads):
            raise NotImplementedError(
                "many gradients at once through a recurrence"
            )  # they come one by one then
        output, hidden, cell = (*grads, None)[:3]
        back = ctx.back(ctx.saved_tensors, output, hidden, cell)
        projected = None if back.projected is None else back.projected.transpose(0, 1)
        found = (back.gates.transpose(0, 1), projected, back.hidden, back.cell)
        pairs = zip(found, ctx.like, ctx.needs_input_grad, strict=False)
        return (
            *[t.to(dtype) if needed and t is not None else None for t, dtype, needed in pairs],
            None,
        )
