"""What both kinds of networks need: rows as one-hot vectors, a generator of such rows, and a
discriminator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpfy.core.randomness import Randomness
from dpfy.synthetic.columns import Codes
from dpfy.synthetic.run import seeded

LATENT, WIDTH, HIDDEN = 64, 128, 128
"""Random numbers that a row is made of; units of a layer of the generator, and of the
discriminator.
"""
TEMPERATURE = 0.5
"""Of the softmax through which the generator learns; the rows themselves are drawn."""
RATE, BETAS = 1e-3, (0.5, 0.9)
"""Of the generator's optimizer."""
DRAWN = 1 << 12
"""Rows that are drawn at a time."""


def one_hot(codes: Tensor, sizes: Sequence[int]) -> Tensor:
    """Cells [rows, columns] as vectors [rows, cells of all columns]."""
    starts = torch.tensor([0, *np.cumsum(sizes)[:-1].tolist()], device=codes.device)
    found = torch.zeros(len(codes), sum(sizes), device=codes.device)
    return found.scatter_(1, codes + starts, 1.0)


class Discriminator(nn.Module):
    """A score for each one-hot row, along the last axis: high where it looks like a record."""

    def __init__(self, cells: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(cells, HIDDEN),
            nn.LeakyReLU(0.2),
            nn.Linear(HIDDEN, HIDDEN),
            nn.LeakyReLU(0.2),
            nn.Linear(HIDDEN, 1),
        )

    def forward(self, rows: Tensor) -> Tensor:
        """One score a row."""
        scores: Tensor = self.layers(rows).squeeze(-1)
        return scores


class TableGenerator(nn.Module):
    """From random numbers to the logits of every cell of a row."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.layers = nn.Sequential(
            nn.Linear(LATENT, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(),
            nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(),
            nn.Linear(WIDTH, sum(sizes)),
        )  # fmt: skip

    def drawn(self, rng: np.random.Generator, count: int) -> tuple[Tensor, ...]:
        """Perturbed logits (Gumbel) of each column, [count, cells]: the largest of them is a draw
        from the softmax.
        """
        device = next(self.parameters()).device
        noise = torch.tensor(
            rng.standard_normal((count, LATENT), dtype=np.float32), device=device
        )  # in torch's own memory: the
        # last bits of a product depend on where its factors lie, and a run that begins again must
        # compute the same
        shaken = np.maximum(
            rng.standard_exponential((count, sum(self.sizes)), dtype=np.float32), 1e-30
        )
        logits = self.layers(noise) - torch.from_numpy(shaken).log().to(device)
        return logits.split(self.sizes, dim=1)

    def forward(self, rng: np.random.Generator, count: int) -> Tensor:
        """One-hot rows, through which gradients flow as through a softmax (straight-through)."""
        parts = []
        for logits in self.drawn(rng, count):
            soft = (logits / TEMPERATURE).softmax(dim=1)
            hard = functional.one_hot(soft.argmax(dim=1), logits.shape[1]).to(soft.dtype)
            parts.append(hard + soft - soft.detach())
        return torch.cat(parts, dim=1)

    @torch.no_grad()
    def codes(self, rng: np.random.Generator, count: int) -> Tensor:
        """Rows as cells [count, columns]."""
        return torch.stack([logits.argmax(dim=1) for logits in self.drawn(rng, count)], dim=1)


@dataclass(eq=False)
class GeneratorTrainer:
    """A generator with its optimizer. All its randomness is that of addresses in the run's secret:
    none depends on the records.
    """

    generator: TableGenerator
    optimizer: torch.optim.Optimizer
    randomness: Randomness

    @classmethod
    def fresh(
        cls, sizes: Sequence[int], randomness: Randomness, device: str = "cpu"
    ) -> GeneratorTrainer:
        """A new one."""
        with seeded(randomness, "generator"):
            generator = TableGenerator(sizes).to(device)
        return cls(
            generator, torch.optim.Adam(generator.parameters(), lr=RATE, betas=BETAS), randomness
        )

    @torch.no_grad()
    def fakes(self, stream: str, step: int, count: int) -> Tensor:
        """One-hot rows to be told from records."""
        found: Tensor = self.generator(self.randomness.generator(f"{stream} rows", step), count)
        return found

    def learn(self, frozen_copy: nn.Module, step: int, count: int) -> None:
        """One step towards rows that the discriminator takes for records, by a frozen copy of it."""
        self.optimizer.zero_grad()
        scores = frozen_copy(self.generator(self.randomness.generator("lesson rows", step), count))
        functional.softplus(-scores).mean().backward()
        self.optimizer.step()

    def rows(self, count: int, rng: np.random.Generator) -> Codes:
        """So many rows, as cells."""
        found = [
            self.generator.codes(rng, min(DRAWN, count - start)) for start in range(0, count, DRAWN)
        ]
        codes: Codes = torch.cat(found).cpu().numpy()
        return codes

    def facts(self) -> dict[str, Any]:
        """What there is to say about it."""
        return {"weights": sum(p.numel() for p in self.generator.parameters())}
