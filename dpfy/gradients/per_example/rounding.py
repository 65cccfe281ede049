"""What floating-point arithmetic can do to a norm and to a sum, as upper bounds: clipping by an
upper bound is always private.

Notation: u is half the distance from 1 to the next number of a type, eta its smallest normal
number. A sum of n products, in any order and with any number of fused additions, differs from the
exact one by at most gamma(n) = n u / (1 - n u) times the sum of the absolute products, and by n eta
more where products underflow, be they flushed to zero or not (Higham 2002, "Accuracy and stability
of numerical algorithms", chapter 3). A sum of squares has no cancellation, so a relative margin
covers it once n is bounded: rows are squared in blocks of `BLOCK`, and the blocks are added in
float64. A sum of anything else may cancel, so its error is set against the absolute terms, not
against the result: see :class:`NormEstimate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from dpfy.core import check

BLOCK = 896
"""Squares that are added in their own type, at most. Two such factors of a norm cost it 2 gamma(896
+ 4) / 2 = 5.4e-5 in float32.
"""

RUN = 256
"""Products that are added in float32 at a time where a Gram matrix is made by matrix products."""

SHORT = 128
"""Entries of Gram matrices that are added in float32 at a time."""

_SUMS: dict[torch.dtype, torch.dtype] = {
    getattr(torch, name): getattr(torch, row.sums) for name, row in check.DTYPES.items()
}
TF32 = 2.0**-11
"""How far rounding to TF32 moves a number, relatively."""

_BFLOAT16_UNIT = check.DTYPES["bfloat16"].unit
_CPU_FACTORS = {"none": 0.0, "ieee": 0.0, "tf32": TF32}
"""By torch's setting for products of float32 on a CPU; any other setting may round to bfloat16."""


def unit(dtype: torch.dtype) -> float:
    """u: the relative error of one rounding."""
    return check.number_type("arithmetic", dtype).unit


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which norms and sums of numbers of `dtype` are made: float64 for float64, float32
    for everything narrower.

    A sum rounded to bfloat16 before the noise would move by whole units in its last place when one
    small contribution is added: by more than the bound. Rounding after the noise is
    post-processing.
    """
    made = _SUMS.get(dtype)
    return getattr(torch, check.number_type("a gradient", dtype).sums) if made is None else made


@cache
def gamma(terms: int, dtype: torch.dtype) -> float:
    """The relative error of a sum of `terms` products of numbers of `dtype`, against the sum of
    their absolute values.
    """
    share = terms * unit(sum_dtype(dtype))
    return share / (1 - share) if share < 0.5 else float("inf")


@cache
def least(dtype: torch.dtype) -> float:
    """eta: what one underflow can hide."""
    return check.number_type("a sum", sum_dtype(dtype)).least


def of_factors(dtype: torch.dtype, device: torch.device, convolved: bool = False) -> float:
    """How far each factor of a library's matrix product (or convolution) of numbers of `dtype` may
    be rounded first, relatively.

    Float32 products may run in TF32 on a GPU, or in TF32 or bfloat16 on some CPUs, where the user
    allows it.
    """
    check.device_kind("gradients", device.type)
    if dtype == torch.float64:
        return 0.0
    if device.type == "cuda":
        return (
            TF32
            if (
                torch.backends.cudnn.allow_tf32
                if convolved
                else torch.backends.cuda.matmul.allow_tf32
            )
            else 0.0
        )
    settings = getattr(torch.backends.mkldnn, "conv" if convolved else "matmul", None)
    return _CPU_FACTORS.get(getattr(settings, "fp32_precision", "none"), _BFLOAT16_UNIT)


@dataclass(frozen=True)
class NormEstimate:
    """Squared norms of per-example gradients as they were computed, and how wrong they and the
    weighted sum can be. All float64, [batch].

    `error`: the exact squared norm is at most `squares` + `error`. `rounding`: the weighted sum of
    an example differs from weight times its exact gradient by at most weight times `rounding`, in
    length. Then weight times :attr:`upper` bounds what the example adds, up to the relative margin
    of the clip rule: |w g + e| <= w (|g| + |e| / w). Where nothing cancels both are tiny against
    the norm. Where everything does, the example is clipped more than it need be, never less.

    Both must depend on the example and on public shapes alone, never on the size of the batch: a
    bound that changed when another example joins would let that one move the parts of all.
    """

    squares: Tensor
    error: Tensor
    rounding: Tensor

    @property
    def upper(self) -> Tensor:
        """[1, batch] squares of upper bounds of the norms."""
        return (
            self.squares.clamp(min=0).add_(self.error).sqrt_().add_(self.rounding).square_()[None]
        )

    @property
    def dominated(self) -> Tensor:
        """[batch] whether what rounding can do is more than a tenth of the norm: most of what the
        example adds may then be lost by clipping with the upper bound.
        """
        return self.error.add(self.rounding.square()) > self.squares.clamp(min=0) / 100

    def plus(self, other: NormEstimate, cross: Tensor, wrong: Tensor) -> NormEstimate:
        """Of the sum of two gradients, from their inner products and how wrong these can be."""
        squares, error = (
            self.squares + other.squares + 2 * cross,
            self.error + other.error + 2 * wrong,
        )
        return NormEstimate(squares, error, self.rounding + other.rounding)


def of_products(
    squares: Tensor, sizes: Tensor, positions: int, gram: int, factor: float, dtype: torch.dtype
) -> NormEstimate:
    """Of gradients L' R, by whatever route `squares` were computed from L and R: products written
    out, or Gram matrices in runs.

    `sizes`: |L| |R| or more, the size of the absolute terms: sum over t of |l_t| |r_t| <= |L| |R|.
    An entry of P = L L' is wrong by at most gamma(runs of its width) |l_t| |l_s|, so the sum of P *
    Q by gamma(`gram`) sizes^2, with `gram` from :func:`gram_terms`, or 0 if no batch is measured in
    that way. Products written out are wrong by gamma(`positions`) sizes in length, and so is the
    weighted sum. `factor`: by how much each factor may be rounded first. Products that are kept
    need no allowance for the sum but get it too: whether they are kept depends on the batch.
    """
    error = squares.abs() * gamma(BLOCK + 8, dtype)
    if gram:
        error = error + sizes.square() * gamma(gram, dtype) + positions**2 * least(dtype)
    return NormEstimate(squares, error, sizes * (2 * gamma(positions + 8, dtype) + 2 * factor))


def gram_terms(left: int, right: int) -> int:
    """Additions one after another in a squared norm from Gram matrices of rows that are `left` and
    `right` wide.
    """
    return added_in_runs(left) + added_in_runs(right) + SHORT + 8


def hidden(t: Tensor) -> float:
    """What must be added to |L|^2 so that an error relative to |L|^2 |R|^2 also covers products in
    L L' that underflow.

    They hide at most (elements of an example) eta |R|^2, and relative errors of Gram matrices are
    never set below gamma(`SHORT`).
    """
    return t[0].numel() * least(t.dtype) / gamma(SHORT, t.dtype) if len(t) else 0.0


def added_in_runs(count: int) -> int:
    """Additions one after another for a sum of `count` products, `RUN` at a time."""
    return min(count, RUN) + -(-count // RUN)


def self_products(t: Tensor) -> Tensor:
    """[batch, positions, width] to the Gram matrices of the positions, [batch, positions,
    positions], in float32 or wider, in runs.
    """
    t = t.to(sum_dtype(t.dtype))
    if t.shape[2] <= RUN:
        return t @ t.mT
    first, *others = t.split(RUN, 2)
    total = first @ first.mT
    for part in others:
        total.baddbmm_(part, part.mT)
    return total


class Gram(NamedTuple):
    """Sums over the Gram matrices P = L L' and Q = R R' of every example, as computed; all [...,
    batch] in float64.
    """

    products: Tensor  # sum of P * Q: the squared norm of L' R
    left_trace: Tensor  # |L|^2
    right_trace: Tensor  # |R|^2
    left_square: Tensor  # |P|^2
    right_square: Tensor  # |Q|^2
    by_position: Tensor  # sum over t of |l_t| |r_t|


@dataclass(frozen=True)
class GramRounding:
    """How such sums were made: `left` and `right` products one after another for an entry of P and
    Q, `terms` entries of P * Q.

    `left_factor`, `right_factor`: relative roundings of the factors, before the Gram matrices and
    before the weighted sum together. `added`: relative error of the weighted sum's additions.
    """

    positions: int
    left: int
    right: int
    terms: int
    left_factor: float
    right_factor: float
    added: float

    def estimate(self, found: Gram) -> NormEstimate:
        """The estimate that these sums give, in float32.

        An entry of P is wrong by at most gamma(left) |l_t| |l_s| + left eta, so P by gamma(left)
        |L|^2 + positions left eta in length, and the sum of P * Q by that times |Q|, the same with
        both exchanged, and gamma(terms) |P| |Q|. A factor rounded by f turns L' R by at most f |L|
        times the largest singular value of R, whose square is at most |Q|: positions whose inputs
        differ do not add up to the worst, which makes this sharper than :func:`of_products`. The
        additions of the sum give `added` |L| |R|.

        Each of these is also at most its relative error times S = sum over t of |l_t| |r_t| (for
        the sum of P * Q, S^2), which is far less where positions with large output gradients have
        small inputs. The smaller one counts.
        """
        eta, n, dtype = least(torch.float32), self.positions, torch.float32
        loose = (
            1 + 2.0**-5
            # covers that traces and lengths of P and Q are computed themselves, and products of two
            # errors
        )
        left_size, right_size = (
            found.left_trace * loose + n * self.left * eta,
            found.right_trace * loose + n * self.right * eta,
        )
        left_wrong = left_size * gamma(self.left, dtype) + n * self.left * eta
        right_wrong = right_size * gamma(self.right, dtype) + n * self.right * eta
        left_gram = _length(found.left_square, found.left_trace) * loose + n * eta**0.5 + left_wrong
        right_gram = (
            _length(found.right_square, found.right_trace) * loose + n * eta**0.5 + right_wrong
        )
        error = (
            left_wrong * right_gram
            + right_wrong * left_gram
            + left_gram * right_gram * gamma(self.terms, dtype)
        )
        rounding = (left_size * right_size).sqrt_().mul_(self.added * loose)
        if self.left_factor:
            rounding += (left_size * right_gram).sqrt_().mul_(self.left_factor * loose)
        if self.right_factor:
            rounding += (right_size * left_gram).sqrt_().mul_(self.right_factor * loose)
        left_least, right_least = n * self.left * eta, n * self.right * eta
        size = (
            found.by_position * loose
            + (left_least * right_size).sqrt()
            + (right_least * left_size).sqrt()
            + (left_least + right_least)
        )
        relative = sum(gamma(terms, dtype) for terms in (self.left, self.right, self.terms))
        least_sums = (left_least * right_size + right_least * left_size) * loose
        by_position = size.square() * (relative * loose) + least_sums
        error = torch.minimum(error, by_position).add_(n * n * eta)
        factors = (self.left_factor + self.right_factor + self.added) * loose
        return NormEstimate(found.products, error, torch.minimum(rounding, size * factors))


def _length(square: Tensor, trace: Tensor) -> Tensor:
    """The length of a Gram matrix; its trace, which is never less, where the square overflowed."""
    return torch.where(square.isfinite(), square.sqrt(), trace)


@cache
def pieces(width: int) -> tuple[int, int]:
    """How a row is cut into equal blocks of at most `BLOCK`: their number and length. What is left
    over is at most a block long.
    """
    fewest = -(-width // BLOCK)
    for count in range(fewest, fewest + min(3 * fewest, 64)):
        if width % count == 0:
            return count, width // count
    return width // BLOCK, BLOCK


def as_rows(t: Tensor) -> Tensor:
    """[batch, ...] to [batch, width]; a scalar parameter's gradients, [batch], to rows of width
    1.
    """
    return t if t.dim() == 2 else t.unsqueeze(-1).flatten(1)


def row_squares(t: Tensor) -> Tensor:
    """[batch, ...] to [batch] sums of squares in float64, never too small by more than a relative
    gamma(BLOCK + 4).

    Guarantees: squares that underflow are counted as the largest they can be; any that overflows
    makes its sum infinite.
    """
    flat = t if t.dim() == 2 else as_rows(t)
    if flat.shape[1] > BLOCK or flat.is_cuda:
        return joined_squares(block_norms(flat), flat)
    lengths = torch.linalg.vector_norm(flat, dim=1, dtype=sum_dtype(t.dtype)).double()
    return torch.addcmul(_hidden(flat.shape[1] + 2, t.dtype), lengths, lengths)


def block_norms(t: Tensor) -> Tensor:
    """[batch, ...] to the norms of blocks of its rows, [batch] or [batch, blocks]: the first half
    of :func:`row_squares`.
    """
    flat = as_rows(t)
    width, dtype = flat.shape[1], sum_dtype(flat.dtype)
    if width <= BLOCK:
        return torch.linalg.vector_norm(flat, dim=1, dtype=dtype)
    count, size = pieces(width)
    norms = torch.linalg.vector_norm(
        flat[:, : count * size].unflatten(1, (count, size)), dim=2, dtype=dtype
    )
    if count * size == width:
        return norms
    return torch.cat(
        [
            norms,
            torch.linalg.vector_norm(flat[:, count * size :], dim=1, keepdim=True, dtype=dtype),
        ],
        1,
    )


def joined_squares(norms: Tensor, like: Tensor) -> Tensor:
    """The second half of :func:`row_squares`, for blocks of rows of the shape and dtype of those of
    `like`.
    """
    squares, width = norms.double().square_(), like.shape[1:].numel()
    if norms.dim() == 1:
        return squares.add_((width + 2) * least(like.dtype))
    return _added(squares).add_((width + 2 * norms.shape[1]) * least(like.dtype))


@cache
def _hidden(terms: int, dtype: torch.dtype) -> Tensor:
    """What so many underflows can hide, as a tensor: a square and its addition are one operation
    then.
    """
    return torch.tensor(terms * least(dtype), dtype=torch.float64)


def _added(squares: Tensor) -> Tensor:
    """[batch, blocks] float64 numbers added block by block, so that float64 models keep their
    margin on a billion coordinates.
    """
    while squares.shape[1] > BLOCK:
        count, size = pieces(squares.shape[1])
        rest = squares[:, count * size :]
        squares = torch.cat(
            [squares[:, : count * size].unflatten(1, (count, size)).sum(2), rest], 1
        )
    return squares.sum(1)


def block_sums(t: Tensor) -> Tensor:
    """[batch, ...] to [batch] sums in float64, of sums of at most `SHORT` in the type of `t`."""
    flat = as_rows(t)
    whole = flat.shape[1] // SHORT * SHORT
    total = flat[:, whole:].sum(1).double()
    return (
        total + flat[:, :whole].unflatten(1, (-1, SHORT)).sum(2).sum(1, dtype=torch.float64)
        if whole
        else total
    )
