"""The weights that a run releases, by plain names: as the user's own model calls them, whatever it
was wrapped in to be trained.

A compiled or parallel model has the names of the model inside it. Of an adapter on a frozen base
(LoRA and its kin, by peft) only the adapter is released: the base is public and stays where it is,
and a fingerprint says which one it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.training.parallel.dtensor import full, local

TUNERS = ("BaseTunerLayer", "AuxiliaryTrainingWrapper")
"""Layers of peft that hold an adapter beside the layer that they adapt, by name, so that peft need
not be there.
"""
ADAPTED, UNUSED = "base_layer", "original_module"
"""What such a layer calls the layer it adapts, and one that it stands in for: the latter takes no
part in anything.
"""


def inside(model: nn.Module) -> nn.Module:
    """The model itself, out of what compiles it or makes it parallel."""
    while (name := _wrapped(model)) is not None:
        model = model.get_submodule(name)
    return model


def plain(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict by plain names."""
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        kept = ".".join(part for module, part in _path(model, name) if _wrapped(module) != part)
        if kept in found:
            raise Unsupported(
                f"two weights called {kept!r} in one model", "wrap the model once, or not at all"
            )
        found[kept] = value
    return found


def released(model: nn.Module) -> dict[str, Tensor]:
    """What a run of `model` writes: the adapter where there is one, else all."""
    whole = plain(model)
    mine = adapter(model)
    return whole if mine is None else {name: whole[name] for name in whole if name in mine}


def adapter(model: nn.Module) -> set[str] | None:
    """The plain names of all that is trained or belongs to an adapter; None for a model without
    one.
    """
    bare = inside(model)
    if not any(type(module).__module__.startswith("peft.") for module in bare.modules()):
        return None
    moving = {_place(t) for t in bare.parameters() if t.requires_grad and t.numel()}
    whole = plain(bare)
    return {name for name, t in whole.items() if _place(t) in moving or _adapts(bare, name)}


def base_of(model: nn.Module) -> dict[str, Any] | None:
    """The base of an adapter, for the report: what it is called, and a fingerprint of its weights;
    None for a model without one.

    Of a model whose weights lie in parts on several ranks all of them must ask together.
    """
    mine = adapter(model)
    if mine is None:
        return None
    frozen = {
        name: t
        for name, t in plain(inside(model)).items()
        if name not in mine and f".{UNUSED}." not in f".{name}"
    }
    return {
        "name": _base_name(inside(model)),
        "sha256": fingerprint(frozen),
        "tensors": len(frozen),
    }


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and content."""
    found = hashlib.sha256()
    for name, t in sorted(weights.items()):
        found.update(f"{name} {t.dtype} {tuple(t.shape)};".encode())
        found.update(
            full(t).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            if t.numel()
            else b""
        )
    return found.hexdigest()


def restore(model: nn.Module, weights: Mapping[str, Tensor], rule: str) -> None:
    """Give `model` these weights; `rule` ends the refusal of a model that they are not of.

    Guarantees: all or nothing: a model of other names, shapes or narrower types is refused and left
    as it is.
    """
    mine = released(model)
    if any(local(t) is not t for t in mine.values()):
        raise Unsupported(
            "loading into a model whose weights lie in parts on several ranks",
            "load before it is sharded",
        )
    for what, names in (
        ("lacks", weights.keys() - mine.keys()),
        ("has, beside the released weights,", mine.keys() - weights.keys()),
    ):
        if names:
            raise InvalidInput(
                "model", type(inside(model)).__name__, f"{rule}: it {what} {min(names)}"
            )
    for name, value in weights.items():
        held = mine[name]
        if held.shape != value.shape:
            told = f"{name} has shape {list(held.shape)} and not {list(value.shape)}"
            raise InvalidInput("model", type(inside(model)).__name__, f"{rule}: {told}")
        if torch.promote_types(held.dtype, value.dtype) != held.dtype:
            told = f"{name} is {held.dtype} and was released as {value.dtype}"
            raise InvalidInput(
                "model", type(inside(model)).__name__, f"{told}: load into that type, then convert"
            )
    with torch.no_grad():
        for name, value in weights.items():
            mine[name].copy_(value)


def _place(t: Tensor) -> int:
    return local(t).untyped_storage().data_ptr()


def _wrapped(module: nn.Module | None) -> str | None:
    """What a wrapper calls the model in it; None for any other module."""
    if isinstance(module, DataParallel | DistributedDataParallel):
        return "module"
    return "_orig_mod" if type(module).__name__ == "OptimizedModule" else None


def _tuner(module: nn.Module) -> bool:
    return any(
        kind.__name__ in TUNERS and kind.__module__.startswith("peft.")
        for kind in type(module).__mro__
    )


def _adapts(model: nn.Module, name: str) -> bool:
    """Whether a weight belongs to an adapter, trained or not: it lies in one's layer, and not in
    what that adapts.
    """
    way = list(_path(model, name))
    held = [place for place, (module, _) in enumerate(way) if module is not None and _tuner(module)]
    return bool(held) and way[held[-1]][1] not in (ADAPTED, UNUSED)


def _path(model: nn.Module, name: str) -> Iterator[tuple[nn.Module | None, str]]:
    """The parts of a weight's name, each with the module that it is a part of."""
    module: nn.Module | None = model
    for part in name.split("."):
        yield module, part
        module = None if module is None else module._modules.get(part)


def _base_name(model: nn.Module) -> str:
    """What the base is called: as its maker says, without the folders of this machine; else its
    class.
    """
    settings = [value for m in model.modules() for value in getattr(m, "peft_config", {}).values()]
    said = [getattr(held, "base_model_name_or_path", None) for held in settings]
    said += [getattr(getattr(m, "config", None), "_name_or_path", None) for m in model.modules()]
    found = next(
        (name for name in said if isinstance(name, str) and name.strip() and name.isprintable()),
        None,
    )
    if found is None:
        return next(
            (
                type(m).__name__
                for m in model.modules()
                if not type(m).__module__.startswith("peft.")
            ),
            type(model).__name__,
        )
    path = PurePath(found)
    return (
        path.name
        if path.is_absolute() or len(path.parts) > 2 or found.startswith((".", "~"))
        else found
    )
