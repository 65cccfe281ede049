"""One pass for many clients through convolutions, average pools and dense layers: few products of
batches of matrices, and no graph.

Rows of a client lie innermost: images are ``[clients, channels, height, width, rows]`` and vectors
``[clients, features, rows]``. A convolution is taken together with the activation and the pool
behind it. The positions that one pool averages are a *tile*. The piece of the image under a tile is
a column; a matrix makes all outputs of the tile from it; the pool is the mean of as many blocks of
the product. Pieces of tiles overlap less than those of single positions, so fewer numbers are
copied and the products are larger. The way back is written by hand.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

TANH, RELU, SIGMOID, NONE = "tanh", "relu", "sigmoid", ""
ACTIVATIONS: dict[type[nn.Module], str] = {nn.Tanh: TANH, nn.ReLU: RELU, nn.Sigmoid: SIGMOID}
Gradients = tuple[Tensor | None, Tensor, Tensor | None]
"""Of what came in (if asked for), of the weight and of the bias (if there is one)."""


class NewMemory:
    """New memory for every tensor of a pass."""

    def begin(self) -> None:
        """A pass begins."""

    def empty(self, like: Tensor, *shape: int) -> Tensor:
        """Memory of this shape, for numbers like those."""
        return like.new_empty(shape)

    def over(self, old: Tensor) -> Tensor:
        """Memory for what is computed from `old`, number by number, when nobody reads that
        again.
        """
        return torch.empty_like(old)


class SameMemory(threading.local, NewMemory):
    """The memory of the last pass of this thread, for the next: on a CPU new memory costs about as
    much as what is computed in it.

    Anyone who uses it is done with all that a pass gave, and has gone back through it once, before the
    next pass begins.
    """

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._next = 0

    def begin(self) -> None:
        """What was given before is free."""
        self._next = 0

    def empty(self, like: Tensor, *shape: int) -> Tensor:
        """Where the pass before had the tensor in this place, if it was of this shape."""
        place, self._next = self._next, self._next + 1
        if place == len(self._held):
            self._held.append(like.new_empty(shape))
        elif self._held[place].shape != shape or self._held[place].dtype != like.dtype:
            self._held[place] = like.new_empty(shape)
        return self._held[place]

    def over(self, old: Tensor) -> Tensor:
        """The same."""
        return old


@dataclass(frozen=True)
class TiledLinear:
    """A linear layer and the activation behind it."""

    name: str
    bias: bool
    activation: str = NONE

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, memory: NewMemory
    ) -> tuple[Tensor, Any]:
        """[clients, features, rows] to [clients, outputs, rows], and what the way back needs."""
        flat, scale = x.flatten(1, -2), _scale(self.activation)
        start = x.new_zeros(()) if bias is None else bias[:, :, None]
        made = memory.empty(x, *weight.shape[:2], x.shape[-1])
        torch.baddbmm(start, weight, flat, beta=scale, alpha=scale, out=made)
        out, at = _activated(made, self.activation, 1, memory)
        return out, (x.shape, flat, weight, at)

    def backward(self, given: Tensor, kept: Any, down: bool, memory: NewMemory) -> Gradients:
        """From the gradient of the outputs."""
        shape, flat, weight, at = kept
        through = _through(given, at, self.activation, 1, memory)
        under = _product(weight.mT, through, memory).view(shape) if down else None
        return under, _product(through, flat.mT, memory), through.sum(2) if self.bias else None


@dataclass(frozen=True)
class TiledConvolution:
    """A convolution, the activation behind it and the average pool behind that (of one position,
    where there is none).
    """

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
        high, wide = (
            (p - 1) * s + k for p, s, k in zip(self.pool, self.stride, self.kernel, strict=True)
        )
        return high, wide

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, memory: NewMemory
    ) -> tuple[Tensor, Any]:
        """[clients, channels, height, width, rows] to the same of the outputs, and what the way
        back needs.
        """
        columns, tiles = self._columns(x, memory)
        matrix = self._matrix(weight, bias, memory)
        found, at = _activated(
            _product(matrix, columns, memory), self.activation, math.prod(self.pool), memory
        )
        return found.view(len(x), -1, *tiles, x.shape[-1]), (x.shape, columns, matrix, at)

    def _columns(self, x: Tensor, memory: NewMemory) -> tuple[Tensor, tuple[int, int]]:
        """The pieces as columns, with a row of ones for the bias; and how many tiles an image has,
        down and across.

        What a pool leaves over at the border is not computed.
        """
        clients, channels, height, width, rows = x.shape
        padded = height + 2 * self.padding[0], width + 2 * self.padding[1]
        sizes = zip(padded, self.kernel, self.stride, self.pool, strict=True)
        tall, broad = (
            ((size - kernel) // stride + 1) // pool for size, kernel, stride, pool in sizes
        )
        taken = channels * math.prod(self.piece)
        columns = memory.empty(x, clients, taken + self.bias, tall * broad * rows)
        pieces = columns[:, :taken].view(clients, channels, *self.piece, tall, broad, rows)
        apart = self._apart(x, memory)
        if (whole := self._whole(pieces, apart)) is not None:
            whole[0].copy_(whole[1])
        else:
            for part, there in self._parts(pieces, apart):
                part.copy_(there)
        columns[:, taken:] = 1.0
        return columns, (tall, broad)

    def _steps(self, height: int, width: int) -> tuple[int, int]:
        """How many steps a padded image has, down and across."""
        (down, across), (above, beside) = self.step, self.padding
        return -(-(height + 2 * above) // down), -(-(width + 2 * beside) // across)

    def _apart(self, x: Tensor, memory: NewMemory) -> Tensor:
        """The padded image as [clients, channels, *step, steps down, steps across, rows]: what lies
        a step apart is side by side.
        """
        (clients, channels, height, width, rows), (down, across), (above, beside) = (
            x.shape,
            self.step,
            self.padding,
        )
        tall, broad = self._steps(height, width)
        if (tall * down, broad * across) != (height, width):
            padded = memory.empty(x, clients, channels, tall * down, broad * across, rows).zero_()
            padded[:, :, above : above + height, beside : beside + width] = x
            x = padded
        apart = memory.empty(x, clients, channels, down, across, tall, broad, rows)
        return apart.copy_(
            x.unflatten(2, (tall, down)).unflatten(4, (broad, across)).permute(0, 1, 3, 5, 2, 4, 6)
        )

    def _whole(self, pieces: Tensor, apart: Tensor) -> tuple[Tensor, Tensor] | None:
        """All parts as one, if steps go into pieces."""
        (high, wide, tall, broad), (down, across) = pieces.shape[2:6], self.step
        if high % down or wide % across:
            return None
        there = apart.unfold(4, tall, 1).unfold(5, broad, 1)[
            :, :, :, :, : high // down, : wide // across
        ]
        split = pieces.unflatten(3, (-1, across)).unflatten(2, (-1, down))
        return split, there.permute(0, 1, 4, 2, 5, 3, 7, 8, 6)

    def _parts(self, pieces: Tensor, apart: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of pieces [clients, channels, *piece, tiles down, tiles across, rows], and where
        they lie in the image.
        """
        (high, wide, tall, broad), (down, across) = pieces.shape[2:6], self.step
        for a in range(0, high, down):
            for b in range(0, wide, across):
                part = pieces[:, :, a : a + down, b : b + across]
                lines, pixels = (
                    slice(a // down, a // down + tall),
                    slice(b // across, b // across + broad),
                )
                yield part, apart[:, :, : part.shape[2], : part.shape[3], lines, pixels]

    def _matrix(self, weight: Tensor, bias: Tensor | None, memory: NewMemory) -> Tensor:
        """From a column to the outputs of its tile, place by place: the kernel, moved there, and
        zero elsewhere.
        """
        clients, outputs, channels = weight.shape[:3]
        places, taken, scale = (
            math.prod(self.pool),
            channels * math.prod(self.piece),
            _scale(self.activation),
        )
        matrix = memory.empty(weight, clients, places, outputs, taken + self.bias).zero_()
        scaled = weight * scale
        for place, (lines, pixels) in enumerate(self._places()):
            matrix[:, place, :, :taken].unflatten(2, (channels, *self.piece))[
                ..., lines, pixels
            ] = scaled
        if bias is not None:
            matrix[..., taken] = (bias * scale)[:, None]
        return matrix.flatten(1, 2)

    def _places(self) -> Iterator[tuple[slice, slice]]:
        """Where the kernel lies in a piece, for each position of a tile."""
        for a, b in itertools.product(*map(range, self.pool)):
            above, beside = a * self.stride[0], b * self.stride[1]
            yield slice(above, above + self.kernel[0]), slice(beside, beside + self.kernel[1])

    def backward(self, given: Tensor, kept: Any, down: bool, memory: NewMemory) -> Gradients:
        """From the gradient of the outputs."""
        shape, columns, matrix, at = kept
        (clients, channels), tiles, places = shape[:2], given.shape[2:], math.prod(self.pool)
        taken = channels * math.prod(self.piece)
        through = _through(given.flatten(2), at, self.activation, places, memory)
        product = _product(columns, through.mT, memory).unflatten(2, (places, -1))
        by_place = product[:, :taken].unflatten(1, (channels, *self.piece)).unbind(4)
        weight = sum(
            some[:, :, lines, pixels]
            for some, (lines, pixels) in zip(by_place, self._places(), strict=True)
        )
        assert isinstance(weight, Tensor)
        weight = weight.movedim(4, 1).contiguous()
        bias = product[:, taken].sum(1) if self.bias else None
        if not down:
            return None, weight, bias
        pieces = _product(matrix[..., :taken].mT, through, memory, 1 / _scale(self.activation))
        return (
            self._image(pieces.view(clients, channels, *self.piece, *tiles), shape, memory),
            weight,
            bias,
        )

    def _image(self, pieces: Tensor, shape: Sequence[int], memory: NewMemory) -> Tensor:
        """Pieces, added up where they lay in an image of this shape."""
        (height, width), (down, across), (above, beside) = shape[2:4], self.step, self.padding
        tall, broad = self._steps(height, width)
        apart = memory.empty(pieces, *shape[:2], down, across, tall, broad, shape[-1]).zero_()
        for part, there in self._parts(pieces, apart):
            there.add_(part)
        whole = memory.empty(pieces, *shape[:2], tall * down, broad * across, shape[-1])
        whole.view(*shape[:2], tall, down, broad, across, shape[-1]).copy_(
            apart.permute(0, 1, 4, 2, 5, 3, 6)
        )
        return whole[:, :, above : above + height, beside : beside + width]


Stage = TiledLinear | TiledConvolution


def stages(layers: Sequence[tuple[str, nn.Module]]) -> list[Stage] | None:
    """A chain of layers as stages: convolutions, each with its activation and average pool, if any;
    then dense layers. Else None.

    Guarantees: for such a chain :func:`tiled` computes what the layers do, up to the rounding of
    sums.
    """
    made: list[Stage] = []
    flat, pooled = not any(isinstance(layer, nn.Conv2d) for _, layer in layers), False
    for name, layer in layers:
        last = made[-1] if made else None
        if isinstance(layer, nn.Linear) and flat:
            made.append(TiledLinear(name, layer.bias is not None))
        elif isinstance(layer, nn.Conv2d) and _simple(layer):
            sizes: Any = layer.kernel_size, layer.stride, layer.padding
            made.append(TiledConvolution(name, layer.bias is not None, *sizes))
            pooled = False
        elif (
            type(layer) in ACTIVATIONS
            and last
            and not last.activation
            and not pooled
            and flat == isinstance(last, TiledLinear)
        ):
            made[-1] = replace(last, activation=ACTIVATIONS[type(layer)])
        elif (
            isinstance(layer, nn.AvgPool2d)
            and isinstance(last, TiledConvolution)
            and not pooled
            and (size := _pool(layer))
        ):
            made[-1], pooled = replace(last, pool=size), True
        elif isinstance(layer, nn.Flatten):
            flat, pooled = True, False
        elif not isinstance(layer, nn.Identity):
            return None
    return made if made and isinstance(made[-1], TiledLinear) else None


def tiled(
    made: Sequence[Stage], weights: Mapping[str, Tensor], x: Tensor, memory: NewMemory | None = None
) -> Tensor:
    """What each client's stages make of its rows: `x` is [clients, rows, ...], `weights` are
    stacked, `memory` is what it computes in.
    """
    named = [weights.get(f"{stage.name}.{kind}") for stage in made for kind in ("weight", "bias")]
    return _Pass.apply(made, memory or NewMemory(), x, *named)  # type: ignore[no-any-return, no-untyped-call]


class _Pass(torch.autograd.Function):
    """All stages forward, and all of them back."""

    @staticmethod
    def forward(
        ctx: Any, made: Sequence[Stage], memory: NewMemory, x: Tensor, *weights: Tensor | None
    ) -> Tensor:  # type: ignore[override]
        ctx.made, ctx.memory, ctx.kept, ctx.shape = made, memory, [], x.shape
        x = x.permute(0, 2, 3, 4, 1) if isinstance(made[0], TiledConvolution) else x.flatten(2).mT
        for stage, weight, bias in zip(made, weights[::2], weights[1::2], strict=True):
            assert weight is not None
            x, kept = stage.forward(x, weight, bias, memory)
            ctx.kept.append(kept)
        return x.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        at: Tensor | None = given.mT
        found: list[Tensor | None] = []
        wanted = ctx.needs_input_grad[2]
        for place, stage in reversed(list(enumerate(ctx.made))):
            at, weight, bias = stage.backward(at, ctx.kept[place], place > 0 or wanted, ctx.memory)
            found += [bias, weight]
        x = at.movedim(-1, 1).reshape(ctx.shape) if at is not None and wanted else None
        return (None, None, x, *reversed(found))


def _product(a: Tensor, b: Tensor, memory: NewMemory, factor: float = 1.0) -> Tensor:
    """The products of two batches of matrices."""
    out = memory.empty(a, a.shape[0], a.shape[1], b.shape[2])
    return (
        torch.bmm(a, b, out=out)
        if factor == 1
        else torch.baddbmm(a.new_zeros(()), a, b, beta=0, alpha=factor, out=out)
    )


def _scale(activation: str) -> float:
    """By how much its argument is multiplied in advance, for nothing."""
    return 2.0 if activation == TANH else 1.0


def _activated(
    made: Tensor, activation: str, places: int, memory: NewMemory
) -> tuple[Tensor, Tensor]:
    """The activation of products [clients, places * outputs, ...], its mean over the places, and
    what the way back needs.

    tanh(z) = 2 sigmoid(2 z) - 1, and sigmoid is several times faster on a CPU. (Products come
    scaled.)
    """
    if activation in (TANH, SIGMOID):
        made = made.sigmoid_()
    elif activation == RELU:
        made = made.clamp_min_(0.0)
    if places == 1 and activation != TANH:
        return made, made
    out = memory.empty(made, made.shape[0], made.shape[1] // places, made.shape[2])
    if places == 1:
        return torch.mul(made, 2.0, out=out).sub_(1.0), made
    torch.mean(made.unflatten(1, (places, -1)), 1, out=out)
    return (out.mul_(2.0).sub_(1.0) if activation == TANH else out), made


def _through(given: Tensor, at: Tensor, activation: str, places: int, memory: NewMemory) -> Tensor:
    """The gradient of the products (before they were scaled) from that of the means."""
    factor = (4.0 if activation == TANH else 1.0) / places
    each = (given * factor if factor != 1 else given)[:, None]
    values = at.unflatten(1, (places, -1))
    if activation == NONE:
        return each.expand(values.shape).flatten(1, 2)
    found = memory.over(values)
    if activation == RELU:
        torch.ops.aten.threshold_backward(each.expand_as(values), values, 0, grad_input=found)
    else:
        torch.ops.aten.sigmoid_backward(each, values, grad_input=found)
    return found.flatten(1, 2)


def _simple(layer: nn.Conv2d) -> bool:
    """Every number of a piece is used, and channels are not grouped."""
    if layer.groups != 1 or layer.dilation != (1, 1) or isinstance(layer.padding, str):
        return False
    return all(stride <= size for stride, size in zip(layer.stride, layer.kernel_size, strict=True))


def _pool(layer: nn.AvgPool2d) -> tuple[int, int] | None:
    """Its size, if windows lie side by side."""
    size, stride, padding = (
        v if isinstance(v, tuple) else (v, v)
        for v in (layer.kernel_size, layer.stride, layer.padding)
    )
    plain = (
        size == stride
        and padding == (0, 0)
        and not layer.ceil_mode
        and layer.divisor_override is None
    )
    return (size[0], size[1]) if plain else None
