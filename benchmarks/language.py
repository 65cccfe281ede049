"""Transformers as people write them: torch's own encoder, Llama-style language models, low-rank
adapters on a frozen one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Encoder(nn.Module):
    """Torch's own encoder on token embeddings; the mean of its positions is classified."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        vocabulary: int = 8192,
        length: int = 128,
        classes: int = 10,
    ) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True
        )
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.body, self.head = (
            nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
            nn.Linear(width, classes),
        )

    def forward(self, index: Tensor) -> Tensor:
        places = torch.arange(index.shape[1], device=index.device).expand(index.shape)
        return self.head(self.body(self.token(index) + self.position(places)).mean(1))


class RmsNorm(nn.Module):
    """RMSNorm written out, as in most language models' own code."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        ) * self.weight


class LowRank(nn.Module):
    """A frozen linear layer and a trained product of two narrow ones beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: [batch, heads, positions, width of a head], and [positions, half of it]
    angles.
    """
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class LlamaBlock(nn.Module):
    """Grouped heads, rotary positions, a gated perceptron."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.each, self.heads, self.groups = width // heads, heads, groups
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.q, self.project = (
            nn.Linear(width, width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.k, self.v = (nn.Linear(width, groups * self.each, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            layer(h).unflatten(-1, (-1, self.each)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = rotated(q, angles), rotated(k, angles)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """A Llama-style language model with a head tied to its embedding."""

    def __init__(
        self, layers: int, width: int, heads: int, groups: int, hidden: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.token.weight, std=0.02)
        self.blocks = nn.ModuleList(
            [LlamaBlock(width, heads, groups, hidden) for _ in range(layers)]
        )
        self.norm, self.head = RmsNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, index: Tensor) -> Tensor:
        half = self.blocks[0].each // 2
        places = torch.arange(index.shape[1], device=index.device)[:, None]
        angles = places * 10000.0 ** (-torch.arange(half, device=index.device) / half)
        x = self.token(index)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x))


def adapted(model: nn.Module, rank: int) -> nn.Module:
    """`model` frozen, with low-rank adapters on the linear layers of its blocks."""
    model.requires_grad_(False)
    for block in model.blocks:  # type: ignore[union-attr]
        for name, child in list(block.named_children()):
            if isinstance(child, nn.Linear):
                setattr(block, name, LowRank(child, rank))
    return model


class Autocast(nn.Module):
    """A model in float32 whose forward pass runs under autocast to bfloat16."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.inner(x)
