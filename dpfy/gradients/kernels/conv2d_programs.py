# mypy: disable-error-code="no-untyped-def"
"""The Triton programs of :mod:`dpfy.gradients.kernels.conv2d`."""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only installation
    triton = None
else:
    from dpfy.gradients.kernels.grams import store_gram


if triton is not None:

    @triton.jit
    def border_kernel(
        inputs, out, channels, height, width, rows, columns, pad_h, pad_w, in_n, in_c, in_h, in_w,
        LAST: tl.constexpr, FLAT: tl.constexpr, TILE_C: tl.constexpr, TILE_P: tl.constexpr,
    ):  # fmt: skip
        """One example's input into the middle of rows * columns positions, channels last or first.
        FLAT: its rows are joined.
        """
        block, tile, example = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
        position, c = block * TILE_P + tl.arange(0, TILE_P), tile * TILE_C + tl.arange(0, TILE_C)
        y, x = position // width, position % width
        mask = (c < channels)[:, None] & (position < height * width)[None, :]
        if FLAT:
            where = position * in_w
        else:
            where = y * in_h + x * in_w
        a = tl.load(
            inputs + example * in_n + c[:, None] * in_c + where[None, :], mask=mask, other=0.0
        )
        place = (y + pad_h) * columns + x + pad_w
        if LAST:
            to = c[:, None] + place[None, :] * channels
        else:
            to = c[:, None] * (rows * columns) + place[None, :]
        tl.store(out + example * channels * rows * columns + to, a, mask=mask)

    @triton.jit
    def _shifts(
        column, start, channels, kernel_w, pad_h, pad_w, dilate_h, dilate_w, WHOLE: tl.constexpr
    ):  # fmt: skip
        """Channel, rows down and columns across of columns of the gradient. WHOLE: they begin at
        `start` and share a tap.
        """
        if WHOLE:
            tap = start // channels
            c = (column - tap * channels)[None, :]
        else:
            tap = (column // channels)[None, :]
            c = (column % channels)[None, :]
        return c, (tap // kernel_w) * dilate_h - pad_h, (tap % kernel_w) * dilate_w - pad_w

    @triton.jit
    def _patch(
        base, position, ok, column_ok, c, down, across, height, width, out_width, stride_h, stride_w, in_c, in_h, in_w,
        CHECK: tl.constexpr,
    ):  # fmt: skip
        """[positions, columns] of one example's patches. CHECK: the shifts may lead out of the
        input, where it is zero.
        """
        y = ((position // out_width) * stride_h)[:, None] + down
        x = ((position % out_width) * stride_w)[:, None] + across
        mask = ok[:, None] & column_ok[None, :]
        if CHECK:
            mask = mask & ((y >= 0) & (y < height) & (x >= 0) & (x < width))
        return tl.load(base + (y * in_h + x * in_w + c * in_c), mask=mask, other=0.0)

    @triton.jit
    def _grad(base, position, ok, o, o_ok, out_width, g_c, g_h, g_w, FLAT: tl.constexpr):
        """[outs, positions] of one example's output gradient. FLAT: its rows follow one another."""
        if FLAT:
            where = position * g_w
        else:
            where = (position // out_width) * g_h + (position % out_width) * g_w
        return tl.load(
            base + (o[:, None] * g_c + where[None, :]), mask=o_ok[:, None] & ok[None, :], other=0.0
        )

    @triton.jit(do_not_specialize=["again", "batch", "share", "pitch"])
    def product_kernel(
        inputs, grads, weights, out, again, pitch, batch, share, width_total, channels, height, width, outs, length, out_width,  # noqa: E501
        kernel_w, stride_h, stride_w, pad_h, pad_w, dilate_h, dilate_w, in_n, in_c, in_h, in_w, g_n, g_c, g_h, g_w,
        SUM: tl.constexpr, RUN: tl.constexpr, CHECK: tl.constexpr, WHOLE: tl.constexpr, FLAT: tl.constexpr, NESTED: tl.constexpr,  # noqa: E501
        TILE_O: tl.constexpr, TILE_D: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """One tile of the weight gradients of `share` examples: their squared norms, [tiles,
        batch], or (SUM) their weighted sum, or (RUN) themselves, [runs, batch, outs, columns], as
        sums over RUN positions.

        The sum is made of finished products, in float32: a weight is never rounded into a factor,
        and an example whose weight is 0 adds nothing, whatever it holds. `again`: add to what `out`
        holds. `pitch`: from one tile's norms to the next one's.
        """
        tile, split = tl.program_id(0), tl.program_id(1)
        far = split.to(tl.int64) * 0  # distances between examples may need more than 32 bits
        tiles_d = (width_total + TILE_D - 1) // TILE_D
        o = (tile // tiles_d) * TILE_O + tl.arange(0, TILE_O)
        first = (tile % tiles_d) * TILE_D
        column = first + tl.arange(0, TILE_D)
        o_ok, column_ok = o < outs, column < width_total
        c, down, across = _shifts(
            column, first, channels, kernel_w, pad_h, pad_w, dilate_h, dilate_w, WHOLE
        )
        begin = split * share
        end = tl.minimum(begin + share, batch)
        steps = (length + DEPTH - 1) // DEPTH
        total = tl.zeros((TILE_O, TILE_D), dtype=tl.float32)
        start_at, stop_at = 0, length
        if RUN > 0:
            start_at = tl.program_id(2) * RUN
            stop_at = tl.minimum(start_at + RUN, length)
        if NESTED:
            for n in range(begin, end):
                product = tl.zeros((TILE_O, TILE_D), dtype=tl.float32)
                base_a, base_g = inputs + (far + n) * in_n, grads + (far + n) * g_n
                for start in range(start_at, stop_at, DEPTH):
                    position = start + tl.arange(0, DEPTH)
                    ok = position < length  # runs are whole numbers of steps
                    g = _grad(base_g, position, ok, o, o_ok, out_width, g_c, g_h, g_w, FLAT)
                    a = _patch(
                        base_a, position, ok, column_ok, c, down, across, height, width, out_width, stride_h, stride_w,
                        in_c, in_h, in_w, CHECK,
                    )  # fmt: skip
                    product = tl.dot(g, a, product, input_precision=PRECISION)
                if SUM:
                    weight = tl.load(weights + n).to(tl.float32)
                    if weight != 0.0:
                        total += weight * product
                elif RUN > 0:
                    at = (
                        out
                        + ((tl.program_id(2).to(tl.int64) * batch + n) * outs + o[:, None])
                        * width_total
                        + column[None, :]
                    )
                    tl.store(at, product, mask=o_ok[:, None] & column_ok[None, :])
                else:
                    tl.store(
                        out + tile * pitch + n, tl.sum(tl.sum(product * product, axis=1), axis=0)
                    )
        else:
            product = tl.zeros((TILE_O, TILE_D), dtype=tl.float32)
            for step in range(begin * steps, end * steps):
                n, position = step // steps, (step % steps) * DEPTH + tl.arange(0, DEPTH)
                ok = position < length
                g = _grad(
                    grads + (far + n) * g_n, position, ok, o, o_ok, out_width, g_c, g_h, g_w, FLAT
                )
                a = _patch(
                    inputs + (far + n) * in_n, position, ok, column_ok, c, down, across, height, width, out_width,
                    stride_h, stride_w, in_c, in_h, in_w, CHECK,
                )  # fmt: skip
                product = tl.dot(g, a, product, input_precision=PRECISION)
                if step % steps == steps - 1:
                    if SUM:
                        weight = tl.load(weights + n).to(tl.float32)
                        if weight != 0.0:
                            total += weight * product
                    else:
                        tl.store(
                            out + tile * pitch + n,
                            tl.sum(tl.sum(product * product, axis=1), axis=0),
                        )
                    product = tl.zeros((TILE_O, TILE_D), dtype=tl.float32)
        if SUM:
            at = out + (split.to(tl.int64) * outs + o[:, None]) * width_total + column[None, :]
            mask = o_ok[:, None] & column_ok[None, :]
            if again != 0:
                total += tl.load(at, mask=mask, other=0.0)
            tl.store(at, total, mask=mask)

    @triton.jit(do_not_specialize=["pitch"])
    def patch_gram_kernel(
        inputs, grads, out, pitch, width_total, channels, height, width, outs, length, out_width, kernel_w,
        stride_h, stride_w, pad_h, pad_w, dilate_h, dilate_w, in_n, in_c, in_h, in_w, g_n, g_c, g_h, g_w,
        CHECK: tl.constexpr, WHOLE: tl.constexpr, FLAT: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """The six sums of ``rounding.Gram`` for one example's weight gradient, from the Gram
        matrices of its at most TILE positions.
        """
        example = tl.program_id(0).to(tl.int64)
        base_a, base_g = inputs + example * in_n, grads + example * g_n
        position = tl.arange(0, TILE)
        ok = position < length
        first = tl.zeros((TILE, TILE), dtype=tl.float32)
        for k in range(0, outs, DEPTH):
            o = k + tl.arange(0, DEPTH)
            g = _grad(base_g, position, ok, o, o < outs, out_width, g_c, g_h, g_w, FLAT)
            first = tl.dot(tl.trans(g), g, first, input_precision=PRECISION)
        second = tl.zeros((TILE, TILE), dtype=tl.float32)
        for k in range(0, width_total, DEPTH):
            column = k + tl.arange(0, DEPTH)
            c, down, across = _shifts(
                column, k, channels, kernel_w, pad_h, pad_w, dilate_h, dilate_w, WHOLE
            )
            a = _patch(
                base_a, position, ok, column < width_total, c, down, across, height, width, out_width, stride_h, stride_w,  # noqa: E501
                in_c, in_h, in_w, CHECK,
            )  # fmt: skip
            second = tl.dot(a, tl.trans(a), second, input_precision=PRECISION)
        store_gram(out + tl.program_id(0), pitch, first, second, position, position, ok, True)
