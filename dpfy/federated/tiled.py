"""One pass for many clients through convolutions, average pools and dense layers: few products of batches of matrices, and no graph.

Rows of a client lie innermost: images are ``[clients, channels, height, width, rows]`` and vectors ``[clients, features, rows]``. A
convolution is taken together with the activation and the pool behind it. The positions that one pool averages are a *tile*. The piece of
the image under a tile is a column; a matrix makes all outputs of the tile from it; the pool is the mean of as many blocks of the product.
Pieces of tiles overlap less than those of single positions, so fewer numbers are copied and the products are larger. The way back is
written by hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

TANH, RELU, SIGMOID, NONE = "tanh", "relu", "sigmoid", ""
ACTIVATIONS: dict[type[nn.Module], str] = {nn.Tanh: TANH, nn.ReLU: RELU, nn.Sigmoid: SIGMOID}
Gradients = tuple[Tensor | None, Tensor, Tensor | None]
"""Of what came in (if asked for), of the weight and of the bias (if there is one)."""


@dataclass(frozen=True)
class Dense:
    """A linear layer and the activation behind it."""

    name: str
    bias: bool
    activation: str = NONE

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Any]:
        """[clients, features, rows] to [clients, outputs, rows], and what the way back needs."""
        flat, scale = x.flatten(1, -2), _scale(self.activation)
        start = x.new_zeros(()) if bias is None else bias[:, :, None]
        out, at = _activated(torch.baddbmm(start, weight, flat, beta=scale, alpha=scale), self.activation)
        return out, (x.shape, flat, weight, at)

    def backward(self, given: Tensor, kept: Any, down: bool) -> Gradients:
        """From the gradient of the outputs."""
        shape, flat, weight, at = kept
        through = _through(given, at, self.activation)
        under = torch.bmm(weight.mT, through).view(shape) if down else None
        return under, torch.bmm(through, flat.mT), through.sum(2) if self.bias else None


@dataclass(frozen=True)
class Convolution:
    """A convolution, the activation behind it and the average pool behind that (of one position, where there is none)."""

    name: str
    bias: bool
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    activation: str = NONE
    pool: tuple[int, int] = (1, 1)

    @property
    def step(self) -> tuple[int, int]:
        """From one tile to the next."""
        return self.stride[0] * self.pool[0], self.stride[1] * self.pool[1]

    @property
    def piece(self) -> tuple[int, int]:
        """The size of what lies under a tile."""
        high, wide = ((p - 1) * s + k for p, s, k in zip(self.pool, self.stride, self.kernel, strict=True))
        return high, wide

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Any]:
        """[clients, channels, height, width, rows] to the same of the outputs, and what the way back needs."""
        columns, tiles = self._columns(x)
        matrix = self._matrix(weight, bias)
        found, at = _activated(torch.bmm(matrix, columns), self.activation, math.prod(self.pool))
        return found.view(len(x), -1, *tiles, x.shape[-1]), (x.shape, columns, matrix, at)

    def _columns(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The pieces as columns, with a row of ones for the bias; and how many tiles an image has, down and across.

        What a pool leaves over at the border is not computed.
        """
        clients, channels, height, width, rows = x.shape
        padded = height + 2 * self.padding[0], width + 2 * self.padding[1]
        sizes = zip(padded, self.kernel, self.stride, self.pool, strict=True)
        tall, broad = (((size - kernel) // stride + 1) // pool for size, kernel, stride, pool in sizes)
        taken = channels * math.prod(self.piece)
        columns = x.new_empty(clients, taken + self.bias, tall * broad * rows)
        pieces = columns[:, :taken].view(clients, channels, *self.piece, tall, broad, rows)
        for part, there in self._parts(pieces, self._apart(x)):
            part.copy_(there)
        columns[:, taken:] = 1.0
        return columns, (tall, broad)

    def _steps(self, height: int, width: int) -> tuple[int, int]:
        """How many steps a padded image has, down and across."""
        (down, across), (above, beside) = self.step, self.padding
        return -(-(height + 2 * above) // down), -(-(width + 2 * beside) // across)

    def _apart(self, x: Tensor) -> Tensor:
        """The padded image as [clients, channels, *step, steps down, steps across, rows]: what lies a step apart is side by side."""
        (height, width), (down, across), (above, beside) = x.shape[2:4], self.step, self.padding
        tall, broad = self._steps(height, width)
        below, behind = tall * down - above - height, broad * across - beside - width
        if above or beside or below or behind:
            x = functional.pad(x, (0, 0, beside, behind, above, below))
        return x.unflatten(2, (tall, down)).unflatten(4, (broad, across)).permute(0, 1, 3, 5, 2, 4, 6).contiguous()

    def _parts(self, pieces: Tensor, apart: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of pieces [clients, channels, *piece, tiles down, tiles across, rows], and where they lie in the image."""
        (high, wide, tall, broad), (down, across) = pieces.shape[2:6], self.step
        for a in range(0, high, down):
            for b in range(0, wide, across):
                part = pieces[:, :, a : a + down, b : b + across]
                lines, pixels = slice(a // down, a // down + tall), slice(b // across, b // across + broad)
                yield part, apart[:, :, : part.shape[2], : part.shape[3], lines, pixels]

    def _matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """From a column to the outputs of its tile, place by place: the kernel, moved there, and zero elsewhere."""
        clients, outputs, channels = weight.shape[:3]
        places, size, scale = math.prod(self.pool), math.prod(self.piece), _scale(self.activation)
        matrix = weight.new_empty(clients, places, outputs, channels * size + self.bias)
        moved = (weight.reshape(-1, math.prod(self.kernel)) @ _moves(self, weight.dtype, weight.device) * scale).view(
            clients, outputs, channels, places, size
        )
        matrix[..., : channels * size].view(clients, places, outputs, channels, size).copy_(moved.permute(0, 3, 1, 2, 4))
        if bias is not None:
            matrix[..., channels * size] = (bias * scale)[:, None]
        return matrix.flatten(1, 2)

    def backward(self, given: Tensor, kept: Any, down: bool) -> Gradients:
        """From the gradient of the outputs."""
        shape, columns, matrix, at = kept
        (clients, channels), tiles, size, places = shape[:2], given.shape[2:], math.prod(self.piece), math.prod(self.pool)
        taken = channels * size
        through = _through(given.flatten(2), at, self.activation, places)
        product = torch.bmm(through, columns.mT).unflatten(1, (places, -1))
        by_kernel = product[..., :taken].view(clients, places, -1, channels, size).permute(0, 2, 3, 1, 4)
        weight = (by_kernel.reshape(-1, places * size) @ _moves(self, given.dtype, given.device).T).view(
            clients, -1, channels, *self.kernel
        )
        bias = product[..., taken].sum(1) if self.bias else None
        if not down:
            return None, weight, bias
        start, scale = through.new_zeros(()), _scale(self.activation)
        pieces = torch.baddbmm(start, matrix[..., :taken].mT, through, beta=0, alpha=1 / scale)
        return self._image(pieces.view(clients, channels, *self.piece, *tiles), shape), weight, bias

    def _image(self, pieces: Tensor, shape: Sequence[int]) -> Tensor:
        """Pieces, added up where they lay in an image of this shape."""
        (height, width), (down, across), (above, beside) = shape[2:4], self.step, self.padding
        tall, broad = self._steps(height, width)
        apart = pieces.new_zeros(*shape[:2], down, across, tall, broad, shape[-1])
        for part, there in self._parts(pieces, apart):
            there.add_(part)
        whole = apart.permute(0, 1, 4, 2, 5, 3, 6).reshape(*shape[:2], tall * down, broad * across, shape[-1])
        return whole[:, :, above : above + height, beside : beside + width]


@cache  # a CUDA graph reads it where it lies: it stays
def _moves(stage: Convolution, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Takes the numbers of a kernel to their places in a piece, for each position of a tile: [kernel, positions * piece]."""
    (high, wide), (down, across) = stage.kernel, stage.stride
    moves = torch.zeros(high, wide, *stage.pool, *stage.piece)
    for a, b, i, j in itertools.product(range(stage.pool[0]), range(stage.pool[1]), range(high), range(wide)):
        moves[i, j, a, b, a * down + i, b * across + j] = 1.0
    return moves.view(high * wide, -1).to(device, dtype)


Stage = Dense | Convolution


def stages(layers: Sequence[tuple[str, nn.Module]]) -> list[Stage] | None:
    """A chain of layers as stages: convolutions, each with its activation and average pool, if any; then dense layers. Else None.

    Guarantees: for such a chain :func:`tiled` computes what the layers do, up to the rounding of sums.
    """
    made: list[Stage] = []
    flat, pooled = not any(isinstance(layer, nn.Conv2d) for _, layer in layers), False
    for name, layer in layers:
        last = made[-1] if made else None
        if isinstance(layer, nn.Linear) and flat:
            made.append(Dense(name, layer.bias is not None))
        elif isinstance(layer, nn.Conv2d) and _simple(layer):
            sizes: Any = layer.kernel_size, layer.stride, layer.padding
            made.append(Convolution(name, layer.bias is not None, *sizes))
            pooled = False
        elif type(layer) in ACTIVATIONS and last and not last.activation and not pooled and flat == isinstance(last, Dense):
            made[-1] = replace(last, activation=ACTIVATIONS[type(layer)])
        elif isinstance(layer, nn.AvgPool2d) and isinstance(last, Convolution) and not pooled and (size := _pool(layer)):
            made[-1], pooled = replace(last, pool=size), True
        elif isinstance(layer, nn.Flatten):
            flat, pooled = True, False
        elif not isinstance(layer, nn.Identity):
            return None
    return made if made and isinstance(made[-1], Dense) else None


def tiled(made: Sequence[Stage], weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """What each client's stages make of its rows: `x` is [clients, rows, ...], `weights` are stacked."""
    named = [weights.get(f"{stage.name}.{kind}") for stage in made for kind in ("weight", "bias")]
    return _Pass.apply(made, x, *named)  # type: ignore[no-any-return, no-untyped-call]


class _Pass(torch.autograd.Function):
    """All stages forward, and all of them back."""

    @staticmethod
    def forward(ctx: Any, made: Sequence[Stage], x: Tensor, *weights: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.made, ctx.kept, ctx.shape = made, [], x.shape
        x = x.permute(0, 2, 3, 4, 1).contiguous() if isinstance(made[0], Convolution) else x.flatten(2).mT
        for stage, weight, bias in zip(made, weights[::2], weights[1::2], strict=True):
            assert weight is not None
            x, kept = stage.forward(x, weight, bias)
            ctx.kept.append(kept)
        return x.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        at: Tensor | None = given.mT
        found: list[Tensor | None] = []
        wanted = ctx.needs_input_grad[1]
        for place, stage in reversed(list(enumerate(ctx.made))):
            at, weight, bias = stage.backward(at, ctx.kept[place], place > 0 or wanted)
            found += [bias, weight]
        x = at.movedim(-1, 1).reshape(ctx.shape) if at is not None and wanted else None
        return (None, x, *reversed(found))


def _scale(activation: str) -> float:
    """By how much its argument is multiplied beforehand, for nothing."""
    return 2.0 if activation == TANH else 1.0


def _activated(made: Tensor, activation: str, places: int = 1) -> tuple[Tensor, Tensor]:
    """The activation of products [clients, places * outputs, ...], its mean over the places, and what the way back needs.

    tanh(z) = 2 sigmoid(2 z) - 1, and sigmoid is several times faster on a CPU. (Products come scaled.)
    """
    if activation in (TANH, SIGMOID):
        made = made.sigmoid_()
    elif activation == RELU:
        made = made.clamp_min_(0.0)
    out = made.unflatten(1, (places, -1)).mean(1) if places > 1 else made
    return (out.mul(2.0).sub_(1.0) if activation == TANH else out), made


def _through(given: Tensor, at: Tensor, activation: str, places: int = 1) -> Tensor:
    """The gradient of the products (before they were scaled) from that of the means."""
    factor = (4.0 if activation == TANH else 1.0) / places
    each = (given * factor if factor != 1 else given)[:, None]
    values = at.unflatten(1, (places, -1))
    if activation in (TANH, SIGMOID):
        found = torch.ops.aten.sigmoid_backward(each, values)
    elif activation == RELU:
        found = torch.ops.aten.threshold_backward(each, values, 0)
    else:
        found = each.expand(values.shape)
    return found.flatten(1, 2)


def _simple(layer: nn.Conv2d) -> bool:
    """Every number of a piece is used, and channels are not grouped."""
    if layer.groups != 1 or layer.dilation != (1, 1) or isinstance(layer.padding, str):
        return False
    return all(stride <= size for stride, size in zip(layer.stride, layer.kernel_size, strict=True))


def _pool(layer: nn.AvgPool2d) -> tuple[int, int] | None:
    """Its size, if windows lie side by side."""
    size, stride, padding = (v if isinstance(v, tuple) else (v, v) for v in (layer.kernel_size, layer.stride, layer.padding))
    plain = size == stride and padding == (0, 0) and not layer.ceil_mode and layer.divisor_override is None
    return (size[0], size[1]) if plain else None
