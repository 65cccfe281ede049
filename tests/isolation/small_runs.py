"""A few private steps on tiny data, for the tests of what the isolation check accepts and refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpfy
from dpfy.data.records import as_records

RECORDS, WIDTH, CLASSES, WORDS, LENGTH = 96, 6, 3, 11, 5
Losses = Callable[..., Tensor]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def vectors() -> tuple[Tensor, Tensor]:
    g = seeded()
    return torch.randn(RECORDS, WIDTH, generator=g), torch.randint(
        0, CLASSES, (RECORDS,), generator=g
    )


def sequences() -> tuple[Tensor, Tensor]:
    g = seeded()
    return torch.randn(RECORDS, LENGTH, WIDTH, generator=g), torch.randint(
        0, CLASSES, (RECORDS,), generator=g
    )


def images() -> tuple[Tensor, Tensor]:
    g = seeded()
    return torch.randn(RECORDS, 2, 8, 8, generator=g), torch.randint(
        0, CLASSES, (RECORDS,), generator=g
    )


def tokens() -> tuple[Tensor, Tensor]:
    """Tokens and which of them count, at least one."""
    g = seeded()
    words = torch.randint(0, WORDS, (RECORDS, LENGTH), generator=g)
    lengths = torch.randint(1, LENGTH + 1, (RECORDS, 1), generator=g)
    return words, (torch.arange(LENGTH) < lengths).long()


def net(*layers: nn.Module) -> nn.Module:
    return (
        nn.Sequential(*layers)
        if layers
        else nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    )


def ce(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="none")


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ce(model(x), y)


class Apply(nn.Module):
    """A function between a body and a head, as a model."""

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        body: nn.Module | None = None,
        head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.body = body or nn.Linear(WIDTH, 8)
        self.function = function
        self.head = head or nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.function(self.body(x)))
        return out


def train(
    path: Path,
    model: nn.Module,
    losses: Losses = plain,
    data: Any = None,
    *,
    steps: int = 4,
    batch: float = 12,
    unit: Any = None,
    seed: int = 1,
    **runtime: Any,
) -> dpfy.PrivateTraining:
    """Train in a loop of one's own. `losses` gets the model and a batch."""
    data = vectors() if data is None else data
    records = as_records(data)
    options = {} if unit is None else {"unit": unit}
    plan = dpfy.dpsgd(len(records), batch, steps=steps, clip_norm=1.0, **options).with_noise(
        1.0, delta=1e-3
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    training = dpfy.PrivateTraining(
        model,
        optimizer,
        data,
        plan,
        dpfy.Run(path / "run", seed=seed),
        runtime=dpfy.Runtime(**runtime),
    )
    with training:
        for fields in training.batches():
            training.step(losses(model, *fields))
    return training
