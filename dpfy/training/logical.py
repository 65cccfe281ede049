"""The logical batch under way: its physical batches go out one by one, and each is added once."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfy.core.errors import InvalidInput
from dpfy.gradients.engine import Grads


class LogicalBatch:
    """Which physical batch is out and waits for its losses, whether it was added, and the sum so
    far.
    """

    def __init__(self, pieces: int) -> None:
        self.left = pieces
        self.waiting = False
        self.idle = True
        self.rows = 0
        self.mask: Tensor | None = None
        self.total: Grads = {}

    def expect(self, mask: Tensor | None, rows: int) -> None:
        """A physical batch of `rows` rows is handed out; of these `mask` says which count."""
        self.mask, self.rows, self.waiting, self.idle = mask, rows, True, False

    def add(self, part: Grads, keep: bool = True) -> None:
        """Add the sum over the physical batch that is out. Without `keep` its tensors will be
        overwritten.
        """
        if self.left > 1 or self.total:
            part = {
                name: value.to_dense() if value.is_sparse else value for name, value in part.items()
            }
        if self.total:
            torch._foreach_add_([self.total[name] for name in part], list(part.values()))
        else:
            copy = not keep and self.left > 1
            self.total = {name: value.clone() if copy else value for name, value in part.items()}
        self.left -= 1
        self.idle = True

    @property
    def complete(self) -> bool:
        """Whether every physical batch was added."""
        return self.left == 0

    def require_added(self) -> None:
        """Refuse to go on before the physical batch that is out was added."""
        if not self.idle:
            raise InvalidInput(
                "step", "no call", "every batch must be followed by exactly one step(losses)"
            )

    def check_losses(self, losses: Tensor) -> None:
        """Refuse what is not one loss for each row of the batch that is out."""
        if not isinstance(losses, Tensor) or losses.dim() == 0:
            raise InvalidInput(
                "losses",
                "a scalar",
                'must hold one loss per example: compute the loss with reduction="none"',
            )
        if losses.shape != (self.rows,):
            rule = f"must have shape ({self.rows},): one loss per example of the batch"
            raise InvalidInput("losses", f"shape {tuple(losses.shape)}", rule)
        if not losses.requires_grad:
            raise InvalidInput(
                "losses", "no graph", "must depend on the model's trainable parameters"
            )
