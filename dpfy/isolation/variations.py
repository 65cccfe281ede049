"""Other circumstances of a recorded step: its parameters moved, and its switches turned on, as they
may be at a later step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from dpfy.isolation.operations import BATCH, Contents, Operation
from dpfy.isolation.program import Program

SPREAD = 0.1
"""How far parameters are moved, relative to their size, so that a gate that starts at zero shows
what lies behind it.
"""

SWITCHES = {
    "mul",
    "mul_",
    "div",
    "div_",
    "add",
    "add_",
    "sub",
    "sub_",
    "lerp",
    "lerp_",
    "addcmul",
    "addcmul_",
}
"""Operations in which a constant 0 or 1 may be a switch."""


def moved_parameters(program: Program, params: Sequence[nn.Parameter], seed: int) -> Contents:
    """Contents for the parameters' storages: every value moved at random, a parameter of zeros
    too.
    """
    found: Contents = {}
    for position, p in enumerate(t.detach() for t in params):
        storage = program.ref(p).storage
        if (
            storage in found
            or p.untyped_storage().nbytes() != p.numel() * p.element_size()
            or not p.is_contiguous()
        ):
            continue
        generator = torch.Generator().manual_seed(seed + position)
        size = p.float().square().mean().sqrt().nan_to_num(0.0, 0.0, 0.0)
        size = torch.where(size == 0, 1.0, size) * SPREAD
        step = torch.randn(p.shape, generator=generator).to(device=p.device)
        found[storage] = (p + (size * step).to(p.dtype)).untyped_storage()
    return found


def moved_constants(program: Program) -> dict[int, Any]:
    """By operation, other arguments for those that multiply or mix by 0 or 1: a switch that is off,
    and may be on at another step.
    """
    found = {}
    for operation in program.operations:
        if operation.name not in SWITCHES or not _of_batch(program, operation):
            continue
        args, kwargs = operation.arguments
        moved = (
            tuple([_half(a) for a in args]),
            {k: _half(a) if k in ("alpha", "weight", "value") else a for k, a in kwargs.items()},
        )
        if moved != (args, kwargs):
            found[id(operation)] = moved
    return found


def _of_batch(program: Program, operation: Operation) -> bool:
    """Whether real numbers of the batch are among what it takes, and what it gives."""
    real = all(r.dtype.is_floating_point for r in (*operation.outputs, *operation.written))
    return real and any(program.origin.get(r.storage, 0) & BATCH for r in operation.inputs)


def _half(value: Any) -> Any:
    return 0.5 if type(value) in (int, float) and value in (0, 1) else value


def moved_switches(program: Program, known: Collection[int]) -> Contents:
    """Contents for single numbers and flags from outside that are 0 or 1, and neither batch nor
    weight (`known`, by storage).
    """
    found: Contents = {}
    for index, storage in program.outside.items():
        if index in known or index in program.initial or program.origin.get(index, 0):
            continue
        refs = {r for o in program.operations for r in o.inputs if r.storage == index}
        if len(refs) != 1 or (ref := next(iter(refs))).shape:
            continue
        flag = ref.dtype is torch.bool
        if (flag or ref.dtype.is_floating_point) and storage.nbytes() == ref.dtype.itemsize:
            value = torch.empty(0, dtype=ref.dtype, device=ref.device).set_(
                storage, ref.offset, (), ()
            )  # type: ignore[call-overload]
            if float(value) in (0.0, 1.0):
                other = torch.full_like(value, not value if flag else 0.5)
                found[index] = other.untyped_storage()
    return found
