"""The engine's part of a step, recorded as CUDA graphs, gives the sums that it gives without:
whatever moves, changes or breaks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfy.gradients.clip import Clip, FlatClip, PerLayerClip, QuantileClip
from dpfy.gradients.cuda_graphs import grouped_sums
from dpfy.gradients.cuda_graphs.recorded_step import HeldReports
from dpfy.gradients.cuda_graphs.recorder import SAME, Recorder, ReportedStep
from dpfy.gradients.engines import bounded_sum
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = SAME + 18


class Images(nn.Module):
    """Convolutions with and without bias, GroupNorm, a head with one position."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.second, self.short = (
            nn.Conv2d(16, 32, 3, 2, 1, bias=False),
            nn.Conv2d(16, 32, 1, 2, bias=False),
        )
        self.hidden, self.head = nn.Linear(32, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.first(x)))
        h = F.relu(self.second(h) + self.short(h)).mean((2, 3))
        return self.head(F.relu(self.hidden(h)))


class Tokens(nn.Module):
    """Embedding with a padding row, blocks with LayerNorm and RMSNorm, a head tied to the
    embedding.
    """

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(50, 32, padding_idx=0)
        self.norms = nn.ModuleList(
            [nn.LayerNorm(32) if i % 2 else nn.RMSNorm(32) for i in range(depth)]
        )
        self.ups = nn.ModuleList([nn.Linear(32, 64) for _ in range(depth)])
        self.downs = nn.ModuleList([nn.Linear(64, 32) for _ in range(depth)])
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.token.weight

    def forward(self, index: Tensor) -> Tensor:
        x = self.token(index)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return self.head(x)


def images(model: nn.Module, seed: int, rows: int = 24) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    p = next(model.parameters())
    x = torch.randn(rows, 1, 10, 10, generator=g).to(p)
    return F.cross_entropy(
        model(x).float(), torch.randint(0, 5, (rows,), generator=g).cuda(), reduction="none"
    ), x


def tokens(model: nn.Module, seed: int, rows: int = 16, length: int = 12) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    index = torch.randint(0, 50, (rows, length), generator=g).cuda()
    losses = F.cross_entropy(
        model(index).float().flatten(0, 1), index.roll(1, 1).flatten(), reduction="none"
    )
    return losses.view(rows, length).mean(1), index


MODELS: dict[str, tuple[type[nn.Module], Callable[..., tuple[Tensor, Tensor]]]] = {
    "images": (Images, images),
    "tokens": (Tokens, tokens),
}


def engines(
    model: nn.Module,
) -> tuple[
    BookkeepingEngine, Callable[[Callable[[], Tensor], Clip, Tensor | None], dict[str, Tensor]]
]:
    """An engine that records, attached; and what an engine that never does gives for the same
    losses.
    """
    engine = BookkeepingEngine()
    engine.attach(model)

    def usual(losses: Callable[[], Tensor], clip: Clip, mask: Tensor | None) -> dict[str, Tensor]:
        mine, engine._recorder = engine._recorder, Recorder(engine.sums)
        engine._recorder.on = False
        try:
            return engine.bounded_sum(losses(), clip, mask).value
        finally:
            engine._recorder = mine

    return engine, usual


def same(
    found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> None:
    assert list(found) == list(expected)
    rtol, atol = (2e-2, 2e-3) if dtype == torch.bfloat16 else (1e-4, 1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol)


Walk = tuple[list[dict[str, Tensor]], Recorder]


def walk(
    kind: str,
    clip: Clip,
    dtype: torch.dtype,
    record: bool,
    change: Callable[[Tensor, int], Tensor] | None = None,
) -> Walk:
    """The sums of some steps while weights, data and masks change, on the CPU; `change` may spoil
    the losses of a step.
    """
    gc.collect()  # what is freed while the steps run moves their tensors
    torch.manual_seed(0)
    make, losses = MODELS[kind]
    model, engine = make().cuda().to(dtype), BookkeepingEngine()
    engine.attach(model)
    engine._recorder.on = record
    rows, sums = 24 if kind == "images" else 16, []
    for seed in range(2 * STEPS):
        mask = None if seed < STEPS else torch.arange(rows, device="cuda") % 3 > seed % 2
        each = losses(model, seed)[0]
        each = each if change is None else change(each, seed)
        sums.append(
            {name: t.cpu() for name, t in engine.bounded_sum(each, clip, mask).value.items()}
        )
        del (
            each,
            mask,
        )  # what is held while the next step runs would make every second step lie elsewhere
        moves = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01 * torch.randn(p.shape, generator=moves).to(p))
    return sums, engine._recorder


def compare(
    kind: str, clip: Clip, dtype: torch.dtype, change: Callable[[Tensor, int], Tensor] | None = None
) -> Recorder:
    """Walk twice, with and without recordings: the sums are the same and finite."""
    recorded_sums, recorder = walk(kind, clip, dtype, True, change)
    usual_sums, _ = walk(kind, clip, dtype, False, change)
    for found, expected in zip(recorded_sums, usual_sums, strict=True):
        same(found, expected, dtype)
        assert all(bool(value.isfinite().all()) for value in found.values())
    assert recorder.on, recorder.problem
    return recorder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "clip", [FlatClip(0.1), PerLayerClip(0.2), QuantileClip(0.3)], ids=lambda c: type(c).__name__
)
@pytest.mark.parametrize("kind", MODELS)
def test_recorded_steps_give_the_usual_sums(kind: str, clip: Clip, dtype: torch.dtype) -> None:
    assert compare(kind, clip, dtype).repeated > SAME


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_example_adds_nothing_and_spoils_nobody(kind: str, bad: float) -> None:
    def spoil(losses: Tensor, seed: int) -> Tensor:
        factors = [bad if seed % 4 == 3 and i == 5 else 1.0 for i in range(len(losses))]
        return losses * torch.tensor(factors, device="cuda")

    assert compare(kind, FlatClip(0.1), torch.float32, spoil).repeated >= SAME


def test_sums_of_earlier_steps_stay_as_they_were() -> None:
    model = Images().cuda()
    engine, _ = engines(model)
    sums = [
        engine.bounded_sum(images(model, seed)[0], FlatClip(0.1)).value for seed in range(STEPS)
    ]
    copies = [{name: value.clone() for name, value in each.items()} for each in sums]
    for seed in range(STEPS):
        engine.bounded_sum(images(model, seed + 100)[0], FlatClip(0.1))
    for one, copy in zip(sums, copies, strict=True):
        for name in one:
            assert torch.equal(one[name], copy[name])


def test_other_shapes_clips_places_and_frozen_parameters_are_noticed() -> None:
    torch.manual_seed(0)
    model = Tokens().cuda()
    engine, usual = engines(model)
    held: list[Tensor] = []
    for seed in range(60):
        rows, length, clip = (
            (16, 8, 11)[seed // 7 % 3],
            (12, 7)[seed // 14 % 2],
            FlatClip(0.1 if seed % 28 < 25 else 3.0),
        )
        if seed % 5 == 0:
            held.append(
                torch.empty(1000 * (seed + 1), device="cuda")
            )  # moves what is allocated after it
        if seed == 40:
            model.ups[0].weight.data = model.ups[0].weight.data.clone()
        losses = lambda s=seed, r=rows, n=length: tokens(model, s, r, n)[0]  # noqa: E731
        same(engine.bounded_sum(losses(), clip).value, usual(losses, clip, None))
    assert engine._recorder.repeated > 5


def test_a_use_that_appears_later_is_refused_as_usual() -> None:
    model = Images().cuda()
    engine, _ = engines(model)
    for seed in range(STEPS):
        engine.bounded_sum(images(model, seed)[0], FlatClip(0.1))
    with pytest.raises(Exception, match="a use outside of its layer"):
        engine.bounded_sum(images(model, 0)[0] + model.hidden.weight.sum(), FlatClip(0.1))


def test_a_layer_left_out_of_a_step_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model = Tokens().cuda()
    engine, usual = engines(model)
    whole = list(zip(model.norms, model.ups, model.downs, strict=True))
    for seed in range(4 * STEPS):
        keep = whole if seed % 3 else whole[:-1]
        model.norms, model.ups, model.downs = (
            nn.ModuleList(each) for each in zip(*keep, strict=True)
        )
        losses = lambda s=seed: tokens(model, s)[0]  # noqa: E731
        same(engine.bounded_sum(losses(), FlatClip(0.1)).value, usual(losses, FlatClip(0.1), None))
    assert engine._recorder.repeated


def test_where_recording_fails_the_work_is_done_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    torch.cuda.empty_cache()  # what other tests left makes tensors lie elsewhere at every step
    model = Images().cuda()
    engine, usual = engines(model)
    weigh = bounded_sum.weigh

    def broken(*args: object) -> object:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("no")
        return weigh(*args)

    monkeypatch.setattr(bounded_sum, "weigh", broken)
    for seed in range(4 * STEPS):
        found = engine.bounded_sum(images(model, seed)[0], FlatClip(0.1)).value
        same(found, usual(lambda s=seed: images(model, s)[0], FlatClip(0.1), None))
        del found  # held while the next step runs, it would move that
    assert not engine._recorder.on


class Layers(nn.Module):
    """Reports and sums are most of the memory of a step."""

    def __init__(self, depth: int = 12, width: int = 1024) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(depth)])
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


def layers(model: nn.Module, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 128, 1024, generator=g).to(next(model.parameters()))
    return model(x).float().square().mean((1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MODELS)
def test_sums_in_groups_are_the_usual_sums(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_sums, "GROUPED_BYTES", 0)
    monkeypatch.setattr(grouped_sums, "GROUPED_SHARE", 0.0)
    recorder = compare(kind, FlatClip(0.1), dtype)
    assert recorder.repeated > SAME
    assert all(len(recording.end) > 1 for recording in recorder._recordings.values())


@pytest.mark.parametrize("kind", MODELS)
def test_a_bad_example_is_left_out_of_all_groups(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_sums, "GROUPED_BYTES", 0)
    monkeypatch.setattr(grouped_sums, "GROUPED_SHARE", 0.0)
    test_a_bad_example_adds_nothing_and_spoils_nobody(kind, float("nan"))


def test_sums_in_groups_need_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the end of the backward pass on, the peak of a repeated step is lower by most of the
    sums.
    """
    monkeypatch.setattr(grouped_sums, "GROUPED_BYTES", 0)
    peaks, sums = {}, 0
    finish = ReportedStep.finish

    def measured(step: ReportedStep) -> object:
        torch.cuda.reset_peak_memory_stats()
        return finish(step)

    monkeypatch.setattr(ReportedStep, "finish", measured)
    for groups in (1, 4):
        gc.collect()
        monkeypatch.setattr(grouped_sums, "GROUPS", groups)
        torch.manual_seed(0)
        model = Layers().cuda().bfloat16()
        engine, _ = engines(model)
        for seed in range(STEPS):
            engine.bounded_sum(layers(model, seed), FlatClip(0.1))
        recorder, before = engine._recorder, torch.cuda.memory_allocated()
        repeated = recorder.repeated
        total = engine.bounded_sum(layers(model, 100), FlatClip(0.1)).value
        peaks[groups] = torch.cuda.max_memory_allocated() - before
        assert recorder.repeated == repeated + 1, recorder.problem
        assert [len(recording.end) for recording in recorder._recordings.values()] == [
            groups
        ] * recorder.made
        sums = sum(t.nbytes for t in total.values())
        engine.detach()
        del total, model, engine, recorder
    assert peaks[1] - peaks[4] > 0.5 * sums, (peaks, sums)


@pytest.mark.parametrize("group", [0, 2])
def test_a_group_that_lies_elsewhere_is_made_as_usual(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something takes the memory that the next group had."""
    monkeypatch.setattr(grouped_sums, "GROUPED_BYTES", 0)
    torch.manual_seed(0)
    model = Layers(4).cuda()
    engine, usual = engines(model)
    recorder, release = engine._recorder, HeldReports.release
    held: list[Tensor] = []
    done: list[tuple[str, ...]] = []
    moves = False

    def released(reports: HeldReports, names: tuple[str, ...]) -> None:
        release(reports, names)
        done.append(names)
        if moves and len(done) == group + 1:
            held.extend(torch.empty(2**19, device="cuda") for _ in range(256))

    monkeypatch.setattr(HeldReports, "release", released)
    for seed in range(STEPS):
        moves, before = seed in (STEPS - 8, STEPS - 4), recorder.repeated
        done.clear()
        found = engine.bounded_sum(layers(model, seed), FlatClip(0.1)).value
        assert len(done) in (0, 4)  # none while it is measured where examples lie
        assert not moves or recorder.repeated == before > 0
        held.clear()
        same(found, usual(lambda s=seed: layers(model, s), FlatClip(0.1), None))
        del found
    assert recorder.on, recorder.problem


def test_what_cannot_be_recorded_leaves_no_tensors_of_the_step_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = Layers(4).cuda()
    engine, _ = engines(model)

    def broken(*args: object, **how: object) -> object:
        raise RuntimeError("no")

    monkeypatch.setattr(engine._recorder.pool, "record", broken)
    before = 0
    for seed in range(STEPS):
        if not engine._recorder.on:
            break
        before = torch.cuda.memory_allocated()
        engine.bounded_sum(layers(model, seed), FlatClip(0.1))
    assert not engine._recorder.on
    assert torch.cuda.memory_allocated() <= before + 2**20
