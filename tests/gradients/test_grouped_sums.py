"""Sums group by group: the same sums, from memory that is still held, allocated and let go of in
one order whoever does the work.

Reports and sums lie in an arena that hands out its memory as a caching allocator does: freed memory
is given out again at once, the best fit first. It is spoilt when it is freed, so that a sum of what
was let go of cannot be right.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.gradients.test_recorder import FakeGraph, Model, Operations, Stage
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.gradients.autograd.tape import LayerReport
from dpfy.gradients.clip import Clip, FlatClip, PerLayerClip, QuantileClip
from dpfy.gradients.cuda_graphs import graphs, grouped_sums, recorder
from dpfy.gradients.cuda_graphs.recorded_step import HeldReports
from dpfy.gradients.cuda_graphs.recorder import SAME
from dpfy.gradients.per_example import joined
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.joined import BufferLayout, _Block, _Small
from dpfy.noise.strategy import Identity
from dpfy.noise.stream import NoiseStream
from dpfy.training.step import rounded

GRAIN = 64


class Arena:
    """One piece of memory; what is taken of it comes back when the last tensor in it is gone."""

    def __init__(self, size: int = 2**22) -> None:
        self._memory = np.zeros(size, np.uint8)
        self._free = {0: size}
        self.events: list[tuple[str, int, int]] = []
        self.peak = self.used = 0

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor that nobody wrote to."""
        size = max(1, -(-math.prod(shape) * dtype.itemsize // GRAIN)) * GRAIN
        start = min((length, at) for at, length in self._free.items() if length >= size)[1]
        length = self._free.pop(start)
        if length > size:
            self._free[start + size] = length - size
        self.events.append(("take", start, size))
        self.used += size
        self.peak = max(self.peak, self.used)
        piece = self._memory[start : start + size]
        made = torch.from_numpy(piece)  # holds `piece` as long as it is used
        weakref.finalize(piece, self._back, start, size)
        return made[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def like(self, t: Tensor) -> Tensor:
        """A copy of `t`."""
        return self.empty(*t.shape, dtype=t.dtype).copy_(t)

    def _back(self, start: int, size: int) -> None:
        self._memory[start : start + size] = 255  # NaN, in every floating type
        self.events.append(("back", start, size))
        self.used -= size
        self._free[start] = size
        merged: dict[int, int] = {}
        last = -1
        for at in sorted(self._free):
            if last >= 0 and last + merged[last] == at:
                merged[last] += self._free[at]
            else:
                last, merged[at] = at, self._free[at]
        self._free = merged

    def holds(self, t: Tensor) -> bool:
        """Whether `t` lies in it."""
        first = self._memory.__array_interface__["data"][0]
        return bool(first <= t.data_ptr() < first + len(self._memory))


class ArenaOperations(Operations):
    """Operations that do not keep the memory of the arena, as a graph keeps none of the model's."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        self.made[-1] = tree_map(self._bare, self.made[-1])
        return made

    def _bare(self, each: Any) -> Any:
        return (
            graphs.unowned(each) if isinstance(each, Tensor) and self._arena.holds(each) else each
        )


class GroupedStage(Stage):
    """An engine whose reports and sums lie in an arena: where, is up to the order in which memory
    is taken and given back.

    Norms are taken at the end, as where there are kernels for many layers: until then contributions
    are views of what was reported.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, model: nn.Module | None = None, groups: int = 4
    ) -> None:
        super().__init__(monkeypatch, model)
        self.arena, self.recorded, self.wrong, self.failing, self.released = Arena(), 0, 0, 0, 0
        self.steps: list[list[tuple[str, int, int]]] = []
        self.after_group: Callable[[int], None] = lambda group: None
        monkeypatch.setattr(BufferLayout, "buffers", _BUFFERS)
        monkeypatch.setattr(
            joined, "taken", lambda count, dtype, device: self.arena.empty(count, dtype=dtype)
        )
        monkeypatch.setattr(Contribution, "waits", property(lambda part: True))
        monkeypatch.setattr(grouped_sums, "GROUPS", groups)
        monkeypatch.setattr(grouped_sums, "GROUPED_BYTES", 0)
        monkeypatch.setattr(grouped_sums, "GROUPED_SHARE", 0.0)
        monkeypatch.setattr(recorder, "PIECE_BYTES", 512)
        monkeypatch.setattr(HeldReports, "release", self._release(HeldReports.release))

    def _release(
        self, before: Callable[[HeldReports, tuple[str, ...]], None]
    ) -> Callable[[HeldReports, tuple[str, ...]], None]:
        def release(held: HeldReports, names: tuple[str, ...]) -> None:
            before(held, names)
            self.after_group(self.released)
            self.released += 1

        return release

    def record(
        self, work: Callable[[], Any], device: torch.device, addresses: int
    ) -> tuple[FakeGraph, Any]:
        self.recorded += 1
        if self.broken or self.recorded == self.failing:
            raise RuntimeError("cannot be recorded")
        with ArenaOperations(self.arena) as operations:
            made = work()
        return FakeGraph(operations, self.spoilt or self.recorded == self.wrong), made

    def taken(
        self, seed: int, clip: Clip, mask: Tensor | None, where: object = 0, **how: Any
    ) -> dict[str, Tensor]:
        """The bounded sum by way of the recorder; what the caller holds of it is let go of before
        the next step.
        """
        losses = self.losses(seed, **how)
        reports: list[LayerReport] = []
        self.engine.sums.report(losses, reports.append)
        self.arena.events, self.arena.peak, self.released = [], 0, 0
        waiting = list(self._moved(reports))
        del reports
        with torch.no_grad():
            step = recorder.ReportedStep(self.recorder, recorder.Request(clip, mask, losses))
            while waiting:
                step.receive(waiting.pop(0))
            found = step.finish().value
            del step
            assert list(found) == [*self.engine.sums.params, *clip.coordinates]
            copies = {name: t.clone() for name, t in found.items()}
        del found
        assert self.arena.used == 0, "something of the step is still held"
        self.steps.append(self.arena.events)
        return copies

    def _moved(self, reports: list[LayerReport]) -> Iterator[LayerReport]:
        """The reports in the arena; what one tensor is in several of them stays one tensor."""
        seen: dict[tuple[object, ...], Tensor] = {}
        for report in reports:
            mine = []
            for t in report.tensors:
                key = (t.data_ptr(), t.shape, t.stride())
                if key not in seen:
                    seen[key] = self.arena.like(t)
                mine.append(seen[key])
            yield LayerReport(report.site, mine[0], tuple(mine[1:]), report.explain)

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Those of the one recording that there is."""
        (recording,) = self.recorder._recordings.values()
        return [group.names for group, _ in recording.end]


_BUFFERS = BufferLayout.buffers
CLIP = FlatClip(0.1)
GRAPHS_BEFORE_SUMS = 2
"""With all reports in one section: that, and the multipliers."""


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> GroupedStage:
    monkeypatch.setattr(recorder, "SECTION", 100)
    return GroupedStage(monkeypatch)


def ordered(events: list[tuple[str, int, int]]) -> list[tuple[str, list[tuple[int, int]]]]:
    """Runs of taking, in their order, and of giving back, in any: what is free afterwards is the
    same whatever came first.
    """
    runs: list[tuple[str, list[tuple[int, int]]]] = []
    for kind, start, size in events:
        if not runs or runs[-1][0] != kind:
            runs.append((kind, []))
        runs[-1][1].append((start, size))
    return [(kind, sorted(many) if kind == "back" else many) for kind, many in runs]


@pytest.mark.parametrize("groups", [1, 2, 4, 100])
@pytest.mark.parametrize("section", [1, 4, 100])
@pytest.mark.parametrize("late", [True, False])
def test_groups_give_the_usual_sums_in_one_order_of_memory(
    groups: int, section: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps as usual, the one that is recorded and those that are repeated take and give back the
    same memory in the same order.
    """
    monkeypatch.setattr(recorder, "SECTION", section)
    stage = GroupedStage(monkeypatch, groups=groups)
    monkeypatch.setattr(Contribution, "waits", property(lambda part: late))
    for seed in range(SAME + 4):
        stage.check(seed, mask=torch.arange(6) != seed)
    assert (stage.recorder.made, stage.recorder.repeated) == (1, 4)
    assert len(stage.groups) == groups if groups <= 4 else len(stage.groups) > 4
    assert sorted(name for names in stage.groups for name in names) == sorted(
        stage.engine.sums.params
    )
    assert all(ordered(events) == ordered(stage.steps[0]) for events in stage.steps)


class Chain(nn.Module):
    """Layers of which all reports are held to the end."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(4, 16), *[(16, 16)] * 14, (16, 11)]
        self.layers = nn.Sequential(*[nn.Linear(*size, bias=False) for size in sizes])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(1)


def test_groups_need_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {}
    for groups in (1, 2, 4):
        stage = GroupedStage(monkeypatch, Chain(), groups)
        for seed in range(SAME + 2):
            stage.check(seed)
        assert stage.recorder.repeated == 2
        peaks[groups] = stage.arena.peak
    sums = sum(p.nbytes for p in Chain().parameters())
    assert peaks[1] - peaks[2] > 0.4 * sums
    assert peaks[2] - peaks[4] > 0.2 * sums


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_example_is_left_out_of_all_groups(stage: GroupedStage, bad: float) -> None:
    """In steps as usual, in those that would be recorded and in those that are repeated."""
    for seed in range(14):
        stage.check(seed, bad=bad if seed in (0, SAME, SAME + 3, 10) else 1.0)
    assert (stage.recorder.made, stage.recorder.repeated) == (1, 14 - SAME - 3)
    assert all(ordered(events) == ordered(stage.steps[0]) for events in stage.steps)


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_group_that_lies_elsewhere_is_made_as_usual_and_so_are_those_after_it(
    stage: GroupedStage, group: int
) -> None:
    """With the multipliers that the recording made; after some steps of this kind it is dropped,
    and another one is made.
    """
    held: list[Tensor] = []
    for seed in range(SAME + 1):
        stage.check(seed)
    before, (launched,) = stage.recorder.repeated, stage.recorder._recordings.values()
    added: list[int] = []
    add = launched.add
    launched.add = lambda part=0: added.append(part) or add(part)

    def block(place: int) -> None:
        if place == group:
            held.extend(stage.arena.empty(each // 4) for each in (1024, 512, 4096, 256))
        if place == 3:
            held.clear()

    stage.after_group = block
    for seed in range(recorder.MOST_MISSES):
        stage.check(seed + 20)
    assert added == [*range(group + 1)] * recorder.MOST_MISSES
    assert stage.recorder.repeated == before
    assert not stage.recorder._recordings
    for seed in range(3):
        stage.check(seed + 40)
    assert stage.recorder.on
    assert stage.recorder.made == 2


@pytest.mark.parametrize(
    ("way", "place"),
    [
        ("wrong", 1),
        *(("wrong", i) for i in (3, 4, 5, 6)),
        *(("failing", i) for i in (1, 2, 3, 4, 5, 6)),
    ],
)
def test_a_recording_that_is_wrong_or_fails_in_any_part_is_never_used(
    stage: GroupedStage, way: str, place: int
) -> None:
    setattr(stage, way, place)
    for seed in range(SAME + 1):
        stage.check(seed)
    assert stage.recorded == (max(place, GRAPHS_BEFORE_SUMS + 1) if way == "wrong" else place)
    assert not stage.recorder.on
    assert (stage.recorder.made, stage.recorder.repeated) == (0, 0)
    assert ("another sum" if way == "wrong" else "cannot be recorded") in str(
        stage.recorder.problem
    )


def test_a_group_that_moves_while_it_is_recorded_is_made_as_usual(stage: GroupedStage) -> None:
    held: list[Tensor] = []
    for seed in range(SAME):
        stage.check(seed)
    stage.after_group = lambda place: (
        held.append(stage.arena.empty(256)) if place == 1 else held.clear()
    )
    stage.check(SAME)
    assert (stage.recorded, stage.recorder.made) == (GRAPHS_BEFORE_SUMS + 2, 0)
    stage.after_group = lambda place: None
    for seed in range(SAME + 2):
        stage.check(seed)
    assert stage.recorder.on
    assert stage.recorder.made == 1


@pytest.mark.parametrize(
    ("clip", "size", "share", "groups"),
    [
        (CLIP, 2900, 1.0, 4),
        (CLIP, 3000, 1.0, 1),
        (CLIP, 2900, 20.0, 1),
        (PerLayerClip(0.2), 0, 0.0, 1),
        (QuantileClip(0.3), 0, 0.0, 1),
    ],
    ids=["flat", "small sums", "small reports", "per layer", "quantile"],
)
def test_sums_are_grouped_only_where_that_is_simple_and_pays(
    stage: GroupedStage,
    clip: Clip,
    size: int,
    share: float,
    groups: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouped_sums, "GROUPED_BYTES", size)
    monkeypatch.setattr(grouped_sums, "GROUPED_SHARE", share)
    for seed in range(SAME + 2):
        stage.check(seed, clip)
    assert stage.recorder.repeated == 2
    assert len(stage.groups) == groups


def test_groups_follow_the_last_use_and_have_about_the_same_size(stage: GroupedStage) -> None:
    for seed in range(SAME + 1):
        stage.check(seed)
    params = stage.engine.sums.params
    sizes = [sum(params[name].nbytes for name in names) for names in stage.groups]
    largest = max(p.nbytes for p in params.values())
    assert all(abs(size - sum(sizes) / 4) <= largest for size in sizes)
    assert {name for name in params if "blocks" in name and params[name].dim() < 2} <= set(
        stage.groups[0]
    )  # they share a launch
    weights = [name for names in stage.groups for name in names if params[name].dim() > 1]
    blocks = [f"blocks.{i}.1.weight" for i in (5, 4, 3, 2, 1, 0)]
    assert weights == [
        "head.weight",
        "twice.weight",
        *blocks,
        "into.weight",
    ]  # the second use of `twice` is reported last


class Optional(Model):
    """A layer may be left out."""

    whole = True

    def forward(self, x: Tensor) -> Tensor:
        if self.whole:
            return super().forward(x)
        return self.head(torch.tanh(self.into(x)).mean(1))


def test_parameters_that_a_step_does_not_use_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = GroupedStage(monkeypatch, model := Optional())
    for seed in range(4 * SAME + 4):
        model.whole = seed % 2 == 0
        stage.check(seed)
    assert (stage.recorder.made, stage.recorder.repeated) == (2, 2 * SAME + 4)
    assert not stage.taken(1, CLIP, None)["blocks.0.1.weight"].any()


def test_a_step_without_reports_sums_nothing(stage: GroupedStage) -> None:
    for clip in (CLIP, QuantileClip(0.3)):
        found = recorder.ReportedStep(
            stage.recorder, recorder.Request(clip, None, torch.zeros(3))
        ).finish()
        assert found.bound == clip.bound
        assert list(found.value) == [*stage.engine.sums.params, *clip.coordinates]
        assert not any(bool(t.any()) for t in found.value.values())


def test_parts_of_joined_gradients_are_those_of_their_parameters() -> None:
    torch.manual_seed(0)
    grads, names = torch.randn(3, 5, 4), ["a", "b", "c"]
    block = _Block(names, grads)
    assert block.of({"a", "b", "c", "d"}) is block
    assert block.of({"d"}) is None
    mine = block.of({"a", "c"})
    assert (mine.names, mine.grads.tolist()) == (["a", "c"], grads[[0, 2]].tolist())
    params = {"a": torch.zeros(4), "b": torch.zeros(2, 3), "c": torch.zeros(())}
    small = _Small(
        names, [torch.Size((4,)), torch.Size((2, 3)), torch.Size(())], torch.randn(5, 11)
    )
    assert small.of(params) is small
    assert small.of(()) is None
    weights = torch.rand(5)
    whole, parts = (
        small.weighted_sum(weights, params),
        [small.of(each).weighted_sum(weights, params) for each in ("b", ("a", "c"))],
    )
    for name, value in (parts[0] | parts[1]).items():
        torch.testing.assert_close(value, whole[name])


def test_a_layout_cuts_its_memory_into_pieces_of_one_dtype() -> None:
    params = {
        "a": torch.zeros(10),
        "b": torch.zeros(30),
        "c": torch.zeros(5, dtype=torch.float64),
        "d": torch.zeros(3),
    }
    for most, pieces in (
        (math.inf, [["a", "b", "d"], ["c"]]),
        (130, [["a"], ["b"], ["d"], ["c"]]),
        (1, [["a"], ["b"], ["d"], ["c"]]),
    ):
        layout = BufferLayout(params, most=most)
        made, where = layout.buffers(7)
        assert [names for _, names, _ in layout.rows] == pieces
        assert list(made.places) == list(params)
        assert len(where) == 2 + len(pieces)
        assert made.scratch is not None
        assert made.scratch.numel() == 7
        for name, place in made.places.items():
            assert (place.shape, place.dtype) == (params[name].shape, params[name].dtype)
            place.fill_(ord(name))
        assert all(bool((place == ord(name)).all()) for name, place in made.places.items())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("into", [False, True])
def test_noise_is_the_same_whatever_pieces_the_sums_lie_in(device: str, into: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    params = {name: nn.Parameter(torch.empty(*shape, dtype=torch.bfloat16 if into else torch.float32, device=device))
              for name, shape in {"a": (37, 5), "b": (3,), "c": (700,), "d": (64, 9)}.items()}  # fmt: skip
    values = {
        name: torch.randn(p.shape, generator=generator).to(device) for name, p in params.items()
    }
    stream = NoiseStream(Identity(), 1.0, Randomness.for_tests(3), divisor=7, in_place=True)
    found = []
    for most in (math.inf, 2**10, 1):
        sums = dict(BufferLayout(params, most=most).buffers(0)[0].places)
        for name, value in values.items():
            sums[name].copy_(value)
        ends = rounded(sums, params)
        assert (ends is not None) is into
        released, _ = stream.release(
            Bounded(sums, Bound(1.0)), 5, {}, mock_permit(stream.event, 10), ends
        )
        found.append({name: t.float().cpu() for name, t in released.value.items()})
    for other in found[1:]:
        assert all(torch.equal(other[name], found[0][name]) for name in params)
