"""Steps of other libraries for the step benchmark: opacus by hooks and by ghost clipping, and
vmap(grad) of torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from cases import Case
from torch import Tensor, nn

CLIP, NOISE, RATE = 1.0, 1.0, 0.1

Step = Callable[[Tensor, Tensor], None]


def opacus_step(ghost: bool) -> Callable[[nn.Module, Case], Step]:
    """The peer: per-sample gradients by hooks, or ghost clipping. Torch's attention and recurrent
    layers become opacus' own.
    """

    def make(model: nn.Module, case: Case) -> Step:
        from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
        from opacus.validators import ModuleValidator

        if any(
            isinstance(module, nn.RNNBase | nn.MultiheadAttention) for module in model.modules()
        ):
            model = ModuleValidator.fix(model)
        sgd = torch.optim.SGD(model.parameters(), lr=RATE)
        known = {"noise_multiplier": NOISE, "max_grad_norm": CLIP, "expected_batch_size": 1}
        if not ghost:
            wrapped = GradSampleModule(model)
            optimizer = DPOptimizer(sgd, **known)

            def hooks(x: Tensor, y: Tensor) -> None:
                optimizer.zero_grad(set_to_none=True)
                case.losses(wrapped(x), y).mean().backward()
                optimizer.step()

            return hooks
        wrapped = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=CLIP, use_ghost_clipping=True
        )
        fast = DPOptimizerFastGradientClipping(sgd, **known)

        def step(x: Tensor, y: Tensor) -> None:
            fast.zero_grad(set_to_none=True)
            losses = case.losses(wrapped(x), y)
            losses.mean().backward(retain_graph=True)
            fast.zero_grad()
            coefficients = wrapped.get_clipping_coef()
            wrapped.disable_hooks()
            (coefficients.to(losses.dtype) * losses).sum().backward()
            wrapped.enable_hooks()
            fast.step()

        return step

    return make


def vmap_step(model: nn.Module, case: Case) -> Step:
    """The peer that needs no package: a gradient for each example by torch.func, all of them in
    memory. Not of frozen parameters.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return case.losses(torch.func.functional_call(model, values, (x[None],)), y[None]).sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different")

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        grads = each({name: p.detach() for name, p in parameters.items()}, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        scale = (CLIP / (norms + 1e-6)).clamp(max=1.0)
        for name, p in parameters.items():
            total = torch.tensordot(scale.to(p.dtype), grads[name], dims=1)
            p.grad = total.add_(torch.randn_like(total), alpha=NOISE * CLIP).div_(len(y))
        optimizer.step()

    return step
