"""Small causal language models."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256
"""The values of a byte."""


class Block(nn.Module):
    """Attention to what came before, and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[texts, positions, width] to the same."""
        size, length, width = x.shape
        parts = self.queries(self.before(x)).reshape(
            size, length, 3, self.heads, width // self.heads
        )
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        hidden = torch.full((length, length), -math.inf, device=x.device).triu(1)
        shares = (q @ k.transpose(-1, -2) / math.sqrt(width // self.heads) + hidden).softmax(-1)
        x = x + self.mixed((shares @ v).transpose(1, 2).reshape(size, length, width))
        found: Tensor = x + self.narrow(functional.gelu(self.wide(self.between(x))))
        return found


class ByteTransformer(nn.Module):
    """A small causal language model, of bytes where nothing is said: [texts, positions] to logits
    [texts, positions, tokens].
    """

    def __init__(
        self,
        length: int,
        *,
        tokens: int = BYTES + 1,
        width: int = 96,
        layers: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)

    def forward(self, input_ids: Tensor) -> Tensor:
        """The logits of what follows each position."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
        x = self.token(input_ids) + self.place(places)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.last(x))
        return found
