"""Which route measures a layer, by the shapes of one example: the one place for engine and
inspection.

A weight of `rows` x `columns` is used at `positions` of an example. Its gradient's norm comes from
Gram matrices of the positions, or from the product itself, made in parts or kept for the weighted
sum. Never by the size of the batch: where terms cancel two routes give different norms, and one
more example must not change those of all the others. (Whether products are kept goes by the batch:
kept or made again, they are the same.)
"""

from __future__ import annotations

PASS_COST = 48
"""What writing and reading a kept gradient element costs, in multiply-adds of a matrix product
(measured on a CPU).
"""

KEPT_POSITIONS = 64
"""With fewer positions than this, a second product of a convolution costs less than keeping the
gradients (measured on a CPU).
"""

KEPT_WIDTH = 2**19
"""On a CPU, products of more elements are never kept: those of few batches would fit
(``contribution.KEEP_ELEMENTS`` in all).
"""

KEPT_BYTES = 8
"""On a GPU the product of a convolution is kept if its tensors have so many bytes for each of its
numbers: to write and read those is then faster than to make the product a second time. Recordings
hold what is kept, so it should be small against the tensors.
"""


def kept_on_gpu(width: int, size: int) -> bool:
    """Whether the gradient of a convolution of `width` weights is kept instead of input and output
    gradient, of `size` bytes.
    """
    return KEPT_BYTES * width <= size


def grouped_kept(below: int, width: int, elements: int) -> bool:
    """The same for a convolution in groups, `below` channels of its larger tensor in each, whose
    tensors have so many `elements`.
    """
    return width <= elements * (4 if below == 1 else 1)


def keeping_pays(positions: int, rows: int, columns: int) -> bool:
    """On a CPU: whether products cost less than Gram matrices even when each is written and read
    again, and fit into memory.
    """
    return rows * columns <= KEPT_WIDTH and PASS_COST * rows * columns <= 2 * positions**2 * (
        rows + columns
    )


def by_gram_on_cpu(positions: int, rows: int, columns: int) -> bool:
    """On a CPU: whether Gram matrices take fewer operations than products, and these are never
    kept.
    """
    return positions * (rows + columns) <= 0.9 * rows * columns and not keeping_pays(
        positions, rows, columns
    )


def by_gram_on_gpu(positions: int, rows: int, columns: int) -> bool:
    """On a GPU: Gram matrices tile by tile, unless there are many positions for the width.

    Products need no more operations than Gram matrices from 2.0 on, but the kernel serves all
    layers of a shape in one launch and writes nothing. On an H200 GPT-2 at 1,024 positions, whose
    square layers have 2.7, takes as long with either in bfloat16.
    """
    return positions * (rows + columns) <= 2.7 * rows * columns


def convolution_by_gram(positions: int, rows: int, columns: int) -> bool:
    """On a CPU: whether the Gram matrices of a convolution's patches take half the operations of
    its products.
    """
    return 2 * positions * (rows + columns) <= rows * columns
