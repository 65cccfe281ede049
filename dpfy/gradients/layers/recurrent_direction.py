"""One direction of one layer of a recurrent module: a product with the inputs of all steps, then the
recurrence, as nodes of the autograd graph that report to the tape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from dpfy.gradients.autograd.tape import Explain, Site, Tape, Where, reads, report
from dpfy.gradients.engine import no_autocast
from dpfy.gradients.layers import cudnn, fused_cells
from dpfy.gradients.layers.recurrence import (
    RecurrenceResult,
    RecurrentSteps,
    RecurrentWeights,
    before_each,
    gru,
    lstm,
    plain,
)
from dpfy.gradients.layers.rule import Found, RowsFirst, as_positions, constant, total, wanted
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.direct import Direct
from dpfy.gradients.per_example.outer import Outer
from dpfy.gradients.per_example.rounding import self_products
from dpfy.gradients.per_example.sliced import Sliced

if TYPE_CHECKING:
    from dpfy.gradients.layers.recurrent import Sequences

_NO_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def kind_of(module: Any) -> str:
    """What torch calls the mode of a layer, of a cell too."""
    if isinstance(module, nn.RNNCell):
        return f"RNN_{module.nonlinearity.upper()}"
    if isinstance(module, nn.RNNCellBase):
        return "LSTM" if isinstance(module, nn.LSTMCell) else "GRU"
    return module.mode  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Direction:
    """One direction of one layer, with its parameters."""

    kind: str
    reverse: bool
    parameters: dict[str, Tensor]
    tape: Tape
    site: Site

    @classmethod
    def of(cls, module: Any, names: list[str], reverse: bool, tape: Tape, site: Site) -> Direction:
        """With the parameters that the module calls `names`."""
        parameters = {name.rsplit("_l", 1)[0]: module._parameters[name] for name in names}
        return cls(kind_of(module), reverse, parameters, tape, site)

    def run(
        self, x: Tensor, first: tuple[Tensor | None, Tensor | None], how: Sequences
    ) -> tuple[Tensor, ...]:
        """Outputs of all steps, the last state, and the last cell of an LSTM, from the `first`
        state and cell, where there are any.
        """
        h, c = first
        flat = F.linear(x.flatten(0, 1), self.parameters["weight_ih"].detach(), self._shift())
        weights = self._weights()
        with (
            torch.no_grad(),
            no_autocast(flat.device.type),
            torch._C._ExcludeDispatchKeyGuard(_NO_VIEWS),
        ):
            made = self._recur(
                flat.detach().view(how.length, how.batch, -1),
                weights,
                constant(h),
                constant(c),
                how,
            )
            # On a CPU torch's autocast leaves the outputs of a GRU as wide as its states.
            made = made.to(x.dtype if self.kind == "GRU" and not flat.is_cuda else flat.dtype)
        known = (
            h is not None or how.length == 1
        )  # else the states before are outputs, and zeros before the first
        before = (
            before_each(made.output, _first(made.output, constant(h)), self.reverse)
            if known
            else made.output
        )
        saved = [x, before] if made.reset is None else [x, before, made.reset]
        gates = self._reported(
            flat, self._explain(known), saved, how, (self.kind, self.reverse, known)
        )
        projected = None
        if made.full is not None:
            place = made.output.new_empty(how.length * how.batch, made.output.shape[-1])
            projected = self._reported(
                place, self._explain_projection, [made.full], how, ("projection",)
            )
        return _Recurrence.apply(gates, projected, h, c, made)  # type: ignore[no-any-return, no-untyped-call]

    def _shift(self) -> Tensor | None:
        """The biases that are added before the recurrence: all but that inside of a GRU's reset
        gate.
        """
        if "bias_ih" not in self.parameters:
            return None
        first, second = self.parameters["bias_ih"].detach(), self.parameters["bias_hh"].detach()
        if self.kind != "GRU":
            return first + second
        width = len(second) // 3
        return first + F.pad(second[: 2 * width], (0, width))

    def _weights(self) -> RecurrentWeights:
        """What the recurrence multiplies with. Kept as the parameters' own memory, so that a change
        before the way back is noticed.
        """
        bias = constant(self.parameters.get("bias_hh"))
        shift = bias[-(len(bias) // 3) :] if self.kind == "GRU" and bias is not None else None
        return RecurrentWeights(
            self.parameters["weight_hh"].detach(), shift, constant(self.parameters.get("weight_hr"))
        )

    def _recur(
        self,
        gates: Tensor,
        weights: RecurrentWeights,
        h: Tensor | None,
        c: Tensor | None,
        how: Sequences,
    ) -> RecurrenceResult:
        """The recurrence, in float32 or wider where it is our own."""
        steps = RecurrentSteps(how.length, self.reverse, how.sizes)
        cells = fused_cells.usable(self.kind, gates, weights, steps)
        fast = cells or cudnn.usable(gates, weights)
        dtype = gates.dtype if fast or gates.dtype == torch.float64 else torch.float32
        gates, weights = gates.to(dtype), weights.to(dtype)
        h = _first(gates[..., : weights.hidden.shape[1]], h)
        c = _first(gates[..., : gates.shape[2] // 4], c)
        if cells:
            loops = self.tape.kept
            return (
                fused_cells.lstm(gates, weights, h, c, steps, loops)
                if self.kind == "LSTM"
                else fused_cells.gru(gates, weights, h, steps, loops)
            )
        if fast:
            return cudnn.recur(
                self.kind, gates, weights, h, c if self.kind == "LSTM" else None, steps
            )
        if self.kind == "LSTM":
            return lstm(gates, weights, h, c, steps)
        return (
            gru(gates, weights, h, steps)
            if self.kind == "GRU"
            else plain(gates, weights, h, steps, self.kind == "RNN_RELU")
        )

    def _reported(
        self,
        flat: Tensor,
        explain: Explain,
        saved: list[Tensor],
        how: Sequences,
        facts: tuple[object, ...],
    ) -> Tensor:
        """`flat`, [steps times examples, width], as [example, step, width], whose gradient will be
        reported with the `saved` tensors.
        """
        self.tape.unsettled = self.tape.unsettled or not self.site.settled
        where = (self.tape, self.site, explain, None, facts)
        told = [t.detach().transpose(0, 1) for t in saved]
        return _Gates.apply(flat, self.tape.anchor, where, (how.length, how.order), *told)  # type: ignore[no-any-return, no-untyped-call]

    def _explain(self, known: bool) -> Explain:
        """From the gradients of the gates, inputs, and states before every step (outputs, if these
        are not `known`) to contributions.

        What a GRU makes of its state for the new values lies inside of its reset gate, so its
        gradient is theirs times that gate.
        """
        given, reverse, gru = self.parameters, self.reverse, self.kind == "GRU"

        def explain(g: Tensor, saved: tuple[Tensor, ...], view: RowsFirst) -> Found:
            gates, x, before = (view(t) for t in (g, *saved[:2]))
            width = before.shape[-1]
            inner = gates[..., 2 * width :] * view(saved[2]) if gru else gates
            ahead, after = (
                (slice(1, None), slice(None, -1)) if reverse else (slice(None, -1), slice(1, None))
            )
            early, steps = (before, slice(None)) if known else (before[..., ahead, :], after)
            common = (
                cache(lambda start, stop: self_products(gates[start:stop]))
                if inner is gates and gates.dim() == 3
                else None
            )
            whole, part = (
                common and (lambda rows, some=some: common(rows.start, rows.stop)[:, some, some])
                for some in (slice(None), steps)
            )
            shift = cache(lambda: total(gates, 1))

            def hidden() -> Contribution:
                if not gru:
                    return _outer(gates[..., steps, :], early, part)
                pair, last = (
                    _outer(t[..., steps, :], early) for t in (gates[..., : 2 * width], inner)
                )
                return Sliced(
                    ((0, 2 * width, pair), (2 * width, 3 * width, last)), given["weight_hh"].shape
                )

            def inside() -> Contribution:
                return Direct(
                    torch.cat([shift()[:, : 2 * width], total(inner, 1)], 1) if gru else shift()
                )

            return wanted(
                [
                    (given["weight_ih"], lambda: _outer(gates, x, whole)),
                    (given["weight_hh"], hidden),
                    (given.get("bias_ih"), lambda: Direct(shift())),
                    (given.get("bias_hh"), inside),
                ]
            )

        return explain

    def _explain_projection(self, g: Tensor, saved: tuple[Tensor, ...], view: RowsFirst) -> Found:
        """From the gradients of the projected outputs and the outputs before."""
        return wanted([(self.parameters["weight_hr"], lambda: _outer(view(g), view(saved[0])))])


def _first(like: Tensor, state: Tensor | None) -> Tensor:
    """The state before the first step, [example, width], in the type of `like`, [step, example,
    width].
    """
    return like.new_zeros(like.shape[1:]) if state is None else state.to(like.dtype)


def _outer(g: Tensor, a: Tensor, gram: Callable[[slice], Tensor] | None = None) -> Outer:
    return Outer(as_positions(g), as_positions(a).to(g.dtype), gram)


class _Gates(Function):
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
        with torch._C._ExcludeDispatchKeyGuard(_NO_VIEWS):
            return flat.view(how[0], -1, flat.shape[1]).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        told = (grad, *(ctx.saved_tensors if reads(ctx.where) else ()))
        if ctx.order is not None:  # losses come in the user's order
            told = tuple([t.index_select(0, ctx.order) for t in told])
        report(ctx.where, told[0], told[1:])
        flat = grad.transpose(0, 1).flatten(0, 1) if ctx.needs_input_grad[0] else None
        return (flat, *[None] * (len(ctx.needs_input_grad) - 1))


class _Recurrence(Function):
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
