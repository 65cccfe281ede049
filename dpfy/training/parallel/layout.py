"""Which layout a model has: as it was given, by torch's wrappers, and by the ranks that train
it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpfy.training.parallel.data_parallel import Replicated, SingleDevice
from dpfy.training.parallel.dtensor import local
from dpfy.training.parallel.fully_sharded import FullySharded, check_sharded, is_fully_sharded
from dpfy.training.parallel.tensor_parallel import TensorParallel, check_parallel, same_generators
from dpfy.training.parallel.world import World


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that torch's DistributedDataParallel wraps, which is told to leave gradients alone;
    any other model itself.

    Guarantees: no gradient before its noise goes through the wrapper, and its forward pass does not
    wait for other ranks.
    """
    if not isinstance(model, DistributedDataParallel):
        return model
    model.require_backward_grad_sync = model.require_forward_param_sync = False
    return model.module  # type: ignore[no-any-return]


def placed(model: nn.Module, name: str | None) -> torch.device:
    """Put `model` on the device called `name`, by default where it is; one that torch has sharded
    computes where its mesh is.
    """
    first: Any = next(model.parameters())
    if local(first) is not first:
        kind = first.device_mesh.device_type
        return (
            torch.device(kind, torch.cuda.current_device())
            if kind == "cuda"
            else torch.device(kind)
        )
    device = torch.device(name or first.device)
    model.to(device)
    return device


def layout_of(model: nn.Module, world: World) -> SingleDevice:
    """The layout of `model`. All ranks get the weights of rank 0, unless each holds a part of
    them.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    sharded = any(local(p) is not p for p in parameters.values())
    if world.count > 1:
        named = {**parameters, **buffers}
        facts = [
            f"{name} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for name, t in named.items()
        ]
        world.agree("the model", {"model": facts, "layout": sharded})
        world.broadcast([*(p for p in parameters.values() if local(p) is p), *buffers.values()])
    if sharded and is_fully_sharded(model):
        check_sharded(model, world.count)
        return FullySharded(world, model=model)
    if sharded:
        check_parallel(model, world)
        same_generators(world, placed(model, None))
        return TensorParallel(world, model=model)
    return Replicated(world, model=model) if world.count > 1 else SingleDevice(world, model=model)
