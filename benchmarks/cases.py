"""The models that the step benchmark measures: small ones for a CPU, large ones for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from convnets import SMALL, ConvNext, MobileNet, UNet
from language import Autocast, Encoder, Llama, adapted
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A model, a batch of inputs and targets, and one loss per example."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    losses: Callable[[Tensor, Tensor], Tensor]


def classes(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy, one per example."""
    return F.cross_entropy(output.float(), target, reduction="none")


def tokens(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy over the positions of each example."""
    return (
        F.cross_entropy(output.flatten(0, 1).float(), target.flatten(), reduction="none")
        .view(target.shape)
        .mean(1)
    )


def pixels(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy over the pixels of each example."""
    return F.cross_entropy(output.float(), target, reduction="none").mean((1, 2))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A language model with learnt positions and an untied head."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads, causal=True) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, index: Tensor) -> Tensor:
        places = torch.arange(index.shape[1], device=index.device).expand(index.shape)
        x = self.token(index) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Vit(nn.Module):
    """A vision transformer on 16 x 16 patches."""

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, classes: int = 100
    ) -> None:
        super().__init__()
        self.patch = nn.Linear(3 * 16 * 16, width)
        self.blocks = nn.ModuleList([Block(width, heads, causal=False) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unfold(2, 16, 16).unfold(3, 16, 16).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        x = self.patch(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class WideResNet(nn.Module):
    """WRN-16-4 with 16 groups in its GroupNorms."""

    def __init__(self, widen: int = 4, depth: int = 2, classes: int = 10) -> None:
        super().__init__()
        widths = [16, 16 * widen, 32 * widen, 64 * widen]
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.units = nn.ModuleList()
        for group in range(3):
            for i in range(depth):
                into, out = widths[group] if i == 0 else widths[group + 1], widths[group + 1]
                self.units.append(self._unit(into, out, 2 if group and i == 0 else 1))
        self.norm, self.head = nn.GroupNorm(16, widths[3]), nn.Linear(widths[3], classes)

    @staticmethod
    def _unit(into: int, out: int, stride: int) -> nn.ModuleDict:
        short = nn.Conv2d(into, out, 1, stride, bias=False) if into != out else nn.Identity()
        return nn.ModuleDict(
            {
                "norm1": nn.GroupNorm(16, into),
                "conv1": nn.Conv2d(into, out, 3, stride, 1, bias=False),
                "norm2": nn.GroupNorm(16, out),
                "conv2": nn.Conv2d(out, out, 3, 1, 1, bias=False),
                "short": short,
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for unit in self.units:
            h = F.relu(unit["norm1"](x))
            x = unit["short"](h) + unit["conv2"](F.relu(unit["norm2"](unit["conv1"](h))))
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


class Bag(nn.Module):
    """Mean of token embeddings, then a linear layer."""

    def __init__(self, vocabulary: int = 50_000, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, classes)

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.table(index).mean(1))


class Sequences(nn.Module):
    """Token embeddings, two recurrent layers, a linear layer on the last output."""

    def __init__(
        self, kind: type[nn.RNNBase], width: int, vocabulary: int = 2048, classes: int = 10
    ) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, classes)
        self.layers = kind(width, width, num_layers=2, batch_first=True)  # type: ignore[call-arg, arg-type]

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.layers(self.table(index))[0][:, -1])


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def lenet() -> nn.Sequential:
    """LeNet-5 on 28 x 28 images."""
    return nn.Sequential(
        *[
            nn.Conv2d(1, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        ],
        *perceptron(400, 120, 84, 10),
    )


def tanh_cnn() -> nn.Sequential:
    """The small convolutional network with tanh that trains well under differential privacy."""
    return nn.Sequential(
        *[nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1)],
        *[nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Flatten()],
        *[nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)],
    )


def images(count: int, *shape: int, kinds: int = 10) -> Callable[[], Batch]:
    """Random inputs and labels."""
    return lambda: (torch.randn(count, *shape), torch.randint(0, kinds, (count,)))


def maps(count: int, size: int, kinds: int) -> Callable[[], Batch]:
    """Random images and a label for each of their pixels."""
    return lambda: (torch.randn(count, 3, size, size), torch.randint(0, kinds, (count, size, size)))


def text(count: int, length: int, vocabulary: int) -> Callable[[], Batch]:
    """Random token sequences and next tokens."""
    return lambda: (
        torch.randint(0, vocabulary, (count, length)),
        torch.randint(0, vocabulary, (count, length)),
    )


def zipf(count: int, length: int, vocabulary: int) -> Callable[[], Batch]:
    """Token sequences in which frequent tokens repeat, and a label for each."""

    def make() -> Batch:
        ranks = (torch.rand(count, length).clamp(min=1e-6) ** (-1 / 0.3)).clamp(
            max=vocabulary
        ).long() - 1
        return ranks, torch.randint(0, 10, (count,))

    return make


def sentences(count: int, length: int, vocabulary: int) -> Callable[[], Batch]:
    """Random token sequences and a label for each."""
    return lambda: (torch.randint(0, vocabulary, (count, length)), torch.randint(0, 10, (count,)))


AUTOCAST = "+autocast"
"""The end of a case's name: weights in float32, the forward pass under autocast to bfloat16."""


def under_autocast(case: Case) -> Case:
    """The same case with its forward pass under autocast."""
    return replace(case, model=lambda: Autocast(case.model()))


CPU: dict[str, Case] = {
    "mlp-256": Case(lambda: perceptron(784, 512, 256, 128, 10), images(256, 784), classes),
    "mlp-2048": Case(lambda: perceptron(784, 512, 256, 128, 10), images(2048, 784), classes),
    "lenet-256": Case(lenet, images(256, 1, 28, 28), classes),
    "lenet-2048": Case(lenet, images(2048, 1, 28, 28), classes),
    "cnn-512": Case(tanh_cnn, images(512, 1, 28, 28), classes),
    "wrn-32": Case(WideResNet, images(32, 3, 32, 32), classes),
    "depthwise-32": Case(lambda: MobileNet(SMALL, last=256), images(32, 3, 32, 32), classes),
    "gpt-16": Case(lambda: Gpt(4, 256, 4, 8192, 128), text(16, 128, 8192), tokens),
    "logistic-4096": Case(lambda: perceptron(784, 10), images(4096, 784), classes),
    "encoder-16": Case(lambda: Encoder(4, 256, 4), sentences(16, 128, 8192), classes),
    "lstm-32": Case(lambda: Sequences(nn.LSTM, 256), zipf(32, 64, 2048), classes),
    "gru-32": Case(lambda: Sequences(nn.GRU, 256), zipf(32, 64, 2048), classes),
    "bag-256": Case(Bag, zipf(256, 64, 50_000), classes),
}

GPU: dict[str, Case] = {
    "gpt2-t1024-8": Case(lambda: Gpt(12, 768, 12, 50304, 1024), text(8, 1024, 50257), tokens),
    "gpt2-t256-32": Case(lambda: Gpt(12, 768, 12, 50304, 256), text(32, 256, 50257), tokens),
    "vit-b16-64": Case(Vit, images(64, 3, 224, 224, kinds=100), classes),
    "wrn-256": Case(WideResNet, images(256, 3, 32, 32), classes),
    "convnext-64": Case(ConvNext, images(64, 3, 128, 128, kinds=100), classes),
    "mobilenet-256": Case(MobileNet, images(256, 3, 32, 32), classes),
    "unet-16": Case(UNet, maps(16, 128, 4), pixels),
    "lstm-128": Case(lambda: Sequences(nn.LSTM, 512), zipf(128, 64, 2048), classes),
    "gru-128": Case(lambda: Sequences(nn.GRU, 512), zipf(128, 64, 2048), classes),
    "mlp-4096": Case(lambda: perceptron(784, 4096, 4096, 10), images(4096, 784), classes),
    "encoder-t128-64": Case(
        lambda: Encoder(12, 768, 12, vocabulary=30522), sentences(64, 128, 30522), classes
    ),
    "llama-160m-16": Case(lambda: Llama(14, 768, 12, 4, 3072, 50304), text(16, 512, 50257), tokens),
    "llama-1b-8": Case(lambda: Llama(16, 2048, 32, 8, 8192, 32768), text(8, 512, 32768), tokens),
    "lora-8b-8": Case(
        lambda: adapted(Llama(32, 4096, 32, 8, 14336, 128256), 16), text(8, 512, 128256), tokens
    ),
    "lora-3b-8": Case(
        lambda: adapted(Llama(28, 3072, 24, 8, 8192, 32768), 16), text(8, 512, 32768), tokens
    ),
}
GPU |= {
    name + AUTOCAST: under_autocast(GPU[name])
    for name in ("gpt2-t256-32", "vit-b16-64", "encoder-t128-64", "llama-160m-16")
}
