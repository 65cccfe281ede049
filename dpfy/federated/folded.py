"""One pass for many clients through a chain of plain layers: clients lie beside each other as
channels, or as matrices of a batch.

Images of all clients are one image with the channels of all (``[rows, clients * channels, height,
width]``) and convolutions have a group for each client; behind the last of them rows are vectors
(``[clients, rows, features]``), and layers products of batches of matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

POINTWISE = (
    nn.Tanh,
    nn.ReLU,
    nn.Sigmoid,
    nn.GELU,
    nn.SiLU,
    nn.ELU,
    nn.LeakyReLU,
    nn.Hardtanh,
    nn.Softplus,
    nn.Identity,
)
POOLS = (nn.AvgPool2d, nn.MaxPool2d)


def chain(model: nn.Module, dimensions: int) -> list[tuple[str, nn.Module]] | None:
    """The layers of `model` in their order, by name, if it is a chain of layers that can be folded;
    else None.

    A record has so many `dimensions`: 3 for an image, 1 for a vector.

    Guarantees: for such a model a folded pass computes what the model does for each client.
    """
    layers = list(_leaves("", model))
    if type(model) is not nn.Sequential or not all(_plain(layer) for _, layer in layers):
        return None
    kinds = [_kind(layer) for _, layer in layers]
    if None in kinds or any(
        layer._forward_hooks or layer._forward_pre_hooks for _, layer in layers
    ):
        return None
    return (
        layers if _ordered([kind for kind in kinds if kind and kind != "p"], dimensions) else None
    )


def folded(layers: list[tuple[str, nn.Module]], weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """What each client's layers make of its rows: `x` is [clients, rows, ...], `weights` are
    stacked.
    """
    clients = len(x)
    if images := any(
        isinstance(layer, nn.Conv2d | nn.AvgPool2d | nn.MaxPool2d) for _, layer in layers
    ):
        x = x.transpose(0, 1).flatten(1, 2)
        x = x.contiguous(memory_format=_format(x))
    for name, layer in layers:
        if isinstance(layer, nn.Conv2d):
            weight, bias = weights[f"{name}.weight"].flatten(0, 1), weights.get(f"{name}.bias")
            x = functional.conv2d(
                x,
                weight.contiguous(memory_format=_format(x)),
                None if bias is None else bias.flatten(),
                layer.stride,
                layer.padding,
                layer.dilation,
                layer.groups * clients,
            )
        elif isinstance(layer, nn.Linear):
            product, bias = x @ weights[f"{name}.weight"].mT, weights.get(f"{name}.bias")
            x = product if bias is None else product + bias[:, None]
        elif isinstance(layer, nn.Flatten):
            x = x.unflatten(1, (clients, -1)).transpose(0, 1).flatten(2) if images else x.flatten(2)
            images = False
        else:
            x = layer(x)
    return x


def _format(x: Tensor) -> torch.memory_format:
    """Groups of few channels are several times faster on a CPU where channels lie side by side."""
    return torch.channels_last if x.device.type == "cpu" else torch.contiguous_format


def _leaves(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if type(module) is nn.Sequential:
        for child, inside in module.named_children():
            yield from _leaves(f"{name}.{child}" if name else child, inside)
    else:
        yield name, module


def _plain(layer: nn.Module) -> bool:
    """Neither a class of somebody's own, nor with weights that are something else (a
    parametrisation, say).
    """
    return type(layer) in (nn.Conv2d, nn.Linear, nn.Flatten, *POINTWISE, *POOLS)


def _kind(layer: nn.Module) -> str | None:
    """i: of images; v: of vectors; f: from images to vectors; p: of either; None: cannot be
    folded.
    """
    if isinstance(layer, nn.Conv2d):
        return "i" if layer.padding_mode == "zeros" else None
    if isinstance(layer, POOLS):
        return None if getattr(layer, "return_indices", False) else "i"
    if isinstance(layer, nn.Flatten):
        return "f" if (layer.start_dim, layer.end_dim) == (1, -1) else None
    return "v" if isinstance(layer, nn.Linear) else "p"


def _ordered(kinds: list[str], dimensions: int) -> bool:
    """Images, then flattened once, then vectors; or vectors from the beginning."""
    if "f" not in kinds:
        return dimensions == 1 and set(kinds) <= {"v"}
    where = kinds.index("f")
    return (
        set(kinds[:where]) <= {"i"}
        and set(kinds[where + 1 :]) <= {"v"}
        and (dimensions == 3 or where == 0)
    )
