"""Noise and its buffers spread over several processes or devices: each keeps the past noise of its own coordinates only.

A strategy treats every coordinate alike and by itself, so noise made for a part of the coordinates is that part of the noise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.noise.strategy import Grads
from dpfy.noise.stream import NoiseStream


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` of all coordinates, cut from the parameters laid end to end.

        shard, total = Shard(rank, ranks), ...                    # total: the bounded sum over all ranks
        stream = shard.stream(NoiseStream(strategy, scale, randomness))
        state = stream.init(shard.of(parameters))
        private, state = stream.release(Bounded(shard.of(total.value), total.bound, total.unit), step, state, permit)

    Guarantees: the shards of one count are disjoint and together hold every coordinate, their sizes differ by at most one, and each
    draws its noise from a stream of its own: together they add to the whole sum exactly the noise that the plan bills (the bound is
    that of the whole contribution). All shards of a run must be of the same count.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        check.integer("shard.count", self.count)
        if check.integer("shard.index", self.index, least=0) >= self.count:
            raise InvalidInput("shard.index", self.index, f"must be less than the number of shards ({self.count})")

    def of(self, tensors: Grads) -> Grads:
        """This shard's coordinates, flat, by the name of the parameter that they belong to; parameters without any are left out."""
        total = sum(t.numel() for t in tensors.values())
        first, last = total * self.index // self.count, total * (self.index + 1) // self.count
        parts, start = {}, 0
        for name, t in tensors.items():
            low, high = max(first - start, 0), min(last - start, t.numel())
            if low < high:
                parts[name] = t.reshape(-1)[low:high]
            start += t.numel()
        return parts

    def stream(self, whole: NoiseStream) -> NoiseStream:
        """The noise stream of this shard. Under the same name two shards would add the same numbers to different coordinates."""
        return (
            whole
            if self.count == 1
            else replace(whole, name=f"{whole.name} shard {self.index} of {self.count}", shards=self.count)
        )
