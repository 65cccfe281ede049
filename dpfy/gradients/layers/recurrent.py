"""`nn.LSTM`, `nn.GRU`, `nn.RNN`, their cells: for each layer and direction a product with the
inputs of all steps, then a recurrence.

The product is that of an ordinary linear layer. The recurrence is one node of the autograd graph;
what comes back from it, the gradient of the gates at every step, is reported. With the inputs and
the states before every step it explains all parameters of the direction: sums over steps of outer
products, and of the gates' gradients themselves.

On CUDA the recurrence is cuDNN's where cuDNN can do it (``layers/recurrence_cuda.py``), else and on a
CPU that of ``layers/recurrence.py``. Norms and sums are made from the same reported tensors, so
whatever rounding happened before they were reported (TF32, bfloat16) needs no allowance in the
bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dpfy.gradients.autograd.tape import Explain, Site, Tape
from dpfy.gradients.engine import no_autocast
from dpfy.gradients.layers import fused
from dpfy.gradients.layers.recurrence import (
    NO_VIEWS,
    GatesNode,
    RecurrenceNode,
    RecurrenceResult,
    RecurrentSteps,
    RecurrentWeights,
    before_each,
    gru,
    lstm,
    plain,
)
from dpfy.gradients.layers.recurrence_cuda import (
    cells_usable,
    cudnn_recur,
    cudnn_usable,
    gru_cells,
    lstm_cells,
)
from dpfy.gradients.layers.rule import Found, RowsFirst, as_positions, constant, total, wanted
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.outer import Direct, Outer
from dpfy.gradients.per_example.rounding import self_products
from dpfy.gradients.per_example.shared import Sliced


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
        no_views = torch._C._ExcludeDispatchKeyGuard(NO_VIEWS)
        with torch.no_grad(), no_autocast(flat.device.type), no_views:
            inputs = flat.detach().view(how.length, how.batch, -1)
            made = self._recur(inputs, weights, constant(h), constant(c), how)
            # On a CPU torch's autocast leaves the outputs of a GRU as wide as its states.
            made = made.to(x.dtype if self.kind == "GRU" and not flat.is_cuda else flat.dtype)
        # else the states before are outputs, and zeros before the first
        known = h is not None or how.length == 1
        before = made.output
        if known:
            before = before_each(before, _first(before, constant(h)), self.reverse)
        saved = [x, before] if made.reset is None else [x, before, made.reset]
        facts = (self.kind, self.reverse, known)
        gates = self._reported(flat, self._explain(known), saved, how, facts)
        projected = None
        if made.full is not None:
            place = made.output.new_empty(how.length * how.batch, made.output.shape[-1])
            projected = self._reported(
                place, self._explain_projection, [made.full], how, ("projection",)
            )
        return RecurrenceNode.apply(gates, projected, h, c, made)  # type: ignore[no-any-return, no-untyped-call]

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
        cells = cells_usable(self.kind, gates, weights, steps)
        fast = cells or cudnn_usable(gates, weights)
        dtype = gates.dtype if fast or gates.dtype == torch.float64 else torch.float32
        gates, weights = gates.to(dtype), weights.to(dtype)
        h = _first(gates[..., : weights.hidden.shape[1]], h)
        c = _first(gates[..., : gates.shape[2] // 4], c)
        if cells:
            loops = self.tape.kept
            if self.kind == "LSTM":
                return lstm_cells(gates, weights, h, c, steps, loops)
            return gru_cells(gates, weights, h, steps, loops)
        if fast:
            cell = c if self.kind == "LSTM" else None
            return cudnn_recur(self.kind, gates, weights, h, cell, steps)
        if self.kind == "LSTM":
            return lstm(gates, weights, h, c, steps)
        if self.kind == "GRU":
            return gru(gates, weights, h, steps)
        return plain(gates, weights, h, steps, self.kind == "RNN_RELU")

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
        return GatesNode.apply(flat, self.tape.anchor, where, (how.length, how.order), *told)  # type: ignore[no-any-return, no-untyped-call]

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


CELL = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
"""The parameters of a cell."""


def fits_recurrent(module: nn.RNNBase) -> bool:
    """Whether it multiplies with its own parameters."""
    names = module._flat_weights_names
    return all(
        a is module._parameters.get(name)
        for a, name in zip(module._flat_weights, names, strict=True)
    )


def run_recurrent(module: Any, tape: Tape, site: Site, input: Any, hx: Any = None) -> Any:
    """What the module computes; what torch would refuse, or nobody wants the gradient of, runs as
    the module itself does.

    Per-example gradients, from the gradient at x W' + b of the input x at every step (gates), that
    at h W' + b of the state h before it (inner: another one for the new values of a GRU), and that
    at the projected state (projected) of the state within (within):
        weight_ih: einsum("nto,nti->noi", gates, x)
        bias_ih: einsum("nto->no", gates)
        weight_hh: einsum("nto,nth->noh", inner, before)
        bias_hh: einsum("nto->no", inner)
        weight_hr: einsum("ntp,nth->nph", projected, within)
    """
    alone = isinstance(input, Tensor) and input.dim() == 2
    if alone:  # one sequence is a batch of one
        axis = 0 if module.batch_first else 1
        input, hx = input.unsqueeze(axis), _each(hx, lambda t: t.unsqueeze(1))
    if not torch.is_grad_enabled() or not _known(module, input, hx):
        output, last = type(module).forward(module, input, hx)
    else:
        output, last = _run(module, tape, site, input, hx)
    return (output.squeeze(axis), _each(last, lambda t: t.squeeze(1))) if alone else (output, last)


def _run(module: Any, tape: Tape, site: Site, input: Any, hx: Any) -> tuple[Any, Any]:
    """Outputs and last states, as the module gives them."""
    how, x = Sequences.of(input, module)
    first = how.first_states(hx, len(module._all_weights))
    names = iter(module._all_weights)
    directions = (False, True) if module.bidirectional else (False,)
    last: list[tuple[Tensor, ...]] = []
    for layer in range(module.num_layers):
        if layer and module.dropout:
            x = F.dropout(x, module.dropout, module.training)
        made = [
            Direction.of(module, next(names), back, tape, site).run(x, next(first), how)
            for back in directions
        ]
        x = made[0][0] if len(made) == 1 else torch.cat([each[0] for each in made], 2)
        last += [each[1:] for each in made]
    ends = [torch.stack(each) for each in zip(*last, strict=True)]
    if how.order is not None:
        ends = [t.index_select(1, how.order) for t in ends]
    return how.given_back(x, input, module), ends[0] if len(ends) == 1 else tuple(ends)


def run_cell(module: Any, tape: Tape, site: Site, input: Tensor, hx: Any = None) -> Any:
    """`nn.LSTMCell`, `nn.GRUCell`, `nn.RNNCell`: a layer of one step.

    Per-example gradients, from those at x W' + b of the input x (gates) and at h W' + b of the
    state h before (inner):
        weight_ih: einsum("no,ni->noi", gates, x)
        bias_ih: einsum("no->no", gates)
        weight_hh: einsum("no,nh->noh", inner, before)
        bias_hh: einsum("no->no", inner)
    """
    states = hx if isinstance(hx, tuple) else (hx, None)
    shapes = [tuple(t.shape) == (len(input), module.hidden_size) for t in states if t is not None]
    if (
        not torch.is_grad_enabled()
        or input.dim() != 2
        or not all(shapes)
        or not _same(module, input, states)
    ):
        return type(module).forward(module, input, hx)
    names = [name for name, p in module._parameters.items() if p is not None]
    _, h, *c = Direction.of(module, names, False, tape, site).run(
        input[None], states, Sequences(1, len(input))
    )
    return (h, c[0]) if c else h


def _same(module: Any, x: Tensor, states: Sequence[Tensor | None]) -> bool:
    """Whether a product with `x` is possible: its width, and for all the same type and device,
    where nobody casts them.
    """
    all_of = [*states, *module._parameters.values()]
    same = fused.autocast_active() or all(
        t.dtype == x.dtype and t.device == x.device for t in all_of if t is not None
    )
    return same and x.shape[-1] == module.input_size and x.numel() > 0


def _each(states: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`change` of a state, of a state and a cell, or of nothing."""
    if states is None:
        return None
    return (
        tuple([change(t) for t in states]) if isinstance(states, tuple | list) else change(states)
    )


def _known(module: Any, given: Any, hx: Any) -> bool:
    """Whether a call is one that torch accepts."""
    packed = isinstance(given, PackedSequence)
    data = given.data if packed else given
    if (
        not isinstance(data, Tensor)
        or data.dim() != (2 if packed else 3)
        or data.shape[-1] != module.input_size
        or not data.numel()
    ):
        return False
    if not fused.autocast_active() and any(
        p.dtype != data.dtype or p.device != data.device for p in module._flat_weights
    ):
        return False
    if hx is None:
        return True
    states = hx if isinstance(hx, tuple) else (hx,)
    if len(states) != (2 if module.mode == "LSTM" else 1) or not all(
        isinstance(t, Tensor) for t in states
    ):
        return False
    sizes = given.batch_sizes if packed else None
    shapes = [module.get_expected_hidden_size(data, sizes)]
    if len(states) == 2:
        shapes.append(module.get_expected_cell_size(data, sizes))
    return all(tuple(t.shape) == tuple(shape) for t, shape in zip(states, shapes, strict=True))


@dataclass(frozen=True)
class Sequences:
    """How the sequences of a call lie: steps, then examples. `sizes`: examples at every step, where
    they differ; `order`: from sorted by length to the user's order; `rows`: of all steps of all
    examples in one row, those that exist.
    """

    length: int
    batch: int
    sizes: tuple[int, ...] | None = None
    order: Tensor | None = None
    rows: Tensor | None = None

    @classmethod
    def of(cls, given: Any, module: nn.RNNBase) -> tuple[Sequences, Tensor]:
        """Those of an input, and the input as [step, example, feature]."""
        if not isinstance(given, PackedSequence):
            x = (given.transpose(0, 1) if module.batch_first else given).contiguous()
            return cls(x.shape[0], x.shape[1]), x
        sizes = tuple(given.batch_sizes.tolist())
        length, batch = len(sizes), sizes[0]
        if sizes[-1] == batch:
            return cls(length, batch, order=given.unsorted_indices), given.data.view(
                length, batch, -1
            )
        rows = (
            (torch.arange(batch) < given.batch_sizes[:, None])
            .flatten()
            .nonzero()
            .squeeze(1)
            .to(given.data.device)
        )
        dense = given.data.new_zeros(length * batch, given.data.shape[1]).index_copy(
            0, rows, given.data
        )
        return cls(length, batch, sizes, given.unsorted_indices, rows), dense.view(
            length, batch, -1
        )

    def first_states(self, hx: Any, count: int) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """The state and cell before the first step, sorted as the examples, for each of `count`
        directions.
        """
        states: list[Tensor | None] = [*hx] if isinstance(hx, tuple) else [hx]
        if self.order is not None:
            states = [
                None if t is None else t.index_select(1, self.order.argsort()) for t in states
            ]
        each = [[None] * count if t is None else t.unbind(0) for t in (*states, None)]
        return iter(list(zip(each[0], each[1], strict=True)))

    def given_back(self, y: Tensor, given: Any, module: nn.RNNBase) -> Any:
        """The output [step, example, feature] in the form of the input. Where torch lets it be
        changed in place, it is a copy.
        """
        y = y if y.is_cuda else y.clone()
        if not isinstance(given, PackedSequence):
            return y.transpose(0, 1) if module.batch_first else y
        flat = y.flatten(0, 1)
        flat = flat if self.rows is None else flat.index_select(0, self.rows)
        return PackedSequence(flat, given.batch_sizes, given.sorted_indices, given.unsorted_indices)
