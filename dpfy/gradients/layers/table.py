"""Which layer type has which rule."""

from __future__ import annotations

from torch import nn

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
