"""Follow the regularised leader, the view of DP-FTRL: the model is the start less the (private) sum
of all gradients over lambda.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpfy.core import check
from dpfy.core.errors import InvalidInput


class Ftrl(Optimizer):
    """theta = theta_0 - v / lambda with s the sum of all gradients, v = s without momentum, v =
    momentum * v + s with it.

    With a constant rate this is SGD (1 / lambda its learning rate, the same momentum) in exact
    arithmetic: the change of v obeys the heavy-ball recurrence. It differs where the rate changes:
    a new lambda here rescales the whole path, not the next step. All of it is post-processing of
    private gradients and costs no privacy.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1.0, momentum: float = 0.0) -> None:
        if not 0 <= check.real("momentum", momentum) < 1:
            raise InvalidInput("momentum", momentum, "must lie in [0, 1)")
        super().__init__(params, {"lr": check.positive("lr", lr), "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Add the gradient to the sum and put the model where the sum says."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["start"] = p.detach().clone()
                    state["sum"] = torch.zeros_like(p)
                    if group["momentum"]:
                        state["velocity"] = torch.zeros_like(p)
                state["sum"].add_(p.grad)
                move = state["sum"]
                if group["momentum"]:
                    move = state["velocity"].mul_(group["momentum"]).add_(state["sum"])
                p.copy_(torch.add(state["start"], move, alpha=-group["lr"]))
