"""The order of calls around a capture, with CUDA stood in for by a list of calls."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import pytest
import torch

from dpfy.gradients import kernels
from dpfy.gradients.cuda_graphs import graphs


class Calls(list[str]):
    """Stands in for torch.cuda: remembers what was called."""

    def stream(self, name: str) -> Any:
        calls = self

        class Stream:
            device = torch.device("cpu")

            def wait_stream(self, other: Any) -> None:
                calls.append(f"{name} waits")

        return Stream()

    def graph(self) -> Any:
        calls = self

        class Graph:
            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                calls.append(f"begin {pool}")

            def capture_end(self) -> None:
                calls.append("end")

            def replay(self) -> None:
                calls.append("replay")

        return Graph()

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        self.append(f"enter {name}")
        yield
        self.append(f"leave {name}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    streams = {"here": made.stream("here")}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams["here"])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.stream("side"))
    monkeypatch.setattr(
        graphs, "_recording_queue", graphs._recording_queue.__wrapped__
    )  # nothing of it stays
    monkeypatch.setattr(torch.cuda, "stream", lambda s: made.inside("stream"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made.graph)
    monkeypatch.setattr(
        torch.cuda, "graph_pool_handle", lambda: f"pool {sum('begin' in c for c in made)}"
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: made.inside("memory"))
    monkeypatch.setattr(graphs, "_POOLS", {})
    return made


def test_work_is_captured_on_a_queue_of_its_own_without_garbage_collection(calls: Calls) -> None:
    pool = graphs.GraphPool()

    def work() -> str:
        calls.append("work" if not gc.isenabled() else "work beside a collector")
        assert kernels._tables is not None
        return "made"

    graph, made = pool.record(work, torch.device("cpu"), 64)
    assert made == "made"
    assert gc.isenabled()
    assert kernels._tables is None
    assert calls == [
        "enter memory", "leave memory", "side waits", "enter "
                                                      "stream", "begin pool 0", "work", "end", "leave stream", "here waits",  # noqa: E501
    ]  # fmt: skip
    graph.replay()
    assert calls[-1] == "replay"
    pool.record(work, torch.device("cpu"), 64)
    assert "begin pool 1" not in calls
    pool.clear()
    pool.record(work, torch.device("cpu"), 64)
    assert "begin pool 2" in calls


def test_a_failure_ends_the_capture_and_leaves_nothing_behind(calls: Calls) -> None:
    def work() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        graphs.GraphPool().record(work, torch.device("cpu"), 64)
    assert "end" in calls
    assert gc.isenabled()
    assert kernels._tables is None


def test_memory_of_work_is_held_until_it_is_released(calls: Calls) -> None:
    with graphs.private_pool():
        first = graphs._POOLS[("work", 0)]
    with graphs.private_pool():
        assert graphs._POOLS[("work", 0)] is first
    graphs.release_private_pool()
    graphs.release_private_pool()
    assert not graphs._POOLS
    beside = graphs.GraphPool(
        apart=False
    )  # as a captured step: where the model's tensors lie does not matter to it
    assert beside.like(torch.ones(3)).shape == (3,)
    beside.record(lambda: torch.ones(1), torch.device("cpu"), 64)
    assert not graphs._POOLS
    assert graphs.GraphPool().like(torch.ones(3)).shape == (3,)
    assert list(graphs._POOLS) == [("kept", 0)]


@pytest.mark.parametrize("how", ["works", "another allocator", "no memory apart", "no work done"])
def test_what_does_not_work_is_found_before_it_is_needed(
    calls: Calls, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda,
        "get_allocator_backend",
        lambda: "other" if how == "another allocator" else "native",
    )
    if how == "no memory apart":

        def refuse(pool: Any) -> Any:
            raise RuntimeError("segments that expand")

        monkeypatch.setattr(torch.cuda, "use_mem_pool", refuse)
    if how == "no work done":
        monkeypatch.setattr(
            graphs.GraphPool,
            "record",
            lambda pool, work, device, addresses: (calls.graph(), work() * 0),
        )
    graphs.problem.cache_clear()
    found = graphs.problem(torch.device("cpu"))
    graphs.problem.cache_clear()
    assert (found is None) == (how == "works")


@pytest.mark.parametrize(
    ("problem", "clip"),
    [(RuntimeError("no graphs"), None), (None, ["a rule that cannot be hashed"])],
)
def test_an_engine_goes_on_as_usual_where_graphs_do_not_work(
    problem: Any, clip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import nullcontext

    from dpfy.gradients.cuda_graphs.recorder import Recorder
    from dpfy.gradients.engines.bounded_sum import BoundedSum

    monkeypatch.setattr(graphs, "on", lambda device: nullcontext())
    monkeypatch.setattr(graphs, "problem", lambda device: problem)
    recorder = Recorder(BoundedSum({}))
    assert recorder.bounded_sum(torch.ones(2), clip, None) is None
    assert not recorder.on
    assert isinstance(recorder.problem, Exception)


def test_all_graphs_are_recorded_on_one_queue(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each queue that products ran on keeps up to 32 MiB for them."""
    monkeypatch.setattr(graphs, "_recording_queue", lru_cache(graphs._recording_queue))
    used: list[Any] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda s: (used.append(s), calls.inside("stream"))[1])
    for _ in range(3):
        graphs.GraphPool().record(lambda: None, torch.device("cpu"), 0)
    assert len(used) == 3
    assert len(set(map(id, used))) == 1
