"""Shards: together they are the whole, each with noise and buffers of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpfy.core.book import rehearsal
from dpfy.core.errors import InvalidInput
from dpfy.core.random import Randomness
from dpfy.core.values import Bound, Bounded
from dpfy.noise.banded import Banded, NormalisedBanded
from dpfy.noise.blt import Blt
from dpfy.noise.inverse import inverse_square_root_banded
from dpfy.noise.shard import Shard
from dpfy.noise.strategy import Identity
from dpfy.noise.stream import NoiseStream
from dpfy.noise.toeplitz import SquareRoot
from dpfy.noise.tree import Tree

STEPS, COUNT = 12, 3
STRATEGIES = {
    "identity": Identity(),
    "banded": Banded((1.0, 0.7, 0.6, 0.5)),
    "normalised": NormalisedBanded((1.0, 0.7, 0.5), STEPS),
    "blt": Blt((0.99, 0.9, 0.5), (0.156, 0.233, 0.141)),
    "inverse": inverse_square_root_banded(5),
    "square root": SquareRoot(),
    "tree": Tree("honaker", restart=5, completion=True),
}
LIKE = {
    "w": torch.zeros(4, 5, dtype=torch.float64),
    "b": torch.zeros(3, dtype=torch.float64),
    "s": torch.zeros((), dtype=torch.float64),
}


def flat(tensors):
    return torch.cat([t.reshape(-1) for t in tensors.values()])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 24, 30])
def test_shards_hold_every_coordinate_once(count):
    numbered = {"a": torch.arange(20).reshape(4, 5), "b": torch.arange(20, 24)}
    parts = [Shard(k, count).of(numbered) for k in range(count)]
    assert [int(v) for part in parts for t in part.values() for v in t] == list(range(24))
    sizes = [sum(t.numel() for t in part.values()) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_noise_of_the_shards_is_the_noise_of_the_whole(name):
    """From the same draws, step by step; and no shard keeps more than its part of the past."""
    strategy = STRATEGIES[name]
    torch.manual_seed(0)
    draws = [{n: torch.randn_like(t) for n, t in LIKE.items()} for _ in range(4 * STEPS)]
    shards = [Shard(k, COUNT) for k in range(COUNT)]
    state, states = strategy.init(LIKE), [strategy.init(shard.of(LIKE)) for shard in shards]
    for step in range(STEPS):
        whole, state = strategy.next(step, lambda s: {n: t.clone() for n, t in draws[s].items()}, state)
        parts = []
        for k, shard in enumerate(shards):
            noise, states[k] = strategy.next(
                step, lambda s, shard=shard: {n: t.clone() for n, t in shard.of(draws[s]).items()}, states[k]
            )
            parts.append(flat(noise))
        assert torch.allclose(torch.cat(parts), flat(whole), rtol=1e-13, atol=1e-14)
        kept = [sum(t.numel() for t in s.values()) for s in states]
        assert sum(kept) == sum(t.numel() for t in state.values())


def test_each_shard_draws_its_own_noise_at_the_scale_of_the_whole():
    """Two shards under one name would add the same numbers; the scale is that of the whole bound. 5 standard errors."""
    like = {"w": torch.zeros(40_000)}
    whole = NoiseStream(Banded((1.0,)), 1.5, Randomness.for_tests(0))
    released = []
    for k in range(2):
        shard = Shard(k, 2)
        stream = shard.stream(whole)
        part = Bounded(shard.of(like), Bound(0.4))
        released.append(
            stream.release(part, 0, stream.init(part.value), rehearsal(stream.event, STEPS))[0].value["w"].double().numpy()
        )
    first, second = released
    assert len(first) == len(second) == 20_000
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(20_000)
    both = np.concatenate(released)
    assert abs((both**2).mean() / (1.5 * 0.4) ** 2 - 1) < 5 * np.sqrt(2 / 40_000)
    assert Shard(0, 1).stream(whole) == whole


def test_a_shard_that_is_none_is_refused():
    with pytest.raises(InvalidInput, match="less than the number of shards"):
        Shard(2, 2)
    with pytest.raises(InvalidInput, match=r"shard\.count"):
        Shard(0, 0)
