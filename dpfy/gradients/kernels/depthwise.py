# mypy: disable-error-code="no-untyped-def"
"""Weight gradients of depthwise convolutions on a GPU, example by example, in one pass over both
tensors.

An output channel of a depthwise convolution sees one input channel, so its weight gradient has as
many numbers as the kernel has taps: each the inner product of the output gradient with the input,
moved by that tap. They are added in float32 in a fixed order and written out, for they are fewer
than the tensors they come from. What is measured and what is added are then the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only installation
    triton = None

TILE = 4096
"""Products that a program keeps at a time, 32 in each of its threads."""

CACHED = 2**15
"""Numbers of each tensor that a program should not go beyond."""

PROGRAMS = 528
"""With fewer programs than this, rows of the kernel are shared out too: so many run side by side on
an H200.
"""

if triton is not None:

    @triton.jit
    def _tap_kernel(
        near, far, out, sums, channels, share, below, taps, rows, each, kernel_h, kernel_w, length, out_h, out_w, depth, height, width,  # noqa: E501
        stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dilate_d, dilate_h, dilate_w,
        near_n, near_c, near_d, near_h, near_w, far_n, far_c, far_d, far_h, far_w,
        VOLUME: tl.constexpr, CHECK: tl.constexpr, SUMS: tl.constexpr,
        TILE_W: tl.constexpr, TILE_C: tl.constexpr, TILE_P: tl.constexpr,
    ):  # fmt: skip
        """Some channels of one example: for `each` rows of the kernel, sum over positions of
        near[position] far[position moved by the tap].

        Channel r is the pair of channel r // below of `near` and one of the `below` channels of
        `far` in its group, which `share` channels of `near` have. `sums`: those of `near` over all
        positions (SUMS).
        """
        example, first = tl.program_id(0).to(tl.int64), tl.program_id(2) * each
        r = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
        r_ok = r < channels
        own = r // below
        other = (own // share) * below + r % below
        near_at = near + example * near_n + (own * near_c)[:, None]
        far_at = far + example * far_n
        other = (other * far_c)[None, :, None]
        tap = tl.arange(0, TILE_W)
        move = (tap * dilate_w - pad_w)[:, None, None]
        for row in range(first, tl.minimum(first + each, rows)):
            z_move, y_move = (
                (row // kernel_h) * dilate_d - pad_d,
                (row % kernel_h) * dilate_h - pad_h,
            )
            total = tl.zeros((TILE_W, TILE_C, TILE_P), dtype=tl.float32)
            plain = tl.zeros((TILE_C, TILE_P), dtype=tl.float32)
            for start in range(0, length, TILE_P):
                position = start + tl.arange(0, TILE_P)
                ok = position < length
                x, y = position % out_w, position // out_w
                where = x * near_w
                if VOLUME:
                    where += (y // out_h) * near_d
                    z = (y // out_h) * stride_d + z_move
                    y = y % out_h
                where += y * near_h
                g = tl.load(
                    near_at + where[None, :], mask=r_ok[:, None] & ok[None, :], other=0.0
                ).to(tl.float32)
                if SUMS:  # noqa: SIM102 - known when the kernel is compiled, the row is not
                    if row == 0:
                        plain += g
                y = y * stride_h + y_move
                at = y * far_h
                if CHECK:
                    ok = ok & (y >= 0) & (y < height)
                if VOLUME:
                    at += z * far_d
                    if CHECK:
                        ok = ok & (z >= 0) & (z < depth)
                x = (x * stride_w)[None, None, :] + move
                mask = ok[None, None, :] & r_ok[None, :, None] & (tap < kernel_w)[:, None, None]
                if CHECK:
                    mask = mask & (x >= 0) & (x < width)
                a = tl.load(
                    far_at + (x * far_w + at[None, None, :] + other), mask=mask, other=0.0
                ).to(tl.float32)
                total += a * g[None, :, :]
            to = out + (example * channels + r[None, :]) * taps + row * kernel_w + tap[:, None]
            tl.store(to, tl.sum(total, axis=2), mask=(tap < kernel_w)[:, None] & r_ok[None, :])
            if SUMS:  # noqa: SIM102
                if row == 0:
                    tl.store(sums + example * channels + r, tl.sum(plain, axis=1), mask=r_ok)


@dataclass(frozen=True)
class Taps:
    """How `near` walks over `far`: at position p tap t meets p * stride + t * dilation - padding,
    in one to three dimensions.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def inside(self, near: Sequence[int], far: Sequence[int]) -> bool:
        """Whether no tap leaves an input of the size `far`."""
        walked = zip(near, far, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return all(
            pad == 0 and (n - 1) * step + (k - 1) * gap < size
            for n, size, k, step, pad, gap in walked
        )


def tap_sums(near: Tensor, far: Tensor, how: Taps, sums: bool = False) -> tuple[Tensor, Tensor]:
    """[many, channels of near * channels of far in a group, taps] inner products, in float32; and
    the [many, channels] sums of `near`.

    near, far: [many, channels, *space]. The sums are made only if they are asked for.
    """
    many, below = len(near), far.shape[1] // how.groups
    channels, taps = near.shape[1] * below, math.prod(how.kernel)
    kernel, stride, padding, dilation = (
        _three(each, of)
        for each, of in ((how.kernel, 1), (how.stride, 1), (how.padding, 0), (how.dilation, 1))
    )
    (_, out_h, out_w), space, rows = (
        _three(near.shape[2:], 1),
        _three(far.shape[2:], 1),
        kernel[0] * kernel[1],
    )
    length = near[0, 0].numel()
    tile_w = triton.next_power_of_2(kernel[2])
    tile_c, tile_p, warps = tiling(channels, length, tile_w, far.stride(1) == 1)
    blocks = triton.cdiv(channels, tile_c)
    each = rows if many * blocks >= PROGRAMS else 1
    out = torch.empty(many, channels, taps, dtype=torch.float32, device=near.device)
    plain = torch.empty(many, channels if sums else 0, dtype=torch.float32, device=near.device)
    _tap_kernel[(many, blocks, triton.cdiv(rows, each))](
        near, far, out, plain, channels, near.shape[1] // how.groups, below, taps, rows, each, kernel[1], kernel[2], length,  # noqa: E501
        out_h, out_w, *space, *stride, *padding, *dilation, near.stride(0), near.stride(1), *_three(near.stride()[2:], 0),  # noqa: E501
        far.stride(0), far.stride(1), *_three(far.stride()[2:], 0),
        VOLUME=len(how.kernel) == 3, CHECK=not how.inside(near.shape[2:], far.shape[2:]), SUMS=sums,
        TILE_W=tile_w, TILE_C=tile_c, TILE_P=tile_p, num_warps=warps,
    )  # fmt: skip
    return out, plain


def tiling(channels: int, length: int, tile_w: int, last: bool) -> tuple[int, int, int]:
    """How many channels and positions a program takes at a time, and its warps: neighbours in
    memory (channels if they lie `last`) go to neighbouring threads.

    Every row of taps reads the images again, so those of a program should stay in the first cache.
    Measured on an H200 in bfloat16: 7 x 7 taps, channels last, 96 channels of 32 x 32 0.154 ms with
    32 channels, 0.197 with 64; 384 of 8 x 8 0.082 and 0.046 with 128. 3 x 3 taps, channels first,
    96 of 32 x 32 0.166 with 128 positions, 0.54 with 32; 960 of 4 x 4 0.067 with 64 channels.
    """
    pairs = max(1, TILE // tile_w)
    most = triton.next_power_of_2(channels)
    if last:
        tile_c = min(most, 128, max(32, CACHED // length), pairs)
        while tile_c > 32 and channels % tile_c:  # no idle threads
            tile_c //= 2
        return tile_c, max(1, min(triton.next_power_of_2(length), pairs // tile_c)), 4
    tile_p = min(triton.next_power_of_2(length), 128 if length > 64 else 16, pairs)
    return min(most, max(1, pairs // tile_p)), tile_p, 4


def _three(numbers: Sequence[int], fill: int) -> tuple[int, int, int]:
    """One to three numbers, with `fill` for the dimensions that are not there."""
    a, b, c = (fill,) * (3 - len(numbers)) + tuple(numbers)
    return a, b, c
