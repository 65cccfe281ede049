"""What every operation of an autograd graph does to the place of the examples, on the way from its
result to its inputs: views by their strides, products, normalisations and reductions by what they
do to each dimension. A passage may give no place (`None`: the examples meet) or not know
(:class:`Unknown`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from dpfy.gradients.autograd.tape import (
    EXAMPLE_BY_EXAMPLE,
    POSITION_BY_POSITION,
    BatchAxis,
    batch_axis,
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """Index `i` of dimension `dim` belongs to example `i // inner % batch`, or to `owners[i]`,
    where they lie in no such order (-1: to nobody).
    """

    dim: int
    inner: int = 1
    owners: tuple[int, ...] = ()

    def fits(self, shape: Shape, batch: int) -> bool:
        """Whether a tensor of this shape can have them."""
        if self.dim >= len(shape) or not shape[self.dim]:
            return False
        if self.owners:
            return shape[self.dim] == len(self.owners)
        return shape[self.dim] % (self.inner * batch) == 0

    def axis(self, shape: Shape, batch: int) -> BatchAxis | None:
        """The same as a batch axis; None if there is none, or positions lie on both sides of it."""
        before = shape[self.dim] // (self.inner * batch)
        if self.owners or (before > 1 and self.inner > 1):
            return None
        folded = POSITION_BY_POSITION if before > 1 else EXAMPLE_BY_EXAMPLE
        return batch_axis(self.dim, folded if before * self.inner > 1 else "")

    def of(self, size: int, batch: int) -> Tensor:
        """To which example each index belongs."""
        return (
            torch.tensor(self.owners) if self.owners else torch.arange(size) // self.inner % batch
        )


@dataclass(frozen=True)
class Step:
    """One operation on the way down: `node` of the graph, the shape and number of the gradient that
    arrives, the shape of input `i`, and how many examples there are.
    """

    node: Any
    number: int
    out: Shape
    i: int
    shape: Shape
    batch: int

    def saved(self, name: str, default: Any = None) -> Any:
        """What the node remembers of its call."""
        return getattr(self.node, f"_saved_{name}", default)

    def dims(self, count: int) -> set[int]:
        """The dimensions that it works along, of `count`; all of them if it does not say."""
        found = self.saved("dim", self.saved("dims"))
        if found is None or (isinstance(found, tuple) and not found):
            return set(range(count))
        given = found if isinstance(found, tuple | list) else [found]
        return {(d - 2**64 if d >= 2**63 else d) % max(count, 1) for d in given}


Passage = Callable[[Step, Rows], Rows | None]
"""Where the examples lie at the input; None if no part of it belongs to one example."""


class Unknown(Exception):
    """No rule knows this operation."""


def _pointwise(s: Step, rows: Rows) -> Rows | None:
    """Shapes broadcast."""
    dim = rows.dim - (len(s.out) - len(s.shape))
    return replace(rows, dim=dim) if dim >= 0 and s.shape[dim] == s.out[rows.dim] else None


def viewed(out: Shape, shape: Shape, rows: Rows, batch: int) -> Rows | None:
    """`rows` of a tensor of shape `out` in the same numbers in shape `shape`."""
    if rows.owners:
        kept = [
            d
            for d, size in enumerate(shape)
            if size == out[rows.dim] and prod(shape[:d]) == prod(out[: rows.dim])
        ]
        return replace(rows, dim=kept[0]) if kept else None
    stride = rows.inner * prod(out[rows.dim + 1 :])
    for dim, size in enumerate(shape):
        below = prod(shape[dim + 1 :])
        if below and below <= stride and stride * batch <= below * size:
            inner = stride // below
            fits = stride % below == 0 and size % (inner * batch) == 0
            return Rows(dim, inner) if fits else None
    return None


def _view(s: Step, rows: Rows) -> Rows | None:
    found = viewed(s.out, s.shape, rows, s.batch)
    if found is None and rows.owners:
        raise Unknown
    return found


def _transpose(s: Step, rows: Rows) -> Rows | None:
    if s.node.name() == "TBackward0":
        return replace(rows, dim=len(s.out) - 1 - rows.dim)
    count = len(s.out)
    a, b = ((d - 2**64 if d >= 2**63 else d) % count for d in (s.saved("dim0"), s.saved("dim1")))
    return replace(rows, dim={a: b, b: a}.get(rows.dim, rows.dim))


def _permute(s: Step, rows: Rows) -> Rows | None:
    dim = s.saved("dims")[rows.dim]
    return replace(rows, dim=(dim - 2**64 if dim >= 2**63 else dim) % len(s.out))


def _repeat(s: Step, rows: Rows) -> Rows | None:
    if rows.owners:
        raise Unknown
    dim = rows.dim - (len(s.out) - len(s.shape))
    return replace(rows, dim=dim) if dim >= 0 else None


def _along(s: Step, rows: Rows) -> Rows | None:
    """Numbers meet along some dimensions, which stay."""
    return None if rows.dim in s.dims(len(s.out)) else rows


def _within(s: Step, rows: Rows) -> Rows | None:
    """Numbers change places along some dimensions, or are left out there."""
    if rows.dim not in s.dims(len(s.out)):
        return rows
    raise Unknown


def _reduced(s: Step, rows: Rows) -> Rows | None:
    """Dimensions are reduced; all other ones stay."""
    if len(s.out) == len(s.shape):
        return _pointwise(s, rows)
    gone = s.dims(len(s.shape))
    kept = [d for d in range(len(s.shape)) if d not in gone]
    if tuple(s.shape[d] for d in kept) != s.out:
        raise Unknown
    return replace(rows, dim=kept[rows.dim])


def _window(s: Step, rows: Rows, size: int, start: int) -> Rows | None:
    """Rows that are a window of a dimension of `size`, from `start`."""
    period, many = rows.inner * s.batch, s.out[rows.dim]
    if not rows.owners and start % period == 0 and size % period == 0:
        return rows
    own = tuple(rows.of(many, s.batch).tolist())
    if not 0 <= start <= size - many:
        return None
    return Rows(rows.dim, 1, (-1,) * start + own + (-1,) * (size - start - many))


def _slice(s: Step, rows: Rows) -> Rows | None:
    if rows.dim not in s.dims(len(s.out)):
        return rows
    if s.saved("step") != 1:
        return None
    size, start = s.shape[rows.dim], s.saved("start")
    start = start - 2**64 if start >= 2**63 else start
    return _window(s, rows, size, max(start + size, 0) if start < 0 else start)


def _split(s: Step, rows: Rows) -> Rows | None:
    (dim,) = s.dims(len(s.out))
    if rows.dim != dim:
        return rows
    sizes = s.saved("split_sizes")
    start = sum(sizes[: s.number]) if sizes else s.saved("split_size") * s.number
    return _window(s, rows, s.shape[dim], start)


def _selected(s: Step, rows: Rows) -> Rows | None:
    (dim,) = s.dims(len(s.shape))
    return replace(rows, dim=rows.dim + (rows.dim >= dim))


def _stack(s: Step, rows: Rows) -> Rows | None:
    (dim,) = s.dims(len(s.out))
    return None if rows.dim == dim else replace(rows, dim=rows.dim - (rows.dim > dim))


def _cat(s: Step, rows: Rows) -> Rows | None:
    (dim,) = s.dims(len(s.out))
    if rows.dim != dim:
        return rows
    before = s.node.next_functions[: s.i]
    if any(child is None for child, _ in before):
        raise Unknown
    start = sum(child._input_metadata[number].shape[dim] for child, number in before)
    period, many = rows.inner * s.batch, s.shape[dim]
    if not rows.owners and start % period == 0 and many % period == 0:
        return rows
    own = rows.of(s.out[dim], s.batch)[start : start + many]
    return Rows(dim, 1, tuple(own.tolist()))


def _matmul(first: int, stacked: bool) -> Passage:
    """y = a b, where a is input `first`."""

    def rule(s: Step, rows: Rows) -> Rows | None:
        if s.i < first:
            return _pointwise(s, rows)
        kept = {0, 1 + s.i - first} if stacked else {s.i - first}
        return rows if rows.dim in kept else None

    return rule


def _matrix_vector(s: Step, rows: Rows) -> Rows | None:
    return rows if len(s.shape) == 2 else None


def _first_input(keep: Callable[[Step], int]) -> Passage:
    """An operation of its first input alone that leaves so many dimensions as they are; the others
    (weights) meet all examples.
    """

    def rule(s: Step, rows: Rows) -> Rows | None:
        return rows if s.i == 0 and rows.dim < keep(s) else None

    return rule


def _convolution(s: Step, rows: Rows) -> Rows | None:
    if rows.dim == 0:
        return rows if s.i == 0 else None
    if rows.dim == 1:  # groups may belong to examples
        raise Unknown
    return None


def _batch_norm(s: Step, rows: Rows) -> Rows | None:
    if s.i:
        return None
    return rows if rows.dim == 1 or not s.saved("training", True) else None


def _attention(s: Step, rows: Rows) -> Rows | None:
    if s.i > 2:
        return _pointwise(s, rows)
    if rows.dim == 0 or (rows.dim == 1 and s.shape[1] == s.out[1]):
        return rows
    if rows.dim == 1:
        raise Unknown
    return rows if rows.dim == 2 and s.i == 0 else None


def _nll(s: Step, rows: Rows) -> Rows | None:
    return replace(rows, dim=rows.dim + (rows.dim >= 1))


def _spatial(s: Step, rows: Rows) -> Rows | None:
    found = re.search(r"([123])[dD]", s.node.name())
    assert found is not None
    return rows if s.i == 0 and rows.dim < len(s.out) - int(found[1]) else None


def _padded(s: Step, rows: Rows) -> Rows | None:
    return rows if s.out[rows.dim] == s.shape[rows.dim] else None


def _recurrence(s: Step, rows: Rows) -> Rows | None:
    """[step, example, ...] of outputs, [example, ...] of all else."""
    return replace(rows, dim=0) if rows.dim == (1 if s.number == 0 else 0) else None


def _gates(s: Step, rows: Rows) -> Rows | None:
    """[example, step, width] from [steps times examples, width]."""
    if rows.dim:
        return None
    if rows.owners:
        return Rows(0, 1, rows.owners * s.out[1])
    return viewed((s.out[1], s.out[0], s.out[2]), s.shape, replace(rows, dim=1), s.batch)


def _names(names: str) -> list[str]:
    return [f"{name}Backward{k}" for name in names.split() for k in range(4)]


POINTWISE = """
Abs Acos Acosh Add Addcdiv Addcmul Alias Angle Asin Asinh Atan Atan2 Atanh BinaryCrossEntropy
BinaryCrossEntropyWithLogits Bernoulli Ceil Celu Clamp ClampMax ClampMin Clone Complex Conj
Copysign Cos Cosh Cast Copy Digamma Div Dropout Elu Erf Erfc Erfinv Exp Exp2 Expand Expm1 Floor
Fmax Fmin Fmod Frac Gelu Hardshrink Hardsigmoid Hardswish Hardtanh HardtanhBackward Huber
HuberLoss Hypot I0 Imag Indices KlDiv LeakyRelu Lerp Lgamma Lift Log Log10 Log1P Log2 LogSigmoid
Logaddexp Logaddexp2 LogicalAnd Logit MaskedFill Maximum Minimum Mish MseLoss Mul Mvlgamma
NanToNum NativeDropout Neg Pow Polar Positive Real Reciprocal Relu Relu6 Remainder ResolveConj
Round Rsqrt Rsub Rrelu Selu Sgn Sigmoid Sign Silu Sin Sinc Sinh SmoothL1Loss SoftMarginLoss
Softplus Softshrink Special Sqrt Square Sub Tan Tanh Threshold To ToCopy Tril Triu Trunc ViewAs
Where Xlogy Detach FakeQuantizePerTensorAffineCachemask Heaviside Ldexp LinalgCross Nextafter
Signbit PreluKernel Contiguous WarnNotImplemented MaskedScale
"""
MOVES = """
Gather Sort Topk Flip Roll IndexSelect Cummax Cummin Unfold FftR2C FftC2R FftC2C Scatter
ScatterAdd ScatterReduce IndexAdd IndexCopy IndexFill SliceScatter Diff TakeAlongDim
"""
REDUCTIONS = """
Sum Mean Norm LinalgVectorNorm Logsumexp Prod Max Min Median Amax Amin Var Std Mode Kthvalue
VarMean StdMean Nansum Nanmean Aminmax Nanmedian
"""
ATTENTION = """
ScaledDotProductEfficientAttention ScaledDotProductFlashAttention
ScaledDotProductFlashAttentionForCpu ScaledDotProductCudnnAttention
ScaledDotProductFusedAttentionOverrideable
"""
SPATIAL = """
MaxPool2DWithIndices MaxPool3DWithIndices MaxPool1D MaxPool2D MaxPool3D AvgPool2D AvgPool3D
AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool2D AdaptiveMaxPool3D UpsampleNearest1D
UpsampleNearest2D UpsampleNearest3D UpsampleNearestExact1D UpsampleNearestExact2D
UpsampleNearestExact3D UpsampleLinear1D UpsampleBilinear2D UpsampleBilinear2DAa UpsampleBicubic2D
UpsampleBicubic2DAa UpsampleTrilinear3D ReflectionPad1D ReflectionPad2D ReflectionPad3D
ReplicationPad1D ReplicationPad2D ReplicationPad3D FractionalMaxPool2D FractionalMaxPool3D
"""

RULES: dict[str, Passage] = {
    **dict.fromkeys(
        _names(POINTWISE),
        _pointwise,
    ),
    **dict.fromkeys(
        _names("View UnsafeView ReshapeAlias Reshape Unsqueeze Squeeze Flatten Unflatten"), _view
    ),
    **dict.fromkeys(_names("T Transpose"), _transpose),
    **dict.fromkeys(_names("Permute"), _permute),
    **dict.fromkeys(_names("Repeat"), _repeat),
    **dict.fromkeys(
        _names("Softmax LogSoftmax Cumsum Cumprod Logcumsumexp SafeSoftmax Glu"), _along
    ),
    **dict.fromkeys(
        _names(MOVES),
        _within,
    ),
    **dict.fromkeys(
        _names(REDUCTIONS),
        _reduced,
    ),
    **dict.fromkeys(_names("Slice"), _slice),
    **dict.fromkeys(_names("Split SplitWithSizes UnsafeSplit Chunk"), _split),
    **dict.fromkeys(_names("Select Unbind"), _selected),
    **dict.fromkeys(_names("Stack"), _stack),
    **dict.fromkeys(_names("Cat"), _cat),
    **dict.fromkeys(_names("Mm"), _matmul(0, False)),
    **dict.fromkeys(_names("Addmm"), _matmul(1, False)),
    **dict.fromkeys(_names("Bmm"), _matmul(0, True)),
    **dict.fromkeys(_names("Baddbmm"), _matmul(1, True)),
    **dict.fromkeys(_names("Mv"), _matrix_vector),
    **dict.fromkeys(_names("Linear"), _first_input(lambda s: len(s.out) - 1)),
    **dict.fromkeys(
        _names("NativeLayerNorm FusedRmsNorm"),
        _first_input(lambda s: len(s.out) - len(s.saved("normalized_shape"))),
    ),
    **dict.fromkeys(_names("NativeGroupNorm"), _first_input(lambda s: 1)),
    **dict.fromkeys(_names("NativeBatchNorm CudnnBatchNorm MiopenBatchNorm"), _batch_norm),
    **dict.fromkeys(_names("Convolution MkldnnConvolution"), _convolution),
    **dict.fromkeys(
        _names(ATTENTION),
        _attention,
    ),
    **dict.fromkeys(_names("NllLoss NllLoss2D"), _nll),
    **dict.fromkeys(
        _names(SPATIAL),
        _spatial,
    ),
    **dict.fromkeys(_names("PixelShuffle PixelUnshuffle"), _first_input(lambda s: len(s.out) - 3)),
    **dict.fromkeys(
        _names("GridSampler2D GridSampler3D"), lambda s, rows: rows if rows.dim == 0 else None
    ),
    **dict.fromkeys(_names("ConstantPadNd"), _padded),
    **dict.fromkeys(_names("Im2Col Col2Im"), _first_input(lambda s: 1)),
    **dict.fromkeys(
        _names("ViewAsComplex ViewAsReal"),
        lambda s, rows: rows if rows.dim < len(s.shape) else None,
    ),
    **dict.fromkeys(_names("Embedding EmbeddingBag"), lambda s, rows: None),
    **dict.fromkeys(("_TapBackward", "_ScaleBackward"), _pointwise),
    **dict.fromkeys(
        ("_ToTorchTensorBackward", "_FromTorchTensorBackward", "RedistributeBackward"), _pointwise
    ),  # parts of a layer on several devices
    "_LinearBackward": _first_input(lambda s: len(s.out) - 1),
    "_LayerNormBackward": _first_input(lambda s: len(s.out) - len(s.node.given)),
    "_GroupNormBackward": _first_input(lambda s: 1),
    "_ConvolutionBackward": _first_input(lambda s: 1),
    "_LookupBackward": lambda s, rows: None,
    "GatesNodeBackward": _gates,
    "RecurrenceNodeBackward": _recurrence,
}
"""Nodes of the autograd graph, to what they do to the place of the examples."""
