"""When a recording serves and when it does not, without a GPU: graphs are stood in for by a list of
operations that is run again.

Reports come from a real model, but in memory that stays where it is, as a GPU's allocator would
give it out again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpfy.gradients.autograd.tape import LayerReport
from dpfy.gradients.clip import Clip, FlatClip, PerLayerClip, QuantileClip
from dpfy.gradients.cuda_graphs import captured, graphs, recorder
from dpfy.gradients.cuda_graphs.recorded_step import _tensors, _unowned
from dpfy.gradients.cuda_graphs.recorder import SAME, Recorder
from dpfy.gradients.engines import bounded_sum
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.joined import BufferLayout, Buffers, Deferred, SumJob
from dpfy.gradients.per_example.outer import Direct
from dpfy.gradients.per_example.shared import MeasuredContribution


class Model(nn.Module):
    """Layers with several positions and with one, normalisation, a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.twice, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.twice(torch.tanh(self.twice(x))).mean(1))


class Operations(TorchDispatchMode):
    """Runs operations and remembers them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.made.append((func, args, kwargs or {}, made))
        return made


class FakeGraph:
    """Runs remembered operations again, into the tensors that they made first."""

    def __init__(self, operations: Operations, spoilt: bool) -> None:
        self.operations, self.spoilt = operations, spoilt

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, made in self.operations.made:
            again = func(*args, **kwargs)
            for old, new in zip(_flat(made), _flat(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        last = _flat(self.operations.made[-1][3])[0]
        if self.spoilt and last.is_floating_point():
            last.mul_(1.1)


def _flat(made: Any) -> list[Tensor]:
    return [
        t for t in (made if isinstance(made, tuple | list) else [made]) if isinstance(t, Tensor)
    ]


class Stage:
    """An engine whose reports always lie at the same places, in as many sets of places as asked
    for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: nn.Module | None = None) -> None:
        self.spoilt = self.broken = False
        torch.manual_seed(0)
        self.model, self.engine = model or Model(), BookkeepingEngine()
        self.engine.attach(self.model)
        for seed in range(2):
            self.usual(seed, FlatClip(1.0), None)
        assert self.engine.sums.steady
        self.recorder = Recorder(self.engine.sums)
        self.places: dict[object, list[LayerReport]] = {}
        self.made_buffers: dict[object, Any] = {}
        monkeypatch.setattr(graphs, "private_pool", nullcontext)
        monkeypatch.setattr(graphs, "release_private_pool", lambda: None)
        monkeypatch.setattr(self.recorder, "pool", self)
        monkeypatch.setattr(
            recorder.Request, "key", lambda request, sums: (request.clip, request.mask is None)
        )
        monkeypatch.setattr(
            BufferLayout, "buffers", lambda layout, scratch: self.buffers(layout, scratch)
        )
        self.where: object = None

    def record(
        self, work: Callable[[], Any], device: torch.device, addresses: int
    ) -> tuple[FakeGraph, Any]:
        if self.broken:
            raise RuntimeError("cannot be recorded")
        with Operations() as operations:
            made = work()
        return FakeGraph(operations, self.spoilt), made

    def clear(self) -> None:
        pass

    def like(self, t: Tensor) -> Tensor:
        return torch.empty_like(t)

    def buffers(self, layout: BufferLayout, scratch: int) -> Any:
        key = (self.where, scratch, tuple(layout.order))
        if key not in self.made_buffers:
            params = self.engine.sums.params
            places = {
                name: torch.empty(params[name].shape if name in params else ())
                for name in layout.order
            }
            more = torch.empty(scratch, dtype=torch.uint8)
            self.made_buffers[key] = (
                Buffers(places, more),
                (scratch, *[t.data_ptr() for t in places.values()]),
            )
        return self.made_buffers[key]

    def losses(self, seed: int, rows: int = 6, bad: float = 1.0) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        x, y = torch.randn(rows, 5, 4, generator=g), torch.randint(0, 11, (rows,), generator=g)
        factors = torch.tensor([bad if i == 2 else 1.0 for i in range(rows)])
        return F.cross_entropy(self.model(x), y, reduction="none") * factors

    def usual(self, seed: int, clip: Clip, mask: Tensor | None, **how: Any) -> dict[str, Tensor]:
        return {
            n: t.clone()
            for n, t in self.engine.bounded_sum(self.losses(seed, **how), clip, mask).value.items()
        }

    def taken(
        self, seed: int, clip: Clip, mask: Tensor | None, where: object = 0, **how: Any
    ) -> dict[str, Tensor]:
        """The bounded sum by way of the recorder, with every report at its place in the set
        `where`.
        """
        self.where = where
        losses = self.losses(seed, **how)
        reports: list[LayerReport] = []
        self.engine.sums.report(losses, reports.append)
        held = self.places.setdefault((where, len(losses)), [])
        with torch.no_grad():
            step = recorder.ReportedStep(self.recorder, recorder.Request(clip, mask, losses))
            for i, report in enumerate(reports):
                if i == len(held):
                    held.append(
                        LayerReport(
                            report.site,
                            report.grad.clone(),
                            tuple(t.clone() for t in report.saved),
                            report.explain,
                        )
                    )
                for mine, new in zip(
                    (held[i].grad, *held[i].saved), (report.grad, *report.saved), strict=True
                ):
                    mine.copy_(new)
                step.receive(held[i])
            return {n: t.clone() for n, t in step.finish().value.items()}

    def check(
        self,
        seed: int,
        clip: Clip = FlatClip(0.1),  # noqa: B008
        mask: Tensor | None = None,
        **how: Any,
    ) -> None:
        """The taken sum is the usual one."""
        found = self.taken(seed, clip, mask, **how)
        how.pop("where", None)
        for name, value in self.usual(seed, clip, mask, **how).items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


@pytest.mark.parametrize(
    "clip", [FlatClip(0.1), PerLayerClip(0.2), QuantileClip(0.3)], ids=lambda c: type(c).__name__
)
@pytest.mark.parametrize("section", [1, 4, 12, 100])
def test_repeated_steps_give_the_usual_sums(
    stage: Stage, clip: Clip, section: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "SECTION", section)
    for seed in range(SAME + 5):
        stage.check(seed, clip)
    assert (stage.recorder.made, stage.recorder.repeated) == (1, 5)
    for seed in range(SAME + 5):
        stage.check(seed, clip, torch.arange(6) % 2 == seed % 2)
    assert (stage.recorder.made, stage.recorder.repeated) == (2, 10)


class Products(nn.Module):
    """Layers whose contributions are views of what they report: only the last steps of the work
    compute anything.
    """

    def __init__(self) -> None:
        super().__init__()
        sizes = [(4, 8), (8, 8), (8, 11)]
        self.layers = nn.Sequential(*[nn.Linear(*size, bias=False) for size in sizes])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(1)


def test_sections_that_compute_nothing_are_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Contribution, "waits", property(lambda part: True)
    )  # as with kernels, norms are taken at the end
    launched: list[FakeGraph] = []
    replay = FakeGraph.replay
    monkeypatch.setattr(FakeGraph, "replay", lambda graph: launched.append(graph) or replay(graph))
    for model, nothing in ((Products(), True), (Model(), False)):
        stage = Stage(monkeypatch, model)
        for seed in range(SAME + 4):
            stage.check(seed)
        assert (stage.recorder.made, stage.recorder.repeated) == (1, 4)
        (recording,) = stage.recorder._recordings.values()
        assert all(section.idle for section in recording.sections) is nothing
        for section in recording.sections:
            assert launched.count(section.graph) == (0 if section.idle else 4)
        launched.clear()


def test_weights_of_the_losses_are_ones_whoever_wrote_into_them() -> None:
    made, losses = Recorder(bounded_sum.BoundedSum({})), torch.zeros(5)
    ones = made._weights(losses)
    assert torch.equal(ones, torch.ones(5))
    assert made._weights(losses + 1) is ones
    assert made._weights(torch.zeros(5, dtype=torch.float64)).dtype is torch.float64
    assert made._weights(torch.zeros(7)).shape == (7,)
    made._weights(losses).mul_(3)
    assert torch.equal(made._weights(losses), torch.ones(5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_example_is_left_out_whenever_it_comes(stage: Stage, bad: float) -> None:
    for seed in range(16):
        stage.check(seed, bad=bad if seed in (0, SAME, SAME + 3, 12) else 1.0)
    assert stage.recorder.on
    assert stage.recorder.repeated >= 9


def test_tensors_that_move_are_noticed(stage: Stage) -> None:
    for seed in range(40):
        stage.check(seed, where=seed % 3)
    assert (stage.recorder.made, stage.recorder.repeated) == (3, 40 - 3 * SAME)
    for seed in range(6):
        stage.check(seed, where=f"new {seed}")
    assert stage.recorder.made == 3


def test_a_part_that_moves_makes_the_rest_usual(stage: Stage) -> None:
    """The first section lies where it lay, a later tensor does not: nothing of the recording may be
    taken for it.
    """
    for seed in range(SAME + 2):
        stage.check(seed)
    held = stage.places[(0, 6)]
    for place in (len(held) - 1, len(held) - 4, len(held) - 1):
        report = held[place]
        held[place] = LayerReport(report.site, report.grad.clone(), report.saved, report.explain)
        for seed in range(4):
            stage.check(seed + place)
    assert stage.recorder.on


def test_other_batch_sizes_and_clips_have_recordings_of_their_own(stage: Stage) -> None:
    for seed in range(24):
        stage.check(seed, FlatClip(0.1 if seed % 2 else 2.0), rows=6 if seed % 4 < 2 else 9)
    assert stage.recorder.made == 4


def test_a_fact_that_changes_is_noticed(stage: Stage) -> None:
    for seed in range(SAME + 2):
        stage.check(seed)
    before = stage.recorder.repeated
    held = stage.places[(0, 6)]
    held[3] = LayerReport(held[3].site, held[3].grad, held[3].saved, held[3].explain, ("another",))
    stage.check(9)
    assert stage.recorder.repeated == before


def test_a_recording_that_gives_another_sum_is_never_used(stage: Stage) -> None:
    stage.spoilt = True
    for seed in range(SAME + 3):
        stage.check(seed)
    assert not stage.recorder.on
    assert stage.recorder.repeated == 0
    assert "another sum" in str(stage.recorder.problem)


def test_work_that_cannot_be_recorded_is_done_as_usual(stage: Stage) -> None:
    for seed in range(SAME):
        stage.check(seed)
    stage.broken = True
    for seed in range(3):
        stage.check(seed)
    assert not stage.recorder.on
    assert "cannot be recorded" in str(stage.recorder.problem)


def test_a_loop_that_never_repeats_is_not_watched_for_ever(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MOST_WATCHED", 7)
    for seed in range(7):
        stage.check(seed, where=seed)
    assert not stage.recorder.on
    assert stage.recorder.problem is None


def test_recordings_make_room_for_others(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_RECORDINGS", 2)
    for turn in range(8):
        for seed in range(SAME + 3):
            stage.check(seed, where=turn % 4)
    assert len(stage.recorder._recordings) == 2
    assert stage.recorder.repeated > 3


def test_recordings_take_turns_in_the_memory_of_what_they_keep(stage: Stage) -> None:
    for where in range(3):
        for seed in range(SAME + 3):
            stage.taken(seed, FlatClip(0.1), None, where)
    assert len(stage.recorder._recordings) == 3
    for recording in stage.recorder._recordings.values():
        own = [
            part
            for section in recording.sections
            for mine in section.own
            if mine
            for _, part in mine
        ]
        kept = {
            id(t)
            for section in recording.sections
            for *_, made in section.graph.operations.made
            for t in _flat(made)
        }
        assert own
        assert all(id(t) not in kept for part in own for t in _tensors(part))
    before = stage.usual(9, FlatClip(0.1), None)
    for where in (2, 0, 1):
        found = stage.taken(9, FlatClip(0.1), None, where)
        assert all(
            torch.allclose(found[name], before[name], rtol=1e-5, atol=1e-7) for name in before
        )


def test_sums_that_go_elsewhere_are_noticed(stage: Stage) -> None:
    for seed in range(SAME + 2):
        stage.check(seed)
    old = stage.made_buffers  # kept alive, so that the next room lies elsewhere
    for seed in range(4):
        stage.made_buffers = {}
        stage.check(seed + 20)
        old = old | {("turn", seed): stage.made_buffers}
    assert stage.recorder.repeated == 2


@pytest.mark.parametrize("clip", [FlatClip(0.1), QuantileClip(0.3)], ids=lambda c: type(c).__name__)
def test_a_captured_step_runs_forward_and_backward_too(
    stage: Stage, clip: Clip, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same graphs for multipliers and sums, with a step in them that begins at the batch."""
    monkeypatch.setattr(graphs, "GraphPool", lambda apart: stage)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def losses_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(stage.model(x), y, reduction="none")

    def batch(seed: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(seed)
        return torch.randn(6, 5, 4, generator=g), torch.randint(0, 11, (6,), generator=g)

    mask = torch.arange(6) != 4
    step = captured._CapturedStep(stage.engine.sums, losses_of, batch(0), clip, mask)
    for seed in range(4):
        with torch.no_grad():
            stage.model.head.weight.add_(0.01 * seed)
        found = step.run(batch(seed), mask := ~mask)
        assert found is not None
        assert found.bound == clip.bound
        found = {name: value.clone() for name, value in found.value.items()}
        for name, value in stage.engine.bounded_sum(
            losses_of(*batch(seed)), clip, mask
        ).value.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)
    x, y = batch(9)
    x[1] = float("nan")
    assert step.run((x, y), mask) is None


def test_contributions_without_memory_of_their_own_are_the_same_contributions() -> None:
    job = SumJob(None, torch.randn(2, 2, 3, 4), 1)
    pair = [("a", Deferred(job, 0, torch.Size((4,)))), ("b", Deferred(job, 1, torch.Size((4,))))]
    held = [
        pair,
        None,
        [("c", MeasuredContribution(torch.rand(1, 3), Direct(torch.randn(3, 5, 6)[:, 1:4, ::2])))],
    ]
    made = _unowned(held, {})
    assert made[1] is None
    (_, a), (_, b) = made[0]
    assert a.job is b.job  # sums of one launch stay together
    assert a.job is not job
    assert a.job.block.data_ptr() == job.block.data_ptr()
    found, wanted = made[2][0][1], held[2][0][1]
    assert torch.equal(found.rest.grads, wanted.rest.grads)
    assert torch.equal(found.measured()[0], wanted.measured()[0])
    wanted.rest.grads.zero_()
    assert not found.rest.grads.any()
    assert _unowned(torch.zeros(0, 3), {}).shape == (0, 3)
