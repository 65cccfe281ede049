"""Which layer type has which rule, and how a layer is called inside of a loss for one record.

There the rule runs on the whole batch. A layer may be called with a record as it is, or with a
batch of one or more made from it: that batch becomes part of the outer one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpfy.gradients.autograd.tape import Site, Tape
from dpfy.gradients.layers.attention import PARAMETERS, fits_attention, run_attention
from dpfy.gradients.layers.convolution import run_convolution, run_transposed
from dpfy.gradients.layers.embedding import fits_bag, fits_embedding, run_bag, run_embedding
from dpfy.gradients.layers.linear import run_linear, run_transformers_linear
from dpfy.gradients.layers.normalization import (
    has_scale,
    run_group_norm,
    run_instance_norm,
    run_layer_norm,
    run_rms_norm,
)
from dpfy.gradients.layers.recurrent import CELL, fits_recurrent, run_cell, run_recurrent
from dpfy.gradients.layers.rule import LayerRule, plain_parameters
from dpfy.gradients.one_record import Call, lowered

Run = Callable[..., Any]
"""The rule of a layer on tensors with a batch."""


def run_lifted(
    call: Call, rule: LayerRule, module: Any, tape: Tape, site: Site, args: Any, kwargs: Any
) -> Any:
    """What the layer gives for one record. A call that no adapter here knows runs as the module
    itself does.
    """

    def run(*values: Any, **options: Any) -> Any:
        return rule.run(module, tape, site, *values, **options)

    adapter = ADAPTERS.get(rule.run)
    found = NotImplemented if adapter is None else adapter(call, module, run, *args, **kwargs)
    return type(module).forward(module, *args, **kwargs) if found is NotImplemented else found


def fold(t: Tensor) -> Tensor:
    """[batch, own batch, ...] as one batch."""
    return t.squeeze(1) if t.shape[1] == 1 else t.flatten(0, 1)


def unfold(t: Tensor, own: int) -> Tensor:
    """The other way round."""
    return t.unsqueeze(1) if own == 1 else t.unflatten(0, (-1, own))


def _positions(keep: Callable[[Any], int]) -> Callable[..., Any]:
    """Layers that take any dimensions before their last `keep`. A dimension of one in front is left
    out: rules are faster without.
    """

    def adapt(call: Call, module: Any, run: Run, x: Tensor) -> Any:
        single = x.dim() > keep(module) and x.shape[0] == 1
        return lowered(
            call, lambda batch, x: run(x.squeeze(1)).unsqueeze(1) if single else run(x), x
        )

    return adapt


def _images(without: Callable[[Any], int]) -> Callable[..., Any]:
    """Layers that take a batch of images, or one image of so many dimensions."""

    def adapt(call: Call, module: Any, run: Run, x: Tensor, *rest: Any, **options: Any) -> Any:
        if any(
            isinstance(value, Tensor) for value in (*rest, *options.values())
        ) or x.dim() not in (
            without(module),
            without(module) + 1,
        ):
            return NotImplemented
        if x.dim() == without(module):
            return lowered(call, lambda batch, x: run(x, *rest, **options), x)
        return lowered(call, lambda batch, t: unfold(run(fold(t), *rest, **options), x.shape[0]), x)

    return adapt


def _groups(call: Call, module: nn.GroupNorm, run: Run, x: Tensor) -> Any:
    """Its first dimension is always a batch."""
    return (
        NotImplemented
        if x.dim() < 2
        else lowered(call, lambda batch, t: unfold(run(fold(t)), x.shape[0]), x)
    )


def _bag(
    call: Call, module: nn.EmbeddingBag, run: Run, index: Tensor, *rest: Any, **options: Any
) -> Any:
    if index.dim() != 2 or any(value is not None for value in (*rest, *options.values())):
        return NotImplemented
    return lowered(call, lambda batch, t: unfold(run(fold(t)), index.shape[0]), index)


def _attention(
    call: Call,
    module: nn.MultiheadAttention,
    run: Run,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    alone, first = query.dim() == 2, module.batch_first
    if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
        return NotImplemented
    own = 1 if alone else query.shape[0 if first else 1]
    inputs = {
        id(t): t for t in (query, key, value)
    }  # which of them are the same, the rule will want to know
    masks = {
        name: t for name, t in (("padding", key_padding_mask), ("mask", attn_mask)) if t is not None
    }

    def work(batch: int, *values: Tensor) -> Any:
        put = {i: _sequences(t, alone, first) for i, t in zip(inputs, values, strict=False)}
        given = dict(zip(masks, values[len(inputs) :], strict=True))
        padding, mask = given.get("padding"), given.get("mask")
        if padding is not None and not alone:
            padding = fold(padding)
        if mask is not None:
            each = mask.dim() == 3  # one mask for all heads
            mask = mask.repeat_interleave(own * module.num_heads, 0) if each else mask.flatten(0, 1)
        q, k, v = (put[id(t)] for t in (query, key, value))
        y, weights = run(
            q,
            k,
            v,
            padding,
            need_weights,
            shared if mask is None else mask,
            average_attn_weights,
            is_causal,
        )
        y = _given_back(y, alone, first, own)
        return y if weights is None else (y, weights if alone else unfold(weights, own))

    shared = (
        attn_mask
        if attn_mask is not None and not _of_record(attn_mask) and attn_mask.dim() == 2
        else None
    )
    if shared is not None:
        masks.pop("mask")
    made = lowered(call, work, *inputs.values(), *masks.values())
    return made if need_weights else (made, None)


def _of_record(t: Tensor) -> bool:
    return torch._C._functorch.is_batchedtensor(t)


def _sequences(t: Tensor, alone: bool, batch_first: bool) -> Tensor:
    """Sequences of all records, as a layer takes them."""
    if batch_first:
        return t if alone else fold(t)
    return t.transpose(0, 1) if alone else fold(t.transpose(1, 2)).transpose(0, 1)


def _given_back(t: Tensor, alone: bool, batch_first: bool, own: int) -> Tensor:
    """The other way round."""
    if batch_first:
        return t if alone else unfold(t, own)
    return t.transpose(0, 1) if alone else unfold(t.transpose(0, 1), own).transpose(1, 2)


def _recurrent(call: Call, module: Any, run: Run, input: Any, hx: Any = None) -> Any:
    if not isinstance(input, Tensor) or input.dim() not in (2, 3):
        return NotImplemented
    alone, first = input.dim() == 2, module.batch_first
    own = 1 if alone else input.shape[0 if first else 1]
    states = [] if hx is None else list(hx) if isinstance(hx, tuple | list) else [hx]

    def work(batch: int, x: Tensor, *h: Tensor) -> Any:
        before = [_sequences(t, alone, False) for t in h]
        y, last = run(
            _sequences(x, alone, first),
            None if hx is None else tuple(before) if isinstance(hx, tuple | list) else before[0],
        )
        ends = [
            _given_back(t, alone, False, own)
            for t in (last if isinstance(last, tuple) else (last,))
        ]
        return (_given_back(y, alone, first, own), *ends)

    y, *last = lowered(call, work, input, *states)
    return y, tuple(last) if len(last) > 1 else last[0]


def _cell(call: Call, module: Any, run: Run, input: Tensor, hx: Any = None) -> Any:
    if input.dim() not in (1, 2):
        return NotImplemented
    alone, own = input.dim() == 1, 1 if input.dim() == 1 else input.shape[0]
    states = [] if hx is None else list(hx) if isinstance(hx, tuple | list) else [hx]

    def work(batch: int, x: Tensor, *h: Tensor) -> Any:
        x, *before = (t if alone else fold(t) for t in (x, *h))
        made = run(
            x, None if hx is None else tuple(before) if isinstance(hx, tuple | list) else before[0]
        )
        back = [
            t if alone else unfold(t, own) for t in (made if isinstance(made, tuple) else (made,))
        ]
        return tuple(back) if isinstance(made, tuple) else back[0]

    return lowered(call, work, input, *states)


ADAPTERS: dict[Callable[..., Any], Callable[..., Any]] = {
    run_linear: _positions(lambda module: 1),
    run_transformers_linear: _positions(lambda module: 1),
    run_embedding: _positions(lambda module: 0),
    run_layer_norm: _positions(lambda module: len(module.normalized_shape)),
    run_rms_norm: _positions(lambda module: len(module.normalized_shape)),
    run_group_norm: _groups,
    run_instance_norm: _images(lambda module: module._get_no_batch_dim()),
    run_convolution: _images(lambda module: len(module.kernel_size) + 1),
    run_transposed: _images(lambda module: len(module.kernel_size) + 1),
    run_bag: _bag,
    run_attention: _attention,
    run_recurrent: _recurrent,
    run_cell: _cell,
}
"""How a layer's call for one record becomes a call of its rule."""


LAYERS: dict[type, LayerRule] = {
    nn.Linear: LayerRule(run_linear),
    nn.Embedding: LayerRule(run_embedding, fits_embedding),
    nn.LayerNorm: LayerRule(run_layer_norm, has_scale),
    nn.RMSNorm: LayerRule(run_rms_norm, has_scale),
    nn.GroupNorm: LayerRule(run_group_norm, has_scale, batch_dims=1),
    nn.InstanceNorm1d: LayerRule(run_instance_norm, has_scale, batch_dims=1),
    nn.InstanceNorm2d: LayerRule(run_instance_norm, has_scale, batch_dims=1),
    nn.InstanceNorm3d: LayerRule(run_instance_norm, has_scale, batch_dims=1),
    nn.Conv1d: LayerRule(run_convolution, batch_dims=1),
    nn.Conv2d: LayerRule(run_convolution, batch_dims=1),
    nn.Conv3d: LayerRule(run_convolution, batch_dims=1),
    nn.ConvTranspose1d: LayerRule(run_transposed, batch_dims=1),
    nn.ConvTranspose2d: LayerRule(run_transposed, batch_dims=1),
    nn.ConvTranspose3d: LayerRule(run_transposed, batch_dims=1),
    nn.EmbeddingBag: LayerRule(run_bag, fits_bag),
    nn.MultiheadAttention: LayerRule(run_attention, fits_attention, PARAMETERS),
    nn.LSTM: LayerRule(run_recurrent, fits_recurrent),
    nn.GRU: LayerRule(run_recurrent, fits_recurrent),
    nn.RNN: LayerRule(run_recurrent, fits_recurrent),
    nn.LSTMCell: LayerRule(run_cell, own=CELL),
    nn.GRUCell: LayerRule(run_cell, own=CELL),
    nn.RNNCell: LayerRule(run_cell, own=CELL),
}
"""Layer type to its rule. A subclass counts only if it runs the very forward of the type in the
table.
"""

REGISTERED: dict[type, LayerRule] = {}
"""The same for layers of the user's own, as :func:`dpfy.register_layer` adds them."""

FOREIGN: dict[tuple[str, str], LayerRule] = {
    ("transformers.pytorch_utils", "Conv1D"): LayerRule(run_transformers_linear)
}
"""Rules for layers of optional packages, by module and class name, so that nothing need be
imported.
"""


def rule_for(module: nn.Module) -> LayerRule | None:
    """The rule of `module`, or None if nothing here explains it."""
    foreign = FOREIGN.get((type(module).__module__, type(module).__name__))
    if foreign is not None and "forward" not in vars(module) and plain_parameters(module):
        return foreign
    for kind in type(module).__mro__:
        rule = LAYERS.get(kind) or REGISTERED.get(kind)
        if rule is not None:
            same = type(module).forward is kind.forward and "forward" not in vars(module)  # type: ignore[attr-defined]
            return (
                rule if same and plain_parameters(module, rule.own) and rule.fits(module) else None
            )
    return None
