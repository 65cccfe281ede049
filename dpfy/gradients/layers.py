"""One table row per layer type: how the layer runs with constant weights, and how it explains its output gradient.

A row computes what the layer computes, but with its parameters detached, and puts a tap on the result. Whatever gradient still
reaches a parameter through autograd was therefore not explained by any row, and the engine handles it by another route.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfy.gradients import kernels, nodes
from dpfy.gradients.contribution import Contribution, Direct, Late, Outer, SumJob, wide
from dpfy.gradients.convolution import Convolution, Geometry
from dpfy.gradients.rounding import row_squares
from dpfy.gradients.rows import Rows
from dpfy.gradients.shared import Measured
from dpfy.gradients.tape import Explain, Site, Tape

Found = list[tuple[Tensor, Contribution]]
View = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """How one layer type runs under the tape. `fits` says whether this very module can be explained."""

    run: Callable[..., Tensor]
    fits: Callable[[Any], bool] = lambda module: True


def constant(p: Tensor | None) -> Tensor | None:
    """The parameter's value, outside of autograd."""
    return None if p is None else p.detach()


def wanted(found: list[tuple[Tensor | None, Callable[[], Contribution]]]) -> Found:
    """The contributions of the parameters that exist and are trainable, computed only for them."""
    return [(p, make()) for p, make in found if p is not None and p.requires_grad]


def as_positions(t: Tensor) -> Tensor:
    """[batch, ..., features] to [batch, positions, features]."""
    return t.unsqueeze(1) if t.dim() == 2 else t.flatten(1, -2)


def total(t: Tensor, keep: int) -> Tensor:
    """Sum [batch, ..., *last `keep` dimensions] over everything between, in float32 or wider."""
    middle = list(range(1, t.dim() - keep))
    dtype = torch.float64 if t.dtype == torch.float64 else torch.float32
    if all(t.shape[i] == 1 for i in middle):
        return t.flatten(0, len(middle))
    return t.sum(middle, dtype=dtype)


def run_linear(module: nn.Linear, tape: Tape, site: Site, x: Tensor) -> Tensor:
    """y = x W' + b."""
    parameters = module._parameters
    weight, bias = parameters["weight"], parameters["bias"]
    assert weight is not None

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: View) -> Found:
        return outer_parts(weight, bias, view(g), view(saved[0]))

    if nodes.one_node():
        return nodes.run(nodes.linear, x, tape, site, explain, (), (weight, bias))
    return _product(x, tape, site, explain, weight, bias)


def _product(x: Tensor, tape: Tape, site: Site, explain: Explain, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y = x W' + b; a user's in-place operation on y stays legal."""
    if not torch.is_grad_enabled():
        return F.linear(x, weight.detach(), constant(bias))
    if not nodes.packed():
        if nodes.cast():  # what autocast makes of a parameter here it must not remember for other uses of it
            weight, bias = weight.detach(), constant(bias)
        return nodes.run(nodes.linear, x, tape, site, explain, (), (weight, bias))
    y = F.linear(x.reshape(-1, x.shape[-1]), weight.detach(), constant(bias))
    shape = torch.Size((*x.shape[:-1], y.shape[-1]))
    return tape.tap(y, site, explain, (x,), shape).view(shape)


def outer_parts(weight: Tensor, bias: Tensor | None, g: Tensor, a: Tensor) -> Found:
    """Contributions of y = a W' + b."""
    if g.dim() == 2 and not g.is_cuda:
        return _one_position(weight, bias, g, a.to(g.dtype))
    g, a = as_positions(g), as_positions(a)
    if kernels.usable(g) and g.shape[1] > 1:
        job = SumJob((g,))
        return wanted([(weight, lambda: Outer(g, a.to(g.dtype))), (bias, lambda: Late(job, 0, g.shape[2:]))])
    return wanted([(weight, lambda: Outer(g, a.to(g.dtype))), (bias, lambda: Direct(total(g, 1)))])


def _one_position(weight: Tensor, bias: Tensor | None, g: Tensor, a: Tensor) -> Found:
    """The same for one position an example: the norm of the output gradient serves weight and bias."""
    squares = row_squares(g)[None]
    return wanted(
        [
            (weight, lambda: Measured(squares * row_squares(a), Outer(g.unsqueeze(1), a.unsqueeze(1)))),
            (bias, lambda: Measured(squares, Direct(g))),
        ]
    )


def run_embedding(module: nn.Embedding, tape: Tape, site: Site, index: Tensor) -> Tensor:
    """Rows of the table; the padding row gets no gradient."""
    weight, padding = module._parameters["weight"], module.padding_idx
    assert weight is not None
    if not torch.is_grad_enabled():
        return F.embedding(index, weight.detach())

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: View) -> Found:
        grads, where = view(g), view(saved[0])
        where = where.reshape(len(where), -1)
        grads = grads.reshape(*where.shape, -1)
        if padding is not None:
            grads = grads.masked_fill((where == padding)[..., None], 0.0)
        return wanted([(weight, lambda: Rows(where, grads, len(weight)))])

    return nodes.run(nodes.lookup, index, tape, site, explain, (padding,), (weight,))


def fits_embedding(module: nn.Embedding) -> bool:
    """`max_norm` rewrites the table in forward; frequencies mix examples."""
    return module.max_norm is None and not module.scale_grad_by_freq


def run_layer_norm(module: nn.LayerNorm, tape: Tape, site: Site, x: Tensor) -> Tensor:
    """LayerNorm with its statistics kept for the gradient of the scale."""
    shape, parameters = module.normalized_shape, module._parameters
    weight, bias, keep = parameters["weight"], parameters["bias"], len(shape)

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: View) -> Found:
        a, m, r = saved[:3]
        if kernels.usable(g):
            job, tail = _scale_job(view(g), view(a), view(r), view(m), keep), g.shape[g.dim() - keep :]
            return wanted([(weight, lambda: Late(job, 1, tail)), (bias, lambda: Late(job, 0, tail))])
        return wanted(
            [
                (weight, lambda: Direct(total(view(g * ((a - m) * r)), keep))),
                (bias, lambda: Direct(total(view(g), keep))),
            ]
        )

    if nodes.one_node():
        return nodes.run(nodes.layer_norm, x, tape, site, explain, (keep,), (shape, weight, bias, module.eps))
    y, mean, rstd = torch.native_layer_norm(x, shape, constant(weight), constant(bias), module.eps)
    return tape.tap(y, site, explain, (x, mean, rstd), facts=(keep,))


def _scale_job(g: Tensor, a: Tensor, rstd: Tensor, mean: Tensor, keep: int) -> SumJob:
    """Gradients of scale and shift in one pass, on a GPU."""
    batch, width = len(g), g.shape[g.dim() - keep :].numel()
    flat = [t.reshape(batch, -1, width) for t in (g, a.to(g.dtype))]
    return SumJob((*flat, rstd.reshape(batch, -1), mean.reshape(batch, -1)))


def run_rms_norm(module: nn.RMSNorm, tape: Tape, site: Site, x: Tensor) -> Tensor:
    """RMSNorm; the normalised input is computed again for the gradient of the scale."""
    shape, keep = list(module.normalized_shape), len(module.normalized_shape)
    y = F.rms_norm(x, shape, module.weight.detach(), module.eps)

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: View) -> Found:
        return wanted([(module.weight, lambda: Direct(total(view(g * F.rms_norm(saved[0], shape, None, module.eps)), keep)))])

    return tape.tap(y, site, explain, (x,), facts=(keep, module.eps))


def has_scale(module: Any) -> bool:
    """Whether a normalisation layer has parameters at all."""
    return module.weight is not None


def run_group_norm(module: nn.GroupNorm, tape: Tape, site: Site, x: Tensor) -> Tensor:
    """GroupNorm with its statistics kept."""
    return _grouped(module, module.num_groups, tape, site, x)


def run_instance_norm(module: Any, tape: Tape, site: Site, x: Tensor) -> Tensor:
    """InstanceNorm is GroupNorm with one channel a group; autocast leaves its result as narrow as its input."""
    if x.dim() == module._get_no_batch_dim():
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return _grouped(module, module.num_features, tape, site, x).to(x.dtype)


def _grouped(module: Any, groups: int, tape: Tape, site: Site, x: Tensor) -> Tensor:
    many, channels = x.shape[:2]
    space = x.numel() // (many * channels) if many else 1
    weight, bias = module._parameters["weight"], module._parameters["bias"]

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: View) -> Found:
        a, m, r = saved[:3]
        sums, products = pair_sums(g, a)

        def scale() -> Contribution:
            each = (many, groups, channels // groups)
            centred = torch.addcmul(products.view(each), sums.view(each), m.to(sums.dtype)[..., None], value=-1)
            return Direct(total(view((centred * r[..., None]).view(many, channels)), 1))

        return wanted([(weight, scale), (bias, lambda: Direct(total(view(sums), 1)))])

    sizes = (many, channels, space, groups, module.eps)
    if nodes.one_node():
        return nodes.run(nodes.group_norm, x, tape, site, explain, (groups,), (weight, bias, *sizes))
    x, scales, shifts = x.contiguous(), constant(weight), constant(bias)
    if nodes.cast() and x.device.type != "cpu":  # autocast casts group_norm, not the function that keeps its statistics
        x, scales, shifts = wide(x), scales if scales is None else wide(scales), shifts if shifts is None else wide(shifts)
    y, mean, rstd = torch.native_group_norm(x, scales, shifts, *sizes)
    return tape.tap(y, site, explain, (x, mean, rstd), facts=(groups,))


def pair_sums(g: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """[many, channels] sums over space of g, and of g times a, in float32 or wider."""
    if kernels.usable(g):
        return kernels.pair_sums(g, a)
    if g.dim() == 2 or g.dtype not in (torch.float32, torch.float64):
        return total_space(g), total_space(wide(g) * wide(a))
    rows = g.shape[0] * g.shape[1]
    products = torch.bmm(g.reshape(rows, 1, -1), a.reshape(rows, -1, 1))
    return total_space(g), products.view(g.shape[:2])


def total_space(t: Tensor) -> Tensor:
    """[many, channels, *space] to [many, channels] sums, in float32 or wider."""
    dtype = torch.float64 if t.dtype == torch.float64 else torch.float32
    return t.sum(list(range(2, t.dim())), dtype=dtype) if t.dim() > 2 else t.to(dtype)


def run_convolution(module: Any, tape: Tape, site: Site, x: Tensor) -> Tensor:
    """Convolution of any dimension; padding that is not plain zeros is applied first, as the layer itself does."""
    if x.dim() != len(module.kernel_size) + 2:
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    a, padding = padded(module, x)
    return _convolved(module, a, tape, site, geometry(tuple(module.stride), padding, tuple(module.dilation), module.groups))


@cache
def geometry(
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    extra: tuple[int, ...] | None = None,
) -> tuple[Geometry, tuple[Any, ...]]:
    """How a convolution walks, and the same as torch wants to hear it. Transposed where there is `extra` output padding, be it zero."""
    how = Geometry(stride, padding, dilation, groups, extra is not None, extra or ())
    return how, (stride, padding, dilation, how.transposed, extra or (0,) * len(padding), groups)


def _convolved(module: Any, x: Tensor, tape: Tape, site: Site, walk: tuple[Geometry, tuple[Any, ...]]) -> Tensor:
    (how, given), parameters = walk, module._parameters
    weight, bias = parameters["weight"], parameters["bias"]

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: View) -> Found:
        return convolution_parts(weight, bias, how, view(g), view(saved[0]))

    if nodes.one_node():
        return nodes.run(nodes.convolution, x, tape, site, explain, (how,), (weight, bias, *given))
    return tape.tap(_convolution(x, weight.detach(), constant(bias), how), site, explain, (x,), facts=(how,))


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, how: Geometry) -> Tensor:
    """By the function of its dimension: not every autocast knows the general one."""
    count = len(how.stride)
    if how.transposed:
        upward: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[count - 1]
        return upward(x, weight, bias, how.stride, how.padding, how.output_padding, how.groups, how.dilation)  # type: ignore[no-any-return]
    along: Any = (F.conv1d, F.conv2d, F.conv3d)[count - 1]
    return along(x, weight, bias, how.stride, how.padding, how.dilation, how.groups)  # type: ignore[no-any-return]


def convolution_parts(weight: Tensor, bias: Tensor | None, how: Geometry, g: Tensor, a: Tensor) -> Found:
    """Contributions of a convolution whose tensors have the examples in front, and images of one example behind them."""
    images = 1
    if g.dim() > len(how.stride) + 2:
        images = g.shape[1]
        g, a = g.flatten(0, 1), a.flatten(0, 1)

    def shift() -> Contribution:
        sums = total_space(g)
        return Direct(sums if images == 1 else sums.unflatten(0, (-1, images)).sum(1))

    return wanted([(weight, lambda: Convolution(a.to(g.dtype), g, weight.detach().to(g.dtype), how, images)), (bias, shift)])


def padded(module: Any, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The input after explicit padding, and the zero padding left to the convolution."""
    if module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return x, tuple(module.padding)
    none = (0,) * len(module.kernel_size)
    if module.padding_mode != "zeros":
        return F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode), none
    return (x if module.padding == "valid" else F.pad(x, module._reversed_padding_repeated_twice)), none


def run_transposed(module: Any, tape: Tape, site: Site, x: Tensor, output_size: list[int] | None = None) -> Tensor:
    """Transposed convolution of any dimension."""
    count = len(module.kernel_size)
    if x.dim() != count + 2:
        return type(module).forward(module, x, output_size)  # type: ignore[no-any-return]
    extra = tuple(
        module._output_padding(x, output_size, module.stride, module.padding, module.kernel_size, count, module.dilation)
    )
    walk = geometry(tuple(module.stride), tuple(module.padding), tuple(module.dilation), module.groups, extra)
    return _convolved(module, x, tape, site, walk)


def run_bag(module: nn.EmbeddingBag, tape: Tape, site: Site, index: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Sum or mean of table rows, for bags of equal size; other calls run as the module does, outside of this row."""
    if index.dim() != 2 or any(v is not None for v in (*rest, *options.values())):
        return type(module).forward(module, index, *rest, **options)
    y = F.embedding_bag(index, module.weight.detach(), mode=module.mode)

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: View) -> Found:
        grads, where = view(g), view(saved[0])
        grads = (grads / where.shape[-1] if module.mode == "mean" else grads).unsqueeze(-2).expand(*where.shape, -1)
        flat = where.reshape(len(where), -1)
        return wanted([(module.weight, lambda: Rows(flat, grads.reshape(*flat.shape, -1), module.num_embeddings))])

    return tape.tap(y, site, explain, (index,), facts=(module.mode,))


def fits_bag(module: nn.EmbeddingBag) -> bool:
    """Sums and means only, without a padding row."""
    plain = module.max_norm is None and not module.scale_grad_by_freq and module.padding_idx is None
    return plain and module.mode in ("sum", "mean")


def run_transformers_linear(module: Any, tape: Tape, site: Site, x: Tensor) -> Tensor:
    """The `Conv1D` of transformers: a linear layer whose weight is stored transposed."""
    weight, bias = module._parameters["weight"], module._parameters["bias"]

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: View) -> Found:
        outs, ins = as_positions(view(g)), as_positions(view(saved[0]))
        return wanted([(weight, lambda: Outer(ins.to(outs.dtype), outs)), (bias, lambda: Direct(total(outs, 1)))])

    return _product(x, tape, site, explain, weight.detach().t(), bias)


LAYERS: dict[type, Row] = {
    nn.Linear: Row(run_linear),
    nn.Embedding: Row(run_embedding, fits_embedding),
    nn.LayerNorm: Row(run_layer_norm, has_scale),
    nn.RMSNorm: Row(run_rms_norm, has_scale),
    nn.GroupNorm: Row(run_group_norm, has_scale),
    nn.InstanceNorm1d: Row(run_instance_norm, has_scale),
    nn.InstanceNorm2d: Row(run_instance_norm, has_scale),
    nn.InstanceNorm3d: Row(run_instance_norm, has_scale),
    nn.Conv1d: Row(run_convolution),
    nn.Conv2d: Row(run_convolution),
    nn.Conv3d: Row(run_convolution),
    nn.ConvTranspose1d: Row(run_transposed),
    nn.ConvTranspose2d: Row(run_transposed),
    nn.ConvTranspose3d: Row(run_transposed),
    nn.EmbeddingBag: Row(run_bag, fits_bag),
}
"""Layer type to its row. A subclass counts only if it runs the very forward of the type in the table."""

FOREIGN: dict[tuple[str, str], Row] = {("transformers.pytorch_utils", "Conv1D"): Row(run_transformers_linear)}
"""Rows of layers of optional packages, by module and class name, so that nothing need be imported."""


def row_for(module: nn.Module) -> Row | None:
    """The row of `module`, or None if nothing here explains it."""
    foreign = FOREIGN.get((type(module).__module__, type(module).__name__))
    if foreign is not None and "forward" not in vars(module) and plain_parameters(module):
        return foreign
    for kind in type(module).__mro__:
        row = LAYERS.get(kind)
        if row is not None:
            same = type(module).forward is kind.forward and "forward" not in vars(module)  # type: ignore[attr-defined]
            return row if same and plain_parameters(module) and row.fits(module) else None
    return None


def plain_parameters(module: nn.Module) -> bool:
    """Whether weight and bias are the module's own parameters: not computed by a parametrization, and nothing beside them."""
    names = {name for name, p in module._parameters.items() if p is not None}
    read = {name for name in ("weight", "bias") if getattr(module, name, None) is not None}
    return names == read
