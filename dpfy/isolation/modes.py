"""Modes of torch that are left in another order than they were entered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)


def leave(mode: TorchDispatchMode | TorchFunctionMode) -> None:
    """Take `mode` off its stack, also from below modes that others entered meanwhile, which
    stay.
    """
    if isinstance(mode, TorchFunctionMode):
        depth = torch._C._len_torch_function_stack()
        if depth and torch._C._get_function_stack_at(depth - 1) is mode:
            mode.__exit__(None, None, None)
            return
    stack: Callable[[], list[Any]]
    pop: Callable[..., Any]
    if isinstance(mode, TorchDispatchMode):
        stack, pop, push = _get_current_dispatch_mode_stack, _pop_mode, _push_mode
    else:
        stack, pop, push = _get_current_function_mode_stack, _pop_function_mode, _push_function_mode
    above = []
    while stack() and stack()[-1] is not mode:
        above.append(pop())
    if stack():
        mode.__exit__(None, None, None)
    for other in reversed(above):
        push(other)
