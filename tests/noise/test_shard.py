"""Shards: together they are the whole, each with noise and buffers of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.noise import gaussian
from dpfy.noise.coordinate_slice import CoordinateSlice
from dpfy.noise.strategy import Identity
from dpfy.noise.stream import NoiseStream, Shard
from dpfy.noise.toeplitz import (
    Banded,
    Blt,
    NormalisedBanded,
    SquareRoot,
    inverse_square_root_banded,
)
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
        whole, state = strategy.next(
            step, lambda s: {n: t.clone() for n, t in draws[s].items()}, state
        )
        parts = []
        for k, shard in enumerate(shards):
            noise, states[k] = strategy.next(
                step,
                lambda s, shard=shard: {n: t.clone() for n, t in shard.of(draws[s]).items()},
                states[k],
            )
            parts.append(flat(noise))
        assert torch.allclose(torch.cat(parts), flat(whole), rtol=1e-13, atol=1e-14)
        kept = [sum(t.numel() for t in s.values()) for s in states]
        assert sum(kept) == sum(t.numel() for t in state.values())


def released(like, strategy, shards, exact=False, steps=3):
    """What the shards release of zero sums, joined, step by step."""
    whole = NoiseStream(strategy, 1.5, Randomness.for_tests(0), divisor=4.0, exact=exact)
    streams = [shard.stream(whole, shard.part(like)) for shard in shards]
    states = [stream.init(shard.of(like)) for stream, shard in zip(streams, shards, strict=True)]
    found = []
    for step in range(steps):
        pieces = []
        for k, (stream, shard) in enumerate(zip(streams, shards, strict=True)):
            part = Bounded(shard.of({n: t.clone() for n, t in like.items()}), Bound(0.4))
            private, states[k] = stream.release(
                part, step, states[k], mock_permit(stream.event, steps)
            )
            pieces.append(flat(private.value))
        found.append(torch.cat(pieces))
    return torch.stack(found)


@pytest.mark.parametrize("name", ["identity", "banded", "blt", "tree"])
@pytest.mark.parametrize("count", [2, 3, 40])
def test_a_coordinate_gets_the_same_noise_however_many_shards_there_are(name, count):
    """Bit for bit: also where a shard is empty, begins inside of a pair or ends where a chunk of
    noise does.
    """
    for like in (LIKE, {"a": torch.ones(gaussian.CHUNK + 7), "b": torch.ones(11, 3)}):
        alone = released(like, STRATEGIES[name], [Shard(0, 1)])
        assert torch.equal(
            released(like, STRATEGIES[name], [Shard(k, count) for k in range(count)]), alone
        )


def test_a_part_is_drawn_from_the_middle_of_the_stream(monkeypatch):
    """Runs in any chunk, several in one, and across their borders; no chunk without a run is
    made.
    """
    monkeypatch.setattr(gaussian, "CHUNK", 1 << 10)
    monkeypatch.setattr(gaussian, "LARGE_CHUNK", 1 << 10)
    randomness, total = Randomness.for_tests(3), 10_001
    for dtype in (torch.float32, torch.float64):
        whole = gaussian.draw({"w": torch.zeros(total, dtype=dtype)}, randomness, "noise", 4)["w"]
        for runs in [
            ((3, 4),),
            ((1023, 1025), (1030, 1031), (5000, 8193)),
            ((9999, 10_001),),
            ((0, 0), (7, 7)),
        ]:
            part = CoordinateSlice.of(runs, [total])
            found = gaussian.draw(
                {"w": torch.zeros(part.size, dtype=dtype)}, randomness, "noise", 4, part
            )["w"]
            assert torch.equal(found, torch.cat([whole[a:b] for a, b in runs]))
    with pytest.raises(InvalidInput, match="must follow each other"):
        CoordinateSlice(((3, 5), (4, 6)), (10,))


def test_shards_of_exact_noise_draw_from_streams_of_their_own():
    """Two shards under one name would add the same numbers; the scale is that of the whole bound. 5
    standard errors.
    """
    like = {"w": torch.zeros(4_000)}
    found = (
        released(like, Identity(), [Shard(0, 2), Shard(1, 2)], exact=True, steps=1)[0]
        .double()
        .numpy()
        * 4.0
    )
    first, second = found[:2000], found[2000:]
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(2_000)
    assert abs((found**2).mean() / (1.5 * 0.4) ** 2 - 1) < 5 * np.sqrt(2 / 4_000)
    whole = NoiseStream(Identity(), 1.5, Randomness.for_tests(0))
    assert Shard(0, 1).stream(whole, Shard(0, 1).part(like)) == whole


def test_parts_that_have_no_place_in_a_draw_have_streams_of_their_own():
    """On a GPU: of a tensor held in several pieces (columns), and where the kernel cannot be
    used.
    """
    sizes = [20, 3, 1]
    columns = [
        CoordinateSlice.of([(4 * row + 2 * k, 4 * row + 2 * k + 2) for row in range(5)], sizes)
        for k in range(2)
    ]
    assert all(part.pieces is None for part in columns)
    assert len({gaussian.by_counter("noise", part)[0] for part in (*columns, None)}) == 3
    assert all(gaussian.by_counter("noise", part)[1] is None for part in columns)
    rows = [CoordinateSlice.of([Shard(k, 3).bounds(24)], sizes) for k in range(3)]
    assert [part.pieces for part in rows] == [
        ((0, 8), (0, 0), (0, 0)),
        ((8, 16), (0, 0), (0, 0)),
        ((16, 20), (0, 3), (0, 1)),
    ]
    assert all(gaussian.by_counter("noise", part) == ("noise", part) for part in rows)
    assert len({gaussian.own_name("noise", part) for part in rows}) == 3


def test_a_sum_of_another_size_than_its_part_is_refused():
    shard, like = Shard(0, 2), {"w": torch.zeros(10)}
    stream = shard.stream(NoiseStream(Identity(), 1.0, Randomness.for_tests(0)), shard.part(like))
    with pytest.raises(InvalidInput, match="this part of the release has 5"):
        stream.release(Bounded(like, Bound(1.0)), 0, {}, mock_permit(stream.event, 1))


def test_a_shard_that_is_none_is_refused():
    with pytest.raises(InvalidInput, match="less than the number of shards"):
        Shard(2, 2)
    with pytest.raises(InvalidInput, match=r"shard\.count"):
        Shard(0, 0)
