"""Correlated noise in one launch: equal to the portable route on the same draws, up to float32
rounding, with a checkpoint in between.

On a GPU, or with ``TRITON_INTERPRET=1`` and triton installed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from functools import lru_cache, partial

import pytest
import torch
from torch import Tensor

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.noise import chacha, gaussian
from dpfy.noise.schedule import Schedule
from dpfy.noise.strategy import Grads, Identity, State
from dpfy.noise.stream import NoiseStream, Shard
from dpfy.noise.toeplitz import (
    Banded,
    Blt,
    NormalisedBanded,
    cancelling,
    inverse_square_root_banded,
    square_root_banded,
)

CUDA = torch.cuda.is_available()
needs_kernel = pytest.mark.skipif(
    chacha.triton is None or not (CUDA or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs triton, and a CUDA device or TRITON_INTERPRET=1",
)
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
DEVICE = "cuda" if CUDA else "cpu"
RANDOMNESS = Randomness.for_tests(5)
SCALE, BOUND, DIVISOR = 1.3, 0.7, 3.0
STEPS, CHECKPOINT = (70, 37) if CUDA else (5, 3)
ROUNDING = 1e-5 if CUDA else 3e-6
"""What float32 rounding may do to values of size 6 at most, fed back for that many steps."""

STRATEGIES = {
    "identity": Identity(),
    "schedule": Schedule((2, 98), (1.0, 1.37)),
    "one band": Banded((0.8,)),
    "two bands": Banded((1.0, 0.7)),
    "banded": Banded((1.0, 0.7, 0.6, 0.5)),
    "banded, scaled": Banded((0.57, 0.3, 0.2)),
    "64 bands": square_root_banded(64),
    "normalised": NormalisedBanded((0.9, 0.7, 0.6, 0.5), 100),
    "inverse": inverse_square_root_banded(5),
    "cancelling": cancelling(0.9),
    "blt": Blt((0.99, 0.9, 0.5), (0.156, 0.233, 0.141)),
    "blt, one buffer": Blt((0.9,), (0.3,)),
    "blt, five buffers": Blt((0.99, 0.95, 0.9, 0.7, 0.5), (0.1, 0.1, 0.1, 0.1, 0.05)),
}
KINDS = [
    (torch.float16,),
    (torch.float32, torch.bfloat16),
    pytest.param((torch.bfloat16,), marks=needs_gpu),
]
"""Types of results; in bfloat16 the interpreter cuts digits off where a device rounds."""

SHAPES = {"a": (5,), "none": (0, 3), "b": (41, 100), "scalar": ()}


def sums(step: int) -> Grads:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(shape, generator=generator).to(DEVICE) for name, shape in SHAPES.items()
    }


def through_a_file(state: State) -> State:
    file = io.BytesIO()
    torch.save({name: t.cpu() for name, t in state.items()}, file)
    file.seek(0)
    return {name: t.to(DEVICE) for name, t in torch.load(file, weights_only=True).items()}


def drawn(step: int) -> Grads:
    """The draw of a step in new memory."""
    return {name: t.clone() for name, t in _drawn(step).items()}


@lru_cache
def _drawn(step: int) -> Grads:
    """From the kernel, whose values are compared with the definition elsewhere."""
    like = sums(0)
    flat = torch.zeros(sum(t.numel() for t in like.values()), device=DEVICE)
    parts = flat.split([t.numel() for t in like.values()])
    chacha.draw_(parts, RANDOMNESS.key("noise", step, chacha.KEY_BYTES))
    return {name: part.view(t.shape) for (name, t), part in zip(like.items(), parts, strict=True)}


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=ROUNDING)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter's tensors, which are the CPU's, go to the kernel, and fail where the
    stream goes another way.
    """
    monkeypatch.setattr(chacha, "usable", lambda tensors: True)
    if not CUDA:
        monkeypatch.setattr(gaussian, "add_", lambda s, lattice, r, name, step, divisor, into, part: chacha.add_(
            list(s.values()), lattice, [r.key(name, step, chacha.KEY_BYTES)], divisor, into=into, part=part))  # fmt: skip  # noqa: E501
    monkeypatch.setattr(gaussian, "add_drawn_", None)


@pytest.fixture
def fine(fineness: Callable[[int], None]) -> None:
    """A lattice so fine that it hides nothing: its step is far below float32 rounding of the
    noise.
    """
    fineness(2**19)


@needs_kernel
@pytest.mark.usefixtures("kernel", "fine")
@pytest.mark.parametrize("name", STRATEGIES)
def test_one_launch_is_the_portable_route(name: str) -> None:
    strategy = STRATEGIES[name]
    stream = NoiseStream(strategy, SCALE, RANDOMNESS, divisor=DIVISOR, in_place=True)
    state, portable = stream.init(sums(0)), strategy.init(sums(0))
    for step in range(STEPS):
        if step == CHECKPOINT:
            state = through_a_file(state)
        unit, portable = strategy.next(step, drawn, portable)
        expected = {n: (s + SCALE * BOUND * unit[n]) / DIVISOR for n, s in sums(step).items()}
        given = sums(step)
        released, state = stream.release(
            Bounded(given, Bound(BOUND)), step, state, mock_permit(stream.event, 1000)
        )
        for n in given:
            assert released.value[n] is given[n]
            close(given[n], expected[n])
        assert state.keys() == portable.keys()
        for n in state:
            close(state[n], portable[n])


@needs_kernel
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", ["identity", "two bands", "banded", "blt"])
def test_shards_release_what_the_whole_would(name: str) -> None:
    """Bit for bit, however many there are."""
    whole = NoiseStream(STRATEGIES[name], SCALE, RANDOMNESS, divisor=DIVISOR)
    found = []
    for count in (1, 3):
        pieces = []
        for shard in (Shard(k, count) for k in range(count)):
            stream, mine = shard.stream(whole, shard.part(sums(0))), []
            state = stream.init(shard.of(sums(0)))
            for step in range(3):
                total = Bounded(shard.of(sums(step)), Bound(BOUND))
                released, state = stream.release(
                    total, step, state, mock_permit(stream.event, 1000)
                )
                mine.append(torch.cat([t.reshape(-1) for t in released.value.values()]))
            pieces.append(torch.stack(mine))
        found.append(torch.cat(pieces, 1))
    assert torch.equal(*found)


@needs_kernel
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", ["identity", "two bands", "banded", "blt", "blt, five buffers"])
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_results_that_go_elsewhere_are_rounded_once(
    name: str, kinds: tuple[torch.dtype, ...]
) -> None:
    """In the types of their places, also where these differ, in which case they are copied there;
    rows are those of any other place.
    """
    stream = NoiseStream(STRATEGIES[name], SCALE, RANDOMNESS, divisor=DIVISOR, in_place=True)
    states = [stream.init(sums(0)), stream.init(sums(0))]
    for step in range(STEPS):
        into = {
            n: torch.empty_like(t, dtype=kinds[i % len(kinds)])
            for i, (n, t) in enumerate(sums(0).items())
        }
        given = sums(step)
        released, states[0] = stream.release(
            Bounded(given, Bound(BOUND)), step, states[0], mock_permit(stream.event, 1000), into
        )
        expected, states[1] = stream.release(
            Bounded(sums(step), Bound(BOUND)), step, states[1], mock_permit(stream.event, 1000)
        )
        assert all(released.value[n] is t for n, t in into.items())
        for n, t in into.items():
            assert torch.equal(t, expected.value[n].to(t.dtype))
            assert len(kinds) > 1 or torch.equal(given[n], sums(step)[n])
        assert all(torch.equal(t, states[1][n]) for n, t in states[0].items())


@needs_kernel
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", ["banded", "blt"])
def test_a_checkpoint_changes_no_bit(name: str) -> None:
    stream = NoiseStream(STRATEGIES[name], SCALE, RANDOMNESS, divisor=DIVISOR)
    straight, resumed = stream.init(sums(0)), stream.init(sums(0))
    for step in range(STEPS):
        first, straight = stream.release(
            Bounded(sums(step), Bound(BOUND)), step, straight, mock_permit(stream.event, 1000)
        )
        second, resumed = stream.release(
            Bounded(sums(step), Bound(BOUND)),
            step,
            through_a_file(resumed),
            mock_permit(stream.event, 1000),
        )
        assert all(torch.equal(first.value[n], second.value[n]) for n in SHAPES)


@needs_kernel
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", ["two bands", "banded", "blt"])
def test_a_state_that_is_not_the_steps_own_raises_before_anything_is_changed(name: str) -> None:
    stream = NoiseStream(STRATEGIES[name], SCALE, RANDOMNESS, in_place=True)
    given, good = sums(0), stream.init(sums(0))
    for bad in (
        {},
        {n: t[:, :-1] for n, t in good.items()},
        {n: t.double() for n, t in good.items()},
        stream.init({"a": given["a"]}),
    ):
        before = {n: t.clone() for n, t in bad.items()}
        with pytest.raises(
            InvalidInput, match=r"noise state: got .* is not what step 3 begins with"
        ):
            stream.release(Bounded(given, Bound(BOUND)), 3, bad, mock_permit(stream.event, 1000))
        assert all(torch.equal(t, sums(0)[n]) for n, t in given.items())
        assert all(torch.equal(t, before[n]) for n, t in bad.items())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.usefixtures("fine")
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("case", ["float64", "not contiguous", "past not contiguous"])
def test_what_the_kernel_cannot_take_goes_the_portable_way(name: str, case: str) -> None:
    strategy = STRATEGIES[name]
    stream = NoiseStream(strategy, SCALE, RANDOMNESS, divisor=DIVISOR, in_place=True)

    def cast(value: Grads) -> Grads:
        if case == "float64":
            return {n: t.double() for n, t in value.items()}
        return {
            n: t.t().contiguous().t() if case == "not contiguous" and t.dim() == 2 else t
            for n, t in value.items()
        }

    state, portable = stream.init(cast(sums(0))), strategy.init(cast(sums(0)))
    for step in range(STEPS):
        if case == "past not contiguous":
            state = {n: t.t().contiguous().t() for n, t in state.items()}
        given = cast(sums(step))
        unit, portable = strategy.next(
            step, partial(gaussian.draw, given, RANDOMNESS, "noise"), portable
        )
        expected = {n: (s + SCALE * BOUND * unit[n]) / DIVISOR for n, s in given.items()}
        released, state = stream.release(
            Bounded(given, Bound(BOUND)), step, state, mock_permit(stream.event, 1000)
        )
        for n in expected:
            close(released.value[n], expected[n])


@pytest.mark.gpu
@needs_gpu
def test_tensors_that_move_and_another_queue_are_followed() -> None:
    """Where tensors lie is remembered from step to step: other tensors, and another queue of the
    device, must not be mistaken.
    """
    stream = NoiseStream(Banded((1.0, 0.5)), SCALE, RANDOMNESS)
    kept, state, again = [], stream.init(sums(0)), stream.init(sums(0))
    for step in range(STEPS):
        first, state = stream.release(
            Bounded(sums(step), Bound(BOUND)), step, state, mock_permit(stream.event, 1000)
        )
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            second, again = stream.release(
                Bounded(sums(step), Bound(BOUND)), step, again, mock_permit(stream.event, 1000)
            )
        torch.cuda.synchronize()
        assert all(torch.equal(first.value[n], second.value[n]) for n in SHAPES)
        kept.append(first)


@pytest.mark.gpu
@needs_gpu
def test_noise_is_not_recorded_into_a_graph() -> None:
    """A replay would add the same noise to another sum."""
    stream, total = (
        NoiseStream(Identity(), SCALE, RANDOMNESS, in_place=True),
        Bounded(sums(0), Bound(BOUND)),
    )
    stream.release(total, 0, {}, mock_permit(stream.event, 1000))
    with pytest.raises(Unsupported, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        stream.release(total, 1, {}, mock_permit(stream.event, 1000))
