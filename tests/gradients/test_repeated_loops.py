"""Loops over the steps of sequences as graphs: the same as without, for random lengths, directions
and sizes of a graph.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dpfy.gradients.cuda_graphs import graphs
from dpfy.gradients.cuda_graphs.graphs import RepeatedLoop

Tensors = Sequence[Tensor]


def decaying(
    times: list[int], given: Tensors, carried: Tensors, fixed: Tensors
) -> tuple[Sequence[Tensors], Tensors]:
    """State and step mixed by a matrix; the state, and its square."""
    state, made = carried[0], {}
    for t in times:
        state = torch.tanh(state @ fixed[0] + given[0][t] - given[1][t])
        made[t] = (state, state * state)
    return list(zip(*[made[t] for t in sorted(times)], strict=True)), (state,)


class Imitated:
    """A pool whose graphs are functions: replaying computes from what lies in the memory that was
    recorded.
    """

    def __init__(self) -> None:
        self.replays = 0

    def like(self, t: Tensor) -> Tensor:
        return torch.full_like(
            t, 255 if t.dtype is torch.uint8 else torch.nan
        )  # bytes of which floating-point numbers are NaN

    def record(
        self, work: Callable[[], list[Tensor]], device: torch.device, addresses: int
    ) -> tuple[Any, list[Tensor]]:
        made = [torch.full_like(t, torch.nan) for t in work()]

        def replay() -> None:
            self.replays += 1
            for place, t in zip(made, work(), strict=True):
                place.copy_(t)

        return SimpleNamespace(replay=replay), made


def sequences(
    r: random.Random, length: int, device: str
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Inputs, state, matrix, and room for what is made; some of the inputs lie in memory the other
    way round.
    """
    batch, width = r.randint(1, 4), r.randint(1, 5)
    options: dict[str, Any] = {"dtype": torch.float64, "device": device}
    given = [
        torch.randn(length, batch, width, **options),
        torch.randn(batch, length, width, **options).transpose(0, 1),
    ]
    room = [torch.full((length, batch, width), torch.nan, **options) for _ in range(2)]
    return (
        given,
        [torch.randn(batch, width, **options)],
        [torch.randn(width, width, **options)],
        room,
    )


def check(seed: int, device: str, loop: RepeatedLoop) -> None:
    """One loop on several sequences, of two shapes in turn, against the work on all steps at
    once.
    """
    for turn in range(8):
        r = random.Random(f"{seed} {turn % 2}")
        torch.manual_seed(seed + turn)
        backwards, length = r.random() < 0.5, r.randint(1, 13)
        given, carried, fixed, room = sequences(r, length, device)
        first = carried[0].clone()
        last = loop(backwards, given, carried, fixed, room)
        times = list(reversed(range(length))) if backwards else list(range(length))
        expected, passed = decaying(times, given, carried, fixed)
        for found, parts in zip(room, expected, strict=True):
            torch.testing.assert_close(found, torch.stack(list(parts)), rtol=0, atol=1e-12)
        torch.testing.assert_close(last[0], passed[0], rtol=0, atol=1e-12)
        assert torch.equal(carried[0], first), "what was given is left as it was"


@pytest.mark.parametrize("seed", range(24))
def test_graphs_make_what_the_loop_makes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_recordable", lambda device: True)
    monkeypatch.setattr(graphs, "TOGETHER", 1 + seed % 5)
    monkeypatch.setattr(graphs, "settings", lambda device: ())
    monkeypatch.setattr(graphs, "on", lambda device: nullcontext())
    loop, pool = RepeatedLoop(decaying), Imitated()
    monkeypatch.setattr(loop, "_pool", pool)
    check(seed, "cpu", loop)
    assert loop.problem is None
    if graphs.TOGETHER == 1:
        assert pool.replays


def test_few_shapes_are_held_and_recorded_again_only_where_that_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graphs, "_recordable", lambda device: True)
    monkeypatch.setattr(graphs, "USUALLY", 0)
    monkeypatch.setattr(graphs, "settings", lambda device: ())
    monkeypatch.setattr(graphs, "on", lambda device: nullcontext())
    loop = RepeatedLoop(decaying)
    monkeypatch.setattr(loop, "_pool", Imitated())

    def run(batch: int) -> None:
        x = torch.randn(graphs.TOGETHER, batch, 2)
        loop(False, [x, x], [x[0]], [torch.eye(2)], [torch.empty_like(x), torch.empty_like(x)])

    for _ in range(9):
        for batch in range(1, 12):
            run(batch)
    assert len(loop._made) == graphs.MOST
    assert loop.made <= graphs.MOST + 99 // graphs.PAYS
    before = loop.made
    for _ in range(2 * graphs.PAYS):  # another size comes, and stays
        run(20)
    assert loop.made == before + 1


def test_memory_of_many_tensors_is_one_piece() -> None:
    r, pool = random.Random(0), graphs.GraphPool(apart=False)
    for _ in range(20):
        kinds = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]
        given = [
            torch.randn([r.randint(0, 7) for _ in range(r.randint(0, 3))]).to(r.choice(kinds))
            for _ in range(r.randint(1, 6))
        ]
        room = graphs._room(pool, given)
        for mine, t in zip(room, given, strict=True):
            mine.copy_(t)
        for mine, t in zip(room, given, strict=True):
            assert mine.dtype is t.dtype
            assert torch.equal(mine, t)
        assert len({mine.untyped_storage().data_ptr() for mine in room}) == 1


def test_a_graph_that_cannot_be_made_leaves_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no graphs here")

    monkeypatch.setattr(graphs, "_recordable", lambda device: True)
    monkeypatch.setattr(graphs, "TOGETHER", 2)
    monkeypatch.setattr(graphs, "settings", lambda device: ())
    monkeypatch.setattr(graphs, "on", lambda device: nullcontext())
    loop, pool = RepeatedLoop(decaying), Imitated()
    monkeypatch.setattr(pool, "record", refuse)
    monkeypatch.setattr(loop, "_pool", pool)
    for seed in range(4):
        check(seed, "cpu", loop)
    assert str(loop.problem) == "no graphs here"


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_graphs_on_a_gpu(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "TOGETHER", 1 + seed % 4)
    loop = RepeatedLoop(decaying)
    check(seed, "cuda", loop)
    assert loop.problem is None
    if graphs.TOGETHER == 1:
        assert loop._made


@pytest.mark.gpu
def test_no_graphs_while_somebody_looks_at_single_operations() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    device = torch.device("cuda", 0)
    assert graphs._recordable(device)
    with Watching():
        assert not graphs._recordable(device)
    assert not torch.func.vmap(lambda x: x + graphs._recordable(device))(
        torch.zeros(2, device=device)
    ).any()
