"""Noise and its buffers spread over several processes or devices: each keeps the past noise of its
own coordinates only.

A strategy treats every coordinate alike and by itself, so noise made for a part of the coordinates
is that part of the noise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.noise.coordinate_slice import CoordinateSlice
from dpfy.noise.strategy import Grads
from dpfy.noise.stream import NoiseStream


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` of all coordinates, cut from the parameters laid end to end.

        shard, total = Shard(rank, ranks), ...                    # total: the bounded sum over all
        ranks stream = shard.stream(NoiseStream(strategy, scale, randomness),
        shard.part(parameters)) state = stream.init(shard.of(parameters)) private, state =
        stream.release(Bounded(shard.of(total.value), total.bound, total.unit), step, state, permit)

    Guarantees: the shards of one count are disjoint and together hold every coordinate, their sizes
    differ by at most one, and together they add to the whole sum exactly the noise that the plan
    bills (the bound is that of the whole contribution). The noise of a coordinate is the one it
    would have without shards, exact noise aside, and aside from what a GPU adds to float64 sums or
    to tensors that are held in several pieces. All shards of a run must be of the same count.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        check.integer("shard.count", self.count)
        if check.integer("shard.index", self.index, least=0) >= self.count:
            raise InvalidInput(
                "shard.index", self.index, f"must be less than the number of shards ({self.count})"
            )

    def of(self, tensors: Grads) -> Grads:
        """This shard's coordinates, flat, by the name of the parameter that they belong to; of some
        parameters it may hold none.
        """
        (first, last), start = self.bounds(sum(t.numel() for t in tensors.values())), 0
        parts = {}
        for name, t in tensors.items():
            low, high = max(first - start, 0), min(last - start, t.numel())
            parts[name] = t.reshape(-1)[low : max(low, high)]
            start += t.numel()
        return parts

    def bounds(self, total: int) -> tuple[int, int]:
        """The first of this shard's coordinates of `total`, and the one after its last."""
        return total * self.index // self.count, total * (self.index + 1) // self.count

    def part(self, tensors: Grads) -> CoordinateSlice:
        """Where its coordinates lie among all of `tensors`."""
        sizes = [t.numel() for t in tensors.values()]
        return CoordinateSlice.of([self.bounds(sum(sizes))], sizes)

    def stream(self, whole: NoiseStream, part: CoordinateSlice) -> NoiseStream:
        """The noise stream of the coordinates `part`, which only this shard holds.

        Exact noise cannot be drawn by its place among all coordinates: every shard has a stream
        with a name of its own, for under one name two shards would add the same numbers to
        different coordinates.
        """
        if self.count == 1:
            return whole
        name = f"{whole.name} shard {self.index} of {self.count}" if whole.exact else whole.name
        return replace(whole, name=name, part=part)
