"""When a recording serves and when it does not, without a GPU: graphs are stood in for by a list of operations that is run again.

Reports come from a real model, but in memory that stays where it is, as a GPU's allocator would give it out again.
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
from torch.utils._pytree import tree_leaves

from dpfy.gradients import album, bookkeeping, graphs, recorded, recording, tape
from dpfy.gradients import room as room_of_sums
from dpfy.gradients.album import MOST_TURNS, SAME
from dpfy.gradients.bookkeeping import BookkeepingEngine
from dpfy.gradients.clip import Clip, FlatClip, PerLayerClip, QuantileClip
from dpfy.gradients.recorded import Recorder
from dpfy.gradients.room import Layout
from dpfy.gradients.tape import Report


class Model(nn.Module):
    """Layers with several positions and with one, normalisation, a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.twice, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(6)])

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
        self.fresh: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.made.append((func, args, kwargs or {}, made))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, Tensor)}
        self.fresh += [t for t in _flat(made) if t.untyped_storage().data_ptr() not in given and t.is_floating_point()]
        return made


class FakeGraph:
    """Runs remembered operations again, into the tensors that they made first. As in a pool that graphs share, this destroys what those
    of other recordings in it left."""

    def __init__(self, operations: Operations, spoilt: bool, take: object, pool: list[FakeGraph]) -> None:
        self.operations, self.spoilt, self.take, self.pool = operations, spoilt, take, pool
        pool.append(self)

    def replay(self) -> None:
        for other in self.pool:
            for t in other.operations.fresh if other.take is not self.take else ():
                t.fill_(float("nan"))
        for func, args, kwargs, made in self.operations.made:
            again = func(*args, **kwargs)
            for old, new in zip(_flat(made), _flat(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        last = _flat(self.operations.made[-1][3])[0]
        if self.spoilt and last.is_floating_point():
            last.mul_(1.1)


def _flat(made: Any) -> list[Tensor]:
    return [t for t in (made if isinstance(made, tuple | list) else [made]) if isinstance(t, Tensor)]


class Stage:
    """An engine whose reports always lie at the same places, in as many sets of places as asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: nn.Module | None = None) -> None:
        self.spoilt = self.broken = False
        torch.manual_seed(0)
        self.model, self.engine = model or Model(), BookkeepingEngine()
        self.engine.attach(self.model)
        for seed in range(2):
            self.usual(seed, FlatClip(1.0), None)
        assert self.engine.steady
        self.recorder = Recorder()
        self.places: dict[object, list[Report]] = {}
        self.pools: dict[int, list[FakeGraph]] = {}
        self.take = object()
        self.rooms: dict[object, Any] = {}
        self.monkeypatch = monkeypatch
        self.small(-1)
        monkeypatch.setattr(graphs, "apart", nullcontext)
        monkeypatch.setattr(graphs, "release_work", lambda: None)
        monkeypatch.setattr(self.recorder, "shelf", self)
        monkeypatch.setattr(recorded._Request, "key", lambda request, engine: (request.clip, request.mask is None))
        monkeypatch.setattr(Layout, "room", self.room)
        self.where: object = None

    def small(self, most: int) -> None:
        """Let tensors of up to `most` bytes be the small ones."""
        for module in (room_of_sums, recording, tape):
            self.monkeypatch.setattr(module, "SMALL", most)

    def record(self, work: Callable[[], Any], device: torch.device, addresses: int, pool: int) -> tuple[FakeGraph, Any]:
        if self.broken:
            raise RuntimeError("cannot be recorded")
        with Operations() as operations:
            made = work()
        return FakeGraph(operations, self.spoilt, self.take, self.pools.setdefault(pool, [])), made

    def like(self, *tensors: Tensor) -> list[Tensor]:
        return [torch.full_like(t, float("nan")) if t.is_floating_point() else torch.empty_like(t) for t in tensors]

    def room(self, scratch: int) -> Any:
        layout = next(iter(self.recorder._layouts.values()))
        key = (self.where, scratch, tuple(layout.order))
        if key not in self.rooms:
            memory = [torch.empty(pieces.total, dtype=dtype) for dtype, _, pieces in layout.rows]
            self.rooms[key] = layout.over(memory, torch.empty(scratch, dtype=torch.uint8))
        return self.rooms[key]

    def losses(self, seed: int, rows: int = 6, bad: float = 1.0) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        x, y = torch.randn(rows, 5, 4, generator=g), torch.randint(0, 11, (rows,), generator=g)
        factors = torch.tensor([bad if i == 2 else 1.0 for i in range(rows)])
        return F.cross_entropy(self.model(x), y, reduction="none") * factors

    def usual(self, seed: int, clip: Clip, mask: Tensor | None, **how: Any) -> dict[str, Tensor]:
        return {n: t.clone() for n, t in self.engine.bounded_sum(self.losses(seed, **how), clip, mask).value.items()}

    def taken(
        self, seed: int, clip: Clip, mask: Tensor | None, where: object = 0, shared: int = 0, **how: Any
    ) -> dict[str, Tensor]:
        """The bounded sum by way of the recorder, with every report at its place in the set `where`, but the first `shared` in one
        that all sets share."""
        self.where, self.take = where, object()
        losses = self.losses(seed, **how)
        reports: list[Report] = []
        self.engine.report(losses, reports.append)
        held, common = self.places.setdefault((where, len(losses)), []), self.places.setdefault(("common", len(losses)), [])
        with torch.no_grad():
            take = recorded._Take(self.recorder, self.engine, recorded._Request(clip, mask, losses))
            for i, report in enumerate(reports):
                if i == len(held) and i < min(shared, len(common)):
                    held.append(common[i])
                if i == len(held):
                    held.append(Report(report.site, report.grad.clone(), tuple(t.clone() for t in report.saved), report.explain))
                if i == len(common):
                    common.append(held[i])
                for mine, new in zip((held[i].grad, *held[i].saved), (report.grad, *report.saved), strict=True):
                    mine.copy_(new)
                take.receive(held[i])
            return {n: t.clone() for n, t in take.finish().value.items()}

    def check(self, seed: int, clip: Clip = FlatClip(0.1), mask: Tensor | None = None, **how: Any) -> None:  # noqa: B008
        """The taken sum is the usual one."""
        found = self.taken(seed, clip, mask, **how)
        how.pop("where", None)
        how.pop("shared", None)
        for name, value in self.usual(seed, clip, mask, **how).items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


@pytest.mark.parametrize("clip", [FlatClip(0.1), PerLayerClip(0.2), QuantileClip(0.3)], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("section", [1, 4, 12, 100])
def test_repeated_steps_give_the_usual_sums(stage: Stage, clip: Clip, section: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "SECTION", section)
    for seed in range(SAME + 5):
        stage.check(seed, clip)
    assert (stage.recorder.album.made, stage.recorder.album.repeated) == (1, 5)
    for seed in range(SAME + 5):
        stage.check(seed, clip, torch.arange(6) % 2 == seed % 2)
    assert (stage.recorder.album.made, stage.recorder.album.repeated) == (2, 10)


class Products(nn.Module):
    """Layers whose contributions are views of what they report: only the last steps of the work compute anything."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(4, 8), (8, 8), (8, 11)]
        self.layers = nn.Sequential(*[nn.Linear(*size, bias=False) for size in sizes])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(1)


def test_sections_that_compute_nothing_are_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookkeeping, "joins", lambda part: True)  # as with kernels, norms are taken at the end
    launched: list[FakeGraph] = []
    replay = FakeGraph.replay
    monkeypatch.setattr(FakeGraph, "replay", lambda graph: launched.append(graph) or replay(graph))
    for model, nothing in ((Products(), True), (Model(), False)):
        stage = Stage(monkeypatch, model)
        for seed in range(SAME + 4):
            stage.check(seed)
        assert (stage.recorder.album.made, stage.recorder.album.repeated) == (1, 4)
        ((recording,),) = stage.recorder.album.recordings.values()
        assert all(section.idle for section in recording.sections) is nothing
        for section in recording.sections:
            assert launched.count(section.graph) == (0 if section.idle else 4)
        launched.clear()


def test_weights_of_the_losses_are_ones_whoever_wrote_into_them() -> None:
    recorder, losses = Recorder(), torch.zeros(5)
    ones = recorder._weights(losses)
    assert torch.equal(ones, torch.ones(5))
    assert recorder._weights(losses + 1) is ones
    assert recorder._weights(torch.zeros(5, dtype=torch.float64)).dtype is torch.float64
    assert recorder._weights(torch.zeros(7)).shape == (7,)
    recorder._weights(losses).mul_(3)
    assert torch.equal(recorder._weights(losses), torch.ones(5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_example_is_left_out_whenever_it_comes(stage: Stage, bad: float) -> None:
    for seed in range(16):
        stage.check(seed, bad=bad if seed in (0, SAME, SAME + 3, 12) else 1.0)
    assert stage.recorder.on
    assert stage.recorder.album.repeated >= 9


def test_tensors_that_move_are_noticed(stage: Stage) -> None:
    for seed in range(40):
        stage.check(seed, where=seed % 3)
    assert (stage.recorder.album.made, stage.recorder.album.repeated) == (3, 40 - 3 * SAME)
    for seed in range(6):
        stage.check(seed, where=f"new {seed}")
    assert stage.recorder.album.made == 3


@pytest.mark.parametrize("clip", [FlatClip(0.1), PerLayerClip(0.2), QuantileClip(0.3)], ids=lambda c: type(c).__name__)
def test_small_tensors_that_move_at_every_step_are_copied_to_where_they_lay(stage: Stage, clip: Clip) -> None:
    """As in a loop that keeps the loss of every step: once nothing else has moved, their places do not count."""
    stage.small(2**20)
    for seed in range(SAME + 5):
        stage.check(seed, clip)
    assert not stage.recorder.album.rough
    assert (stage.recorder.album.made, stage.recorder.album.repeated) == (1, 5)
    stage.check(99, clip, where="elsewhere")
    assert stage.recorder.album.rough
    for seed in range(100, 120):
        stage.check(seed, clip, where=seed, bad=float("nan") if seed == 110 else 1.0)
    for seed in range(20):
        stage.check(seed, clip, torch.arange(6) % 2 == seed % 2, where=-seed)
    assert stage.recorder.album.made == 1 + 2
    assert stage.recorder.album.repeated == 5 + 40 - 1 - 2 * SAME
    assert stage.recorder.on


@pytest.mark.parametrize("moving", ["grad", "saved"])
def test_large_tensors_that_move_are_noticed_where_small_ones_may(stage: Stage, moving: str) -> None:
    stage.small(300)  # activations of several positions are larger, those of one are not
    for seed in range(SAME + 5):
        stage.check(seed, FlatClip(0.1))
    held, made, repeated = stage.places[(0, 6)], stage.recorder.album.made, stage.recorder.album.repeated
    assert not stage.recorder.album.rough
    stage.recorder.album.rough = True
    stage.recorder.album.clear()
    for seed in range(SAME + 5):
        for i, report in enumerate(held):
            moved = [t.clone() if t.nbytes <= 300 else t for t in report.tensors]
            held[i] = Report(report.site, moved[0], tuple(moved[1:]), report.explain)
        stage.check(seed, FlatClip(0.1))
    assert (stage.recorder.album.made, stage.recorder.album.repeated) == (made + 1, repeated + 5)
    assert {t.nbytes <= 300 for report in held for t in report.tensors} == {True, False}
    big = next(i for i, r in enumerate(held) if (r.grad if moving == "grad" else r.saved[0]).nbytes > 300)
    report = held[big]
    grad, saved = report.grad, report.saved
    moved = (grad.clone(), saved) if moving == "grad" else (grad, (saved[0].clone(), *saved[1:]))
    held[big] = Report(report.site, *moved, report.explain)
    stage.check(77, FlatClip(0.1))
    assert stage.recorder.album.repeated == repeated + 5


@pytest.mark.parametrize("order", ["01", "0011", "012", "0120"])
def test_steps_that_begin_alike_and_take_turns_have_recordings_of_their_own(
    stage: Stage, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of them it is shows only on the way: each is begun, in memory of its own, and nothing of the others is taken for it."""
    monkeypatch.setattr(recorded, "SECTION", 4)
    for seed in range(20 * len(order)):
        bad = float("nan") if seed % 11 == 7 else 1.0
        stage.check(seed, where=order[seed % len(order)], shared=4, bad=bad)
    found = stage.recorder.album
    kinds = len(set(order))
    assert found.made == kinds
    assert sorted(len(alike) for alike in found.recordings.values()) == [kinds]
    assert found.repeated >= 12 * len(order)
    assert stage.recorder.on


def test_only_so_many_recordings_begin_alike(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "SECTION", 4)
    for turn in range(MOST_TURNS + 3):
        for seed in range(SAME + 3):
            stage.check(seed, where=turn, shared=4)
    (alike,) = stage.recorder.album.recordings.values()
    assert len(alike) == MOST_TURNS
    assert len({recording.turn for recording in alike}) == MOST_TURNS


def test_a_part_that_moves_makes_the_rest_usual(stage: Stage) -> None:
    """The first section lies where it lay, a later tensor does not: nothing of the recording may be taken for it."""
    for seed in range(SAME + 2):
        stage.check(seed)
    held = stage.places[(0, 6)]
    for place in (len(held) - 1, len(held) - 4, len(held) - 1):
        report = held[place]
        held[place] = Report(report.site, report.grad.clone(), report.saved, report.explain)
        for seed in range(4):
            stage.check(seed + place)
    assert stage.recorder.on


def test_other_batch_sizes_and_clips_have_recordings_of_their_own(stage: Stage) -> None:
    for seed in range(24):
        stage.check(seed, FlatClip(0.1 if seed % 2 else 2.0), rows=6 if seed % 4 < 2 else 9)
    assert stage.recorder.album.made == 4


def test_a_fact_that_changes_is_noticed(stage: Stage) -> None:
    for seed in range(SAME + 2):
        stage.check(seed)
    before = stage.recorder.album.repeated
    held = stage.places[(0, 6)]
    held[3] = Report(held[3].site, held[3].grad, held[3].saved, held[3].explain, ("another",))
    stage.check(9)
    assert stage.recorder.album.repeated == before


def test_a_recording_that_gives_another_sum_is_never_used(stage: Stage) -> None:
    stage.spoilt = True
    for seed in range(SAME + 3):
        stage.check(seed)
    assert not stage.recorder.on
    assert stage.recorder.album.repeated == 0
    assert "another sum" in str(stage.recorder.problem)


def test_work_that_cannot_be_recorded_is_done_as_usual(stage: Stage) -> None:
    for seed in range(SAME):
        stage.check(seed)
    stage.broken = True
    for seed in range(3):
        stage.check(seed)
    assert not stage.recorder.on
    assert "cannot be recorded" in str(stage.recorder.problem)


def test_a_loop_that_never_repeats_is_not_watched_for_ever(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(album, "MOST_WATCHED", 7)
    for seed in range(7):
        stage.check(seed, where=seed)
    assert not stage.recorder.on
    assert stage.recorder.problem is None


def test_recordings_make_room_for_others(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(album, "MOST_RECORDINGS", 2)
    for turn in range(8):
        for seed in range(SAME + 3):
            stage.check(seed, where=turn % 4)
    assert sum(map(len, stage.recorder.album.recordings.values())) == 2
    assert stage.recorder.album.repeated > 3


def test_sums_that_go_elsewhere_are_noticed(stage: Stage) -> None:
    for seed in range(SAME + 2):
        stage.check(seed)
    old = stage.rooms  # kept alive, so that the next room lies elsewhere
    for seed in range(4):
        stage.rooms = {}
        stage.check(seed + 20)
        old = old | {("turn", seed): stage.rooms}
    assert stage.recorder.album.repeated == 2
