"""LSTM, GRU and RNN as rules of the fast engine: equal to the loop in float64, whatever the module
and the call look like.
"""

from __future__ import annotations

import copy
import gc
import math
import random
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from dpfy.gradients import kernels
from dpfy.gradients.clip import Clip, FlatClip, PerLayerClip
from dpfy.gradients.cuda_graphs import graphs
from dpfy.gradients.engine import Engine, per_user
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import LoopEngine
from dpfy.gradients.layers import recurrence_cuda, recurrent
from dpfy.gradients.layers.table import rule_for
from dpfy.gradients.model_report import inspect

sys.path.insert(0, str(Path(__file__).parent))
from compared import answer, distance

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
B, T, D, H = 4, 5, 3, 4


class Reader(nn.Module):
    """A recurrent layer between linear ones; the losses depend on outputs, last states, and first
    states where there are any.
    """

    def __init__(
        self,
        inner: nn.RNNBase,
        states: bool = False,
        pack: str = "",
        saved: bool = False,
        twice: bool = False,
    ) -> None:
        super().__init__()
        self.below, self.inner = nn.Linear(D, inner.input_size), inner
        self.state = nn.Linear(D, 1) if states else None
        self.pack, self.saved, self.twice = pack, saved, twice

    def first(self, x: Tensor) -> Any:
        """First states made from the input, of which the state's gradient depends on them."""
        if self.state is None:
            return None
        inner = self.inner
        count = inner.num_layers * (2 if inner.bidirectional else 1)
        each = torch.tanh(self.state(x[:, 0])).view(1, -1, 1)
        h = each * torch.linspace(
            -1, 1, inner.proj_size or inner.hidden_size, dtype=x.dtype, device=x.device
        )
        c = each * torch.linspace(1, -1, inner.hidden_size, dtype=x.dtype, device=x.device)
        h, c = (t.expand(count, -1, -1).contiguous() for t in (h, c))  # as cuDNN wants them
        return (h, c) if inner.mode == "LSTM" else h

    def read(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """[batch, step, width] outputs and last states, [batch, ...]."""
        given: Any = torch.tanh(self.below(x))
        if self.pack:
            given = pack_padded_sequence(
                given, lengths.cpu(), batch_first=True, enforce_sorted=self.pack == "sorted"
            )
        elif not self.inner.batch_first:
            given = given.transpose(0, 1)
        y, last = self.inner(given, self.first(x))
        if self.pack:
            y = pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])[0]
        elif not self.inner.batch_first:
            y = y.transpose(0, 1)
        return (y, *[t.transpose(0, 1) for t in (last if isinstance(last, tuple) else (last,))])

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        parts = (
            checkpoint(self.read, x, lengths, use_reentrant=False)
            if self.saved
            else self.read(x, lengths)
        )
        if self.twice:
            parts = (*parts, *self.read(x.flip(1), lengths))
        return torch.cat([t.flatten(1) for t in parts], 1)  # type: ignore[union-attr]


def losses_of(model: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    torch.manual_seed(7)
    y = model(x, lengths)
    return (
        torch.sin(y) * torch.linspace(0.5, 1.5, y.shape[1], dtype=y.dtype, device=y.device)
        + 0.1 * y.square()
    ).sum(1)


def gap_to_loop(
    model: nn.Module, given: tuple[Tensor, Tensor], clip: Clip | None = None, steps: int = 3
) -> float:
    engines: list[tuple[Engine, int]] = [(BookkeepingEngine(), steps), (LoopEngine(), 1)]
    return distance(
        *[
            answer(e, model, lambda: losses_of(model, *given), clip or FlatClip(0.3), n)
            for e, n in engines
        ]
    )


def batch(r: random.Random, device: str = "cpu", ordered: bool = False) -> tuple[Tensor, Tensor]:
    many, length = r.randint(2, 5), r.choice([1, 2, 3, 6])
    lengths = torch.tensor([length] + [r.randint(1, length) for _ in range(many - 1)])
    lengths = lengths.sort(descending=True)[0] if ordered else lengths[torch.randperm(many)]
    return torch.randn(many, length, D, dtype=torch.float64, device=device), lengths


def drawn(r: random.Random, kind: str, device: str = "cpu") -> tuple[Reader, tuple[Tensor, Tensor]]:
    options: dict[str, Any] = {
        "num_layers": r.randint(1, 3),
        "bidirectional": r.random() < 0.4,
        "bias": r.random() < 0.8,
    }
    options["batch_first"] = r.random() < 0.5
    if kind == "LSTM" and r.random() < 0.3:
        options["proj_size"] = r.randint(1, 3)
    if kind == "RNN":
        options["nonlinearity"] = r.choice(["tanh", "relu"])
    pack = r.choice(["", "", "sorted", "unsorted"])
    if not pack and options["num_layers"] > 1 and device == "cpu":
        options["dropout"] = r.choice([0.0, 0.4])
    inner = getattr(nn, kind)(r.randint(1, 4), H, **options)
    model = (
        Reader(inner, r.random() < 0.5, pack, saved=r.random() < 0.2, twice=r.random() < 0.2)
        .to(device)
        .double()
    )
    if r.random() < 0.2:
        r.choice(list(inner.parameters())).requires_grad_(False)
    return model, batch(r, device, ordered=pack == "sorted")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_equal_to_the_loop(kind: str, seed: int, device: str) -> None:
    r = random.Random(f"{kind} {seed}")
    torch.manual_seed(seed)
    model, given = drawn(r, kind, device)
    assert rule_for(model.inner) is not None
    clip = r.choice([FlatClip(0.3), FlatClip(math.inf), PerLayerClip(0.5)])
    assert gap_to_loop(model, given, clip) < 1e-9


@pytest.mark.parametrize("pack", ["", "unsorted"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_every_parameter_is_explained(kind: str, pack: str) -> None:
    """Nothing goes the way of uses that no rule explains."""
    model = Reader(getattr(nn, kind)(D, H, 2, bidirectional=True), pack=pack).double()
    given = torch.randn(4, T, D, dtype=torch.float64), torch.tensor([2, T, 1, 4])
    engine = BookkeepingEngine()
    engine.attach(model)
    engine.bounded_sum(losses_of(model, *given), FlatClip(1.0))
    assert not engine.sums.untracked
    assert not engine._without_batch
    assert engine.sums.steady
    engine.detach()
    assert "forward" not in vars(model.inner)


class Imitation:
    """cuDNN as far as it is called, on a CPU: weights are read from their common memory, and the
    way back overwrites what was kept.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[Any, ...]] = []

    def flat(self, weights: list[Tensor], *how: Any) -> Tensor:
        return torch.cat([w.flatten() for w in weights])

    def forward(
        self,
        x: Tensor,
        weights: Any,
        count: int,
        memory: Tensor,
        h: Tensor,
        c: Tensor | None,
        *call: Any,
    ) -> Any:
        mode, width, sizes = call[0], call[1], call[8]
        assert x.is_contiguous()
        assert h.shape[0] == 1
        parts = list(memory.split([w.numel() for w in weights]))
        flat = [part.view(w.shape) for part, w in zip(parts, weights, strict=True)]
        with torch.enable_grad():
            given = [x.clone().requires_grad_(), h.clone().requires_grad_()]
            if c is not None:
                given.append(c.clone().requires_grad_())
            first = tuple(given[1:]) if c is not None else given[1]
            run = {
                0: torch._VF.rnn_relu,
                1: torch._VF.rnn_tanh,
                2: torch._VF.lstm,
                3: torch._VF.gru,
            }[mode]
            if sizes:
                made = run(given[0], torch.tensor(sizes), first, flat, True, 1, 0.0, True, False)
            else:
                made = run(given[0], first, flat, True, 1, 0.0, True, False, False)
        self.kept.append((given, made))
        assert made[1].shape[2] == width
        out = [t.detach() for t in made] + ([x.new_empty(0)] if c is None else [])
        return (*out, torch.tensor([float(len(self.kept) - 1)]), memory)

    def backward(
        self,
        x: Tensor,
        weights: Any,
        count: int,
        memory: Tensor,
        h: Tensor,
        c: Tensor | None,
        *rest: Any,
    ) -> Any:
        _, *grads = rest[:4]
        reserve = rest[14]
        given, made = self.kept[int(reserve)]
        reserve.fill_(math.nan)
        assert given[0].shape == x.shape
        pairs = [(t, g) for t, g in zip(made, grads, strict=False) if g is not None]
        found = torch.autograd.grad(
            [t for t, _ in pairs], given, [g for _, g in pairs], retain_graph=True
        )
        return (*found, *[x.new_empty(0)] * (3 - len(found)), [])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_what_cudnn_is_asked_for(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheme by which gradients of the gates are had from cuDNN, with an imitation in its
    place.
    """
    imitation, used = Imitation(), []
    monkeypatch.setattr(recurrence_cuda, "_flat", imitation.flat)
    monkeypatch.setattr(
        recurrence_cuda, "_forward", lambda *args: used.append(1) or imitation.forward(*args)
    )
    monkeypatch.setattr(recurrence_cuda, "_backward", imitation.backward)
    monkeypatch.setattr(recurrent, "cudnn_usable", lambda gates, weights: weights.project is None)
    r = random.Random(f"cudnn {kind} {seed}")
    torch.manual_seed(seed)
    model, given = drawn(r, kind)
    assert gap_to_loop(model, given) < 1e-9
    assert used or model.inner.proj_size


def imitated_lstm(given: Tensor, hidden: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """torch's fused cell, which only CUDA has: the activated gates are kept."""
    i, f, g, o = (given + hidden).chunk(4, 1)
    work = torch.cat([i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()], 1)
    i, f, g, o = work.chunk(4, 1)
    cell = f * c + i * g
    return o * cell.tanh(), cell, work


def imitated_lstm_back(
    dh: Tensor | None, dc: Tensor | None, c: Tensor, cell: Tensor, work: Tensor, bias: bool
) -> tuple[Any, ...]:
    assert not bias
    i, f, g, o = work.chunk(4, 1)
    dh = torch.zeros_like(c) if dh is None else dh
    inner = dh * o * (1 - cell.tanh().square()) + (0 if dc is None else dc)
    gates = [
        inner * g * i * (1 - i),
        inner * c * f * (1 - f),
        inner * i * (1 - g.square()),
        dh * cell.tanh() * o * (1 - o),
    ]
    return torch.cat(gates, 1), inner * f, None


def imitated_gru(
    given: Tensor, hidden: Tensor, h: Tensor, *biases: Tensor
) -> tuple[Tensor, Tensor]:
    given, hidden = (
        t + bias for t, bias in zip((given, hidden), biases or (0.0, 0.0), strict=True)
    )
    (ar, az, an), (br, bz, bn) = given.chunk(3, 1), hidden.chunk(3, 1)
    r, z = (ar + br).sigmoid(), (az + bz).sigmoid()
    n = (an + r * bn).tanh()
    return n + z * (h - n), torch.cat([r, z, n, h, bn], 1)


def imitated_gru_back(dh: Tensor, work: Tensor, bias: bool) -> tuple[Any, ...]:
    assert not bias
    r, z, n, h, inner = work.chunk(5, 1)
    dz, dn = dh * (h - n) * (1 - z) * z, dh * (1 - z) * (1 - n * n)
    dr = dn * inner * (1 - r) * r
    return torch.cat([dr, dz, dn], 1), torch.cat([dr, dz, dn * r], 1), dh * z, None, None


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_what_fused_cells_are_asked_for(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    usable = recurrence_cuda.cells_usable

    def serves(kind: str, gates: Tensor, weights: Any, steps: Any) -> bool:
        assert not usable(kind, gates, weights, steps)  # not on a CPU
        used.append(weights.project is None and steps.sizes is None)
        return used[-1]

    for name in ("lstm", "lstm_back", "gru", "gru_back"):
        monkeypatch.setattr(recurrence_cuda, f"_{name}", globals()[f"imitated_{name}"])
    monkeypatch.setattr(recurrent, "cells_usable", serves)
    r = random.Random(f"cells {kind} {seed}")
    torch.manual_seed(seed)
    model, given = drawn(r, kind)
    assert gap_to_loop(model, given) < 1e-9
    assert used


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_fused_cells_equal_the_loop(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own cells."""
    monkeypatch.setattr(recurrence_cuda, "LARGE", 0)
    monkeypatch.setattr(graphs, "TOGETHER", 1 + seed % 3)
    monkeypatch.setattr(graphs, "USUALLY", seed % 2)
    r = random.Random(f"cells {kind} {seed}")
    torch.manual_seed(seed)
    model, given = drawn(r, kind, "cuda")
    assert gap_to_loop(model, given, r.choice([FlatClip(0.3), PerLayerClip(0.5)])) < 1e-9


KINDS: dict[str, Callable[[], nn.RNNBase]] = {
    "lstm": lambda: nn.LSTM(D, H, 2, batch_first=True),
    "gru": lambda: nn.GRU(D, H, 2, batch_first=True, bidirectional=True),
    "rnn": lambda: nn.RNN(D, H, batch_first=True),
    "projected": lambda: nn.LSTM(D, H, 2, batch_first=True, proj_size=2),
}


class Around(nn.Module):
    """Whatever `use` does with the recurrent layer and what lies below it."""

    def __init__(self, kind: str, use: Callable[[nn.RNNBase, Tensor], Tensor]) -> None:
        super().__init__()
        self.below, self.inner, self.use = nn.Linear(D, D), KINDS[kind](), use

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.use(self.inner, torch.tanh(self.below(x))).flatten(1)


ONE = torch.linspace(-1, 1, T * D, dtype=torch.float64).view(1, T, D)


def states(last: Any) -> Tensor:
    """[batch, ...] of the last states."""
    return (
        torch.cat([t.to(last[0].dtype) for t in last], 2).transpose(0, 1)
        if isinstance(last, tuple)
        else last.transpose(0, 1)
    )


def decoded(inner: nn.RNNBase, h: Tensor) -> Tensor:
    """Step by step, each from the states that the one before it left."""
    last, out = None, []
    for t in range(h.shape[1]):
        y, last = inner(h[:, t : t + 1], last)
        out.append(y)
    return torch.cat(out, 1)


USES: dict[str, Callable[[nn.RNNBase, Tensor], Tensor]] = {
    "last output": lambda inner, h: inner(h)[0][:, -1],
    "last states alone": lambda inner, h: states(inner(h)[1]),
    "outputs changed in place": lambda inner, h: inner(h)[0].mul_(2.0),
    "states changed in place": lambda inner, h: states(inner(h)[1]).relu_(),
    "several sequences an example": lambda inner, h: inner(h.repeat_interleave(3, 0))[0].reshape(
        len(h), -1
    ),
    "one sequence at a time": lambda inner, h: torch.stack([inner(each)[0] for each in h]),
    "without a batch": lambda inner, h: h.mean((1, 2))[:, None, None] * inner(ONE.to(h))[0],
    "without a batch, checkpointed": lambda inner, h: (
        h.mean((1, 2))[:, None, None]
        * checkpoint(lambda t: inner(t)[0], ONE.to(h), use_reentrant=False)  # type: ignore[operator]
    ),
    "step by step": decoded,
    "twice": lambda inner, h: inner(h)[0] + 0.5 * inner(h.flip(1))[0].square(),
    "in another order in memory": lambda inner, h: inner(
        h.movedim(0, -1).contiguous().movedim(-1, 0)
    )[0],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_done_with_it(kind: str, use: str, device: str) -> None:
    if device == "cuda" and use == "outputs changed in place":
        pytest.skip("torch forbids it there")
    torch.manual_seed(0)
    model = Around(kind, USES[use]).double().to(device)
    for many in (T, 3):  # as many examples as steps, and fewer
        given = torch.randn(many, T, D, dtype=torch.float64, device=device), torch.empty(0)
        assert gap_to_loop(model, given) < 1e-9


def test_a_weight_of_two_layers() -> None:
    torch.manual_seed(0)
    model = Around("lstm", lambda inner, h: inner(h)[0]).double()
    other = copy.deepcopy(model.inner)
    other.weight_hh_l0, other.weight_hh_l1 = model.inner.weight_hh_l0, model.inner.weight_hh_l0
    model.other = other
    model.use = lambda inner, h: other(inner(h)[0][..., :D])[0]
    assert rule_for(other) is not None
    assert gap_to_loop(model, (torch.randn(B, T, D, dtype=torch.float64), torch.empty(0))) < 1e-9


def test_weights_that_are_computed_have_no_rule() -> None:
    torch.manual_seed(0)
    model = Around("gru", lambda inner, h: inner(h)[0]).double()
    weight_norm(model.inner, "weight_hh_l0")
    assert rule_for(model.inner) is None
    assert gap_to_loop(model, (torch.randn(B, T, D, dtype=torch.float64), torch.empty(0))) < 1e-9


def test_users_with_several_sequences() -> None:
    torch.manual_seed(0)
    model = Around("lstm", lambda inner, h: inner(h)[0][:, -1]).double()
    x, real = torch.randn(B * 3, T, D, dtype=torch.float64), torch.tensor([[True, True, False]] * B)
    engines: list[Engine] = [BookkeepingEngine(), LoopEngine()]
    found = [
        answer(e, model, lambda: per_user(model(x, x).square().sum(1), real), FlatClip(0.2), 2)
        for e in engines
    ]
    assert distance(*found) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
def test_an_example_that_is_not_finite_spoils_nobody(kind: str, bad: float) -> None:
    torch.manual_seed(0)
    model = Around(kind, lambda inner, h: inner(h)[0])
    model.below = nn.Identity()
    x = torch.randn(B, T, D, dtype=torch.float64)
    x[1, 2] = bad
    assert gap_to_loop(model.double(), (x, torch.empty(0))) < 1e-9


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "autocast"])
def test_outputs_are_those_of_the_module(kind: str, dtype: Any, device: str) -> None:
    if device == "cuda" and kind == "projected" and dtype != torch.float32:
        pytest.skip("not every cuDNN has narrow projections")
    torch.manual_seed(0)
    inner, x = KINDS[kind]().to(device), torch.randn(B, T, D, device=device)
    narrow = dtype == "autocast"
    if not narrow:
        inner, x = inner.to(dtype), x.to(dtype)
    engine = BookkeepingEngine()
    with torch.autocast(device, dtype=torch.bfloat16, enabled=narrow):
        expected, end = inner(x)
        engine.attach(inner)
        found, last = inner(x)
    total = engine.bounded_sum(found.float().square().sum((1, 2)), FlatClip(1.0)).value
    engine.detach()
    assert type(last) is type(end)
    if (
        narrow and device == "cuda"
    ):  # where torch's own runs in float16, whatever the type that was asked for
        assert found.dtype == torch.bfloat16
        expected, end = (
            expected.to(found.dtype),
            tuple(t.to(found.dtype) for t in end) if isinstance(end, tuple) else end,
        )
        last = (
            tuple(t.to(found.dtype) for t in last)
            if isinstance(last, tuple)
            else last.to(end.dtype)
        )
    assert found.dtype == expected.dtype
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    most = 1e-5 if dtype == torch.float32 else 0.02
    assert torch.allclose(found, expected, rtol=0, atol=most)
    assert torch.allclose(states(last), states(end), rtol=0, atol=most)
    assert {t.dtype for t in total.values()} == {torch.float32}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_example_adds_at_most_the_bound(kind: str, dtype: torch.dtype, device: str) -> None:
    """Output gradients that nearly cancel over the steps, a million clip norms long; every example
    alone, and one more among many alike.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    inner = KINDS[kind]().to(device, dtype)
    x = torch.randn(1, 1, D).expand(64, 8, D).to(device, dtype)
    push = (
        torch.randn(
            64, 8, (inner.proj_size or H) * (2 if inner.bidirectional else 1), device=device
        ).to(dtype)
        * 1e6
    )
    push[:, 1::2] = -push[:, ::2] * (1 - 1e-3)
    push[32:] = push[:1] * 1e-4
    engine = BookkeepingEngine()
    engine.attach(inner)
    try:

        def made(mask: Tensor) -> Tensor:
            total = engine.bounded_sum(
                (inner(x)[0] * push).float().sum((1, 2)), FlatClip(1.0), mask.to(device)
            ).value
            return torch.cat([t.flatten() for t in total.values()]).double()

        for i in range(0, 64, 9):
            assert float(made(torch.arange(64) == i).norm()) <= 1.0
        assert (
            float((made(torch.arange(64) >= 32) - made(torch.arange(64) >= 33)).norm())
            <= 1.0 + 1e-4
        )
    finally:
        engine.detach()


def test_nothing_is_left_behind() -> None:
    """No cycle keeps the tensors of a step, and the module is as it was."""
    model, given = Reader(nn.LSTM(D, H, 2), states=True).double(), batch(random.Random(3))
    names, engine = list(model.state_dict()), BookkeepingEngine()
    engine.attach(model)
    kept: list[weakref.ref[Tensor]] = []
    model.inner.register_forward_hook(lambda module, args, out: kept.append(weakref.ref(out[0])))
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            engine.bounded_sum(losses_of(model, *given), FlatClip(1.0))
        assert all(ref() is None for ref in kept)
    finally:
        gc.enable()
    model.inner.flatten_parameters()
    with torch.no_grad():
        assert not losses_of(model, *given).requires_grad
    engine.detach()
    assert names == list(model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_what_torch_refuses_is_refused(kind: str) -> None:
    inner = KINDS[kind]()
    engine = BookkeepingEngine()
    engine.attach(inner)
    with pytest.raises(RuntimeError, match="input"):
        inner(torch.randn(B, T, D + 1))
    h = torch.zeros(1, 1, 1)
    with pytest.raises(RuntimeError, match="hidden"):
        inner(torch.randn(B, T, D), (h, h) if inner.mode == "LSTM" else h)
    with pytest.raises(ValueError, match="dtype"):
        inner(torch.randn(B, T, D).double())
    engine.detach()


def test_what_inspection_says() -> None:
    model = Around("lstm", lambda inner, h: inner(h)[0] + inner(h.flip(1))[0])
    found = inspect(model, (torch.randn(B, T, D), torch.empty(0))).layers
    view = next(view for view in found if view.kind == "LSTM")
    assert view.positions == 2 * T
    assert view.plain == 3.0 * 2 * T * sum(
        p.numel() for p in KINDS["lstm"]().parameters() if p.dim() > 1
    )
    assert "split" not in view.route


def test_kernels_count_far_steps_without_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps before examples in memory, the last step of an example may be farther away than a
    kernel can count.
    """
    t = torch.randn(8, 4, 16).transpose(0, 1)
    assert kernels.aligned(t) is t
    monkeypatch.setattr(kernels, "REACH", 8 * 4 * 16)
    assert torch.equal(kernels.aligned(t), t)
    assert kernels.aligned(t).is_contiguous()


@pytest.mark.parametrize("name", ["weight_ih_l1", "weight_hh_l0"])
@pytest.mark.parametrize("kind", ["lstm", "gru", "projected"])
def test_a_weight_that_changes_before_the_way_back_is_noticed(kind: str, name: str) -> None:
    inner = KINDS[kind]()
    engine = BookkeepingEngine()
    engine.attach(inner)
    losses = inner(torch.randn(B, T, D))[0].square().sum((1, 2))
    with torch.no_grad():
        getattr(inner, name).add_(1.0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        engine.bounded_sum(losses, FlatClip(1.0))
    engine.detach()


class OwnCell(nn.LSTMCell):
    """A subclass that runs the very forward of its base."""


class Decoder(nn.Module):
    """A cell, step by step."""

    def __init__(self, cell: Any, start: bool) -> None:
        super().__init__()
        self.below, self.cell, self.start = nn.Linear(D, cell.input_size), cell, start

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        state: Any = None
        if self.start:
            h = x[:, 0, :1].expand(-1, H).contiguous()
            state = (h, 0.5 * h) if isinstance(self.cell, nn.LSTMCell) else h
        for t in range(x.shape[1]):
            state = self.cell(torch.tanh(self.below(x[:, t])), state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, OwnCell])
def test_cells(kind: Any, bias: bool, start: bool, device: str) -> None:
    torch.manual_seed(0)
    model = Decoder(kind(3, H, bias=bias), start).double().to(device)
    assert rule_for(model.cell) is not None
    for length in (1, T):
        given = torch.randn(B, length, D, dtype=torch.float64, device=device), torch.empty(0)
        assert gap_to_loop(model, given) < 1e-9
    engine = BookkeepingEngine()
    engine.attach(model)
    engine.bounded_sum(losses_of(model, *given), FlatClip(1.0))
    assert not engine.sums.untracked
    with pytest.raises(RuntimeError, match="input"):
        model.cell(torch.randn(B, D + 1, dtype=torch.float64, device=device))
    engine.detach()
