"""Sums that are made group by group: what only the first groups need is let go of before there is
memory for the last ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpfy.gradients.per_example.clipped_sum import ClippedSum, scratch_bytes
from dpfy.gradients.per_example.rounding import sum_dtype

GROUPS = 4
"""Sums are made in so many groups of about the same size: each is a launch, and the memory of the
first is beside all that is held.
"""

GROUPED_BYTES = 2**27
"""Sums that are smaller in all are made at once: steps of such models are short, and would feel the
launches.
"""

GROUPED_SHARE = 1.0
"""So are those of which what is held for them is a smaller part: there is little to let go of."""

PIECE_BYTES = 2**24
"""The sums of a group lie in pieces of at most this size, which fit where a layer's tensors
were.
"""


@dataclass(frozen=True)
class SumGroup:
    """Parameters whose sums are made together, and the scratch memory that this takes."""

    names: tuple[str, ...]
    scratch: int


def sum_groups(scaled: ClippedSum, order: Sequence[str], held: int) -> tuple[SumGroup, ...]:
    """The groups of all parameters of `scaled`; `order`: those that are used, by their last use;
    `held`: bytes that are held for them.

    Guarantees: every parameter is in one group. The groups follow from shapes, kinds of
    contributions and the order alone, never from values. Those without a contribution, and those
    that share a launch, are in the first group.
    """
    sizes = {name: p.numel() * sum_dtype(p.dtype).itemsize for name, p in scaled.params.items()}
    total, large = (
        sum(sizes.values()),
        {name: part for _, mine in scaled.rests for name, part in mine.items()},
    )
    groups: list[list[str]] = [list(sizes)]
    pays = total >= GROUPED_BYTES and held >= GROUPED_SHARE * total
    if pays and len(scaled.rests) == 1 and not scaled.clip.coordinates:
        later = [name for name in order if name in large]
        groups, before = [[] for _ in range(GROUPS)], 0
        for name in [*[name for name in sizes if name not in set(later)], *later]:
            groups[min(before * GROUPS // total, GROUPS - 1)].append(name)
            before += sizes[name]
    return tuple(
        SumGroup(tuple(g), scratch_bytes(large[name] for name in g if name in large))
        for g in groups
        if g
    )


def parted(scaled: ClippedSum, groups: Sequence[SumGroup]) -> list[ClippedSum]:
    """`scaled` group by group."""
    return [scaled] if len(groups) == 1 else [scaled.of(frozenset(group.names)) for group in groups]
