"""Normalisation within an example: LayerNorm, RMSNorm, GroupNorm, InstanceNorm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfy.gradients import kernels
from dpfy.gradients.autograd.tape import Site, Tape
from dpfy.gradients.kernels import reductions
from dpfy.gradients.layers import fused
from dpfy.gradients.layers.rule import Found, RowsFirst, constant, total, total_space, wanted
from dpfy.gradients.per_example.arithmetic import wide
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.joined import Deferred, SumJob
from dpfy.gradients.per_example.outer import Direct


def run_layer_norm(module: nn.LayerNorm, tape: Tape, site: Site, x: Tensor) -> Tensor:
    """LayerNorm with its statistics kept for the gradient of the scale.

    Per-example gradients, from the gradient g of the output and the input before scale and shift:
        weight: einsum("ntf,ntf->nf", g, normalised)
        bias: einsum("ntf->nf", g)
    """
    shape, parameters = module.normalized_shape, module._parameters
    weight, bias, keep = parameters["weight"], parameters["bias"], len(shape)

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: RowsFirst) -> Found:
        a, m, r = saved[:3]
        if kernels.usable(g):
            job, tail = (
                _scale_job(view(g), view(a), view(r), view(m), keep),
                g.shape[g.dim() - keep :],
            )
            return wanted(
                [(weight, lambda: Deferred(job, 1, tail)), (bias, lambda: Deferred(job, 0, tail))]
            )
        return wanted(
            [
                (weight, lambda: Direct(total(view(g * ((a - m) * r)), keep))),
                (bias, lambda: Direct(total(view(g), keep))),
            ]
        )

    if fused.can_fuse():
        return fused.run(
            fused.layer_norm, x, tape, site, explain, (keep,), (shape, weight, bias, module.eps)
        )
    y, mean, rstd = torch.native_layer_norm(x, shape, constant(weight), constant(bias), module.eps)
    return tape.tap(y, site, explain, (x, mean, rstd), facts=(keep,))


def _scale_job(g: Tensor, a: Tensor, rstd: Tensor, mean: Tensor, keep: int) -> SumJob:
    """Gradients of scale and shift in one pass, on a GPU."""
    batch, width = len(g), g.shape[g.dim() - keep :].numel()
    flat = [t.reshape(batch, -1, width) for t in (g, a.to(g.dtype))]
    return SumJob((*flat, rstd.reshape(batch, -1), mean.reshape(batch, -1)))


def run_rms_norm(module: nn.RMSNorm, tape: Tape, site: Site, x: Tensor) -> Tensor:
    """RMSNorm; the normalised input is computed again for the gradient of the scale.

    Per-example gradients, from the gradient g of the output and the input before scale and shift:
        weight: einsum("ntf,ntf->nf", g, normalised)
    """
    shape, keep = list(module.normalized_shape), len(module.normalized_shape)
    y = F.rms_norm(x, shape, module.weight.detach(), module.eps)

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: RowsFirst) -> Found:
        return wanted(
            [
                (
                    module.weight,
                    lambda: Direct(
                        total(view(g * F.rms_norm(saved[0], shape, None, module.eps)), keep)
                    ),
                )
            ]
        )

    return tape.tap(y, site, explain, (x,), facts=(keep, module.eps))


def has_scale(module: Any) -> bool:
    """Whether a normalisation layer has parameters at all."""
    return module.weight is not None


def run_group_norm(module: nn.GroupNorm, tape: Tape, site: Site, x: Tensor) -> Tensor:
    """GroupNorm with its statistics kept, for channels c at places s.

    Per-example gradients, from the gradient g of the output and the input before scale and shift:
        weight: einsum("ncs,ncs->nc", g, normalised)
        bias: einsum("ncs->nc", g)
    """
    return _grouped(module, module.num_groups, tape, site, x)


def run_instance_norm(module: Any, tape: Tape, site: Site, x: Tensor) -> Tensor:
    """InstanceNorm is GroupNorm with one channel a group; autocast leaves its result as narrow as
    its input.

    Per-example gradients, from the gradient g of the output and the input before scale and shift:
        weight: einsum("ncs,ncs->nc", g, normalised)
        bias: einsum("ncs->nc", g)
    """
    if x.dim() == module._get_no_batch_dim():
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return _grouped(module, module.num_features, tape, site, x).to(x.dtype)


def _grouped(module: Any, groups: int, tape: Tape, site: Site, x: Tensor) -> Tensor:
    many, channels = x.shape[:2]
    space = x.numel() // (many * channels) if many else 1
    weight, bias = module._parameters["weight"], module._parameters["bias"]

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: RowsFirst) -> Found:
        a, m, r = saved[:3]
        sums, products = pair_sums(g, a)

        def scale() -> Contribution:
            each = (many, groups, channels // groups)
            centred = torch.addcmul(
                products.view(each), sums.view(each), m.to(sums.dtype)[..., None], value=-1
            )
            return Direct(total(view((centred * r[..., None]).view(many, channels)), 1))

        return wanted([(weight, scale), (bias, lambda: Direct(total(view(sums), 1)))])

    sizes = (many, channels, space, groups, module.eps)
    if fused.can_fuse():
        return fused.run(
            fused.group_norm, x, tape, site, explain, (groups,), (weight, bias, *sizes)
        )
    x, scales, shifts = x.contiguous(), constant(weight), constant(bias)
    if (
        fused.autocast_active() and x.device.type != "cpu"
    ):  # autocast casts group_norm, not the function that keeps its statistics
        x, scales, shifts = (
            wide(x),
            scales if scales is None else wide(scales),
            shifts if shifts is None else wide(shifts),
        )
    y, mean, rstd = torch.native_group_norm(x, scales, shifts, *sizes)
    return tape.tap(y, site, explain, (x, mean, rstd), facts=(groups,))


def pair_sums(g: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """[many, channels] sums over space of g, and of g times a, in float32 or wider."""
    if kernels.usable(g):
        return reductions.pair_sums(g, a)
    if g.dim() == 2 or g.dtype not in (torch.float32, torch.float64):
        return total_space(g), total_space(wide(g) * wide(a))
    rows = g.shape[0] * g.shape[1]
    products = torch.bmm(g.reshape(rows, 1, -1), a.reshape(rows, -1, 1))
    return total_space(g), products.view(g.shape[:2])
