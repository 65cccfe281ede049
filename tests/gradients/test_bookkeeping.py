"""Shared parameters, uses no layer explains, layouts of the batch, checkpointing: the book-keeping
engine against the loop.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from dpfy.core.errors import DpfyError
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engine import Grads
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.bounded_sum import BoundedSum
from dpfy.gradients.engines.loop import LoopEngine
from dpfy.gradients.per_example.clipped_sum import ClippedSum
from dpfy.gradients.per_example.outer import Direct

V, D, T = 11, 6, 5


class Model(nn.Module):
    """Runs `body`, a function of the module and its input, over parameters given by name."""

    def __init__(
        self,
        body: Callable[[nn.Module, Tensor], Tensor],
        parts: dict[str, nn.Module | nn.Parameter],
    ) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def tied_head(m: nn.Module, i: Tensor) -> Tensor:
    h = torch.tanh(m.mix(m.emb(i)))
    return m.head(h).mean(1)


def tied_functional(m: nn.Module, i: Tensor) -> Tensor:
    return F.linear(torch.tanh(m.mix(m.emb(i))), m.emb.weight).mean(1)


def twice(m: nn.Module, i: Tensor) -> Tensor:
    return m.mix(torch.tanh(m.mix(m.emb(i)))).mean(1)


def positions_unbatched(m: nn.Module, i: Tensor) -> Tensor:
    return m.mix(m.emb(i) + m.pos(torch.arange(T))).mean(1)


def positions_of_few_rows(m: nn.Module, i: Tensor) -> Tensor:
    return m.mix(m.emb(i)).mean(1) + m.pos(torch.arange(3 * T) % 4).tanh().sum(0)


def class_token(m: nn.Module, i: Tensor) -> Tensor:
    h = torch.cat([m.token.expand(len(i), -1, -1), m.emb(i)], 1) + m.places
    return m.mix(h)[:, 0]


def folded(m: nn.Module, i: Tensor) -> Tensor:
    return m.mix(m.emb(i).reshape(-1, D)).view(len(i), T, D).tanh().mean(1)


def second(m: nn.Module, i: Tensor) -> Tensor:
    return m.mix(m.emb(i).transpose(0, 1).contiguous()).tanh().mean(0)


def folded_by_position(m: nn.Module, i: Tensor) -> Tensor:
    return m.mix(m.emb(i).transpose(0, 1).reshape(-1, D)).view(T, len(i), D).tanh().mean(0)


def unbatched_layer(m: nn.Module, i: Tensor) -> Tensor:
    """A layer that runs on a constant: its output gradient mixes all examples."""
    return m.emb(i).mean(1) * m.mix(torch.ones(1, D, dtype=torch.float64))


def frames(m: nn.Module, i: Tensor) -> Tensor:
    h = m.emb(i).reshape(-1, 1, D)
    return m.conv(h).tanh().view(len(i), T, -1).mean(1)


def checkpointed(m: nn.Module, i: Tensor) -> Tensor:
    h = m.emb(i)
    for _ in range(2):
        h = checkpoint(lambda t: torch.tanh(m.norm(m.mix(t))), h, use_reentrant=False)
    return h.mean(1)


def in_place(m: nn.Module, i: Tensor) -> Tensor:
    h = m.mix(m.emb(i))
    h += 1
    return h.relu_().mean(1)


def scaled(m: nn.Module, i: Tensor) -> Tensor:
    """A scalar parameter (no dimension at all), used before and behind a layer."""
    return m.gain * m.mix(torch.tanh(m.gain * m.emb(i))).mean(1)


def part(*names: str) -> dict[str, nn.Module | nn.Parameter]:
    made: dict[str, nn.Module | nn.Parameter] = {
        "emb": nn.Embedding(V, D),
        "mix": nn.Linear(D, D),
        "head": nn.Linear(D, V, bias=False),
        "pos": nn.Embedding(T, D),
        "norm": nn.LayerNorm(D),
        "conv": nn.Conv1d(1, 3, 3),
        "token": nn.Parameter(torch.randn(1, 1, D)),
        "places": nn.Parameter(torch.randn(1, T + 1, D)),
        "gain": nn.Parameter(torch.tensor(1.5)),
    }
    if "head" in names:
        made["head"].weight = made["emb"].weight  # type: ignore[union-attr]
    return {name: made[name] for name in names}


CASES = {
    "tied head": (tied_head, ("emb", "mix", "head")),
    "tied by function": (tied_functional, ("emb", "mix")),
    "used twice": (twice, ("emb", "mix")),
    "positions without a batch": (positions_unbatched, ("emb", "mix", "pos")),
    "positions of few rows": (positions_of_few_rows, ("emb", "mix", "pos")),
    "class token": (class_token, ("emb", "mix", "token", "places")),
    "folded by example": (folded, ("emb", "mix")),
    "second dimension": (second, ("emb", "mix")),
    "folded by position": (folded_by_position, ("emb", "mix")),
    "layer on a constant": (unbatched_layer, ("emb", "mix")),
    "frames folded": (frames, ("emb", "conv")),
    "checkpointing": (checkpointed, ("emb", "mix", "norm")),
    "in place": (in_place, ("emb", "mix")),
    "a scalar": (scaled, ("emb", "mix", "gain")),
}


def build(case: str, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    body, names = CASES[case]
    return Model(body, part(*names)).double()


def losses_of(model: nn.Module, i: Tensor) -> Tensor:
    y = model(i)
    return (
        torch.sin(3 * y) + y.square() * torch.linspace(0.5, 1.5, y.shape[1], dtype=torch.float64)
    ).sum(1)


def answers(
    model: nn.Module, batches: list[Tensor], clip: FlatClip
) -> tuple[list[Grads], list[Grads]]:
    twin = copy.deepcopy(model)
    loop, fast = LoopEngine(), BookkeepingEngine()
    loop.attach(twin)
    fast.attach(model)
    expected = [loop.bounded_sum(losses_of(twin, i), clip).value for i in batches]
    found = [fast.bounded_sum(losses_of(model, i), clip).value for i in batches]
    loop.detach()
    fast.detach()
    return expected, found


def distance(a: Grads, b: Grads) -> float:
    assert list(a) == list(b)
    gap = math.sqrt(sum(float((a[k] - b[k]).square().sum()) for k in a))
    return gap / max(math.sqrt(sum(float(b[k].square().sum()) for k in b)), 1e-300)


@pytest.mark.parametrize("batch", [1, 3, T, T + 1])
@pytest.mark.parametrize("case", CASES)
def test_equals_loop(case: str, batch: int) -> None:
    """`batch == T` is the trap: positions and examples then have the same shape, and only measuring
    tells them apart.
    """
    model = build(case)
    batches = [torch.randint(0, V, (size, T)) for size in (batch, batch, 4, batch)]
    for clip in (FlatClip(math.inf), FlatClip(0.5)):
        expected, found = answers(model, batches, clip)
        for e, f in zip(expected, found, strict=True):
            assert distance(f, e) < 1e-9


@pytest.mark.parametrize("wrap", ["weight_norm", "orthogonal"])
def test_parametrized_weights_are_not_missed(wrap: str) -> None:
    torch.manual_seed(0)
    layer = getattr(parametrizations, wrap)(nn.Linear(D, D))
    model = Model(
        lambda m, i: m.mix(m.emb(i)).mean(1), {"emb": nn.Embedding(V, D), "mix": layer}
    ).double()
    expected, found = answers(model, [torch.randint(0, V, (4, T))] * 2, FlatClip(0.5))
    assert any("parametrizations" in name for name in expected[0])
    assert all(float(g.abs().sum()) > 0 for g in expected[0].values())
    assert distance(found[1], expected[1]) < 1e-9


def test_subclass_with_its_own_forward_is_not_mistaken_for_its_base() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.square(), self.bias)

    torch.manual_seed(0)
    model = Model(
        lambda m, i: m.mix(m.emb(i)).mean(1), {"emb": nn.Embedding(V, D), "mix": Odd(D, D)}
    ).double()
    expected, found = answers(model, [torch.randint(0, V, (4, T))] * 2, FlatClip(0.5))
    assert distance(found[1], expected[1]) < 1e-9


def test_layer_reached_only_later_is_measured_then() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.a, self.b, self.use_b = (
                nn.Embedding(V, D),
                nn.Linear(D, D),
                nn.Linear(D, D),
                False,
            )

        def forward(self, i: Tensor) -> Tensor:
            h = self.a(self.emb(i))
            return (
                (self.b(h.transpose(0, 1).contiguous()).transpose(0, 1) if self.use_b else h)
                .tanh()
                .mean(1)
            )

    torch.manual_seed(0)
    model = Sometimes().double()
    twin = copy.deepcopy(model)
    fast, loop = BookkeepingEngine(), LoopEngine()
    fast.attach(model)
    loop.attach(twin)
    for step in range(4):
        model.use_b = twin.use_b = step >= 2
        i = torch.randint(0, V, (T, T))
        found = fast.bounded_sum(losses_of(model, i), FlatClip(0.5)).value
        assert distance(found, loop.bounded_sum(losses_of(twin, i), FlatClip(0.5)).value) < 1e-9
    fast.detach()
    loop.detach()


def test_mixing_examples_is_noticed_by_the_measured_layout() -> None:
    """With examples mixed, no row of a gradient belongs to one example: the slow exact route runs,
    and equals the loop.
    """
    model = Model(
        lambda m, i: m.mix(m.emb(i) - m.emb(i).mean(0, keepdim=True)).mean(1), part("emb", "mix")
    ).double()
    expected, found = answers(model, [torch.randint(0, V, (4, T))] * 2, FlatClip(0.5))
    assert distance(found[0], expected[0]) < 1e-9
    assert distance(found[1], expected[1]) < 1e-9


def test_plain_backward_on_an_attached_model_is_refused() -> None:
    model = build("used twice")
    engine = BookkeepingEngine()
    engine.attach(model)
    with pytest.raises(DpfyError, match="hand the losses to the engine"):
        losses_of(model, torch.randint(0, V, (3, T))).sum().backward()
    engine.detach()


def test_copy_of_an_attached_model_is_a_plain_model() -> None:
    model = build("tied head")
    engine = BookkeepingEngine()
    engine.attach(model)
    twin = copy.deepcopy(model)
    losses_of(twin, torch.randint(0, V, (3, T))).sum().backward()
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in twin.parameters())
    engine.detach()


def test_zero_gradients_on_the_first_batch_settle_nothing_wrong() -> None:
    """A zero head gives zero gradients below it at first: no layout can be measured, and none may
    be guessed.
    """
    model = build("second dimension")
    with torch.no_grad():
        model.mix.weight.zero_()  # type: ignore[union-attr, operator]
    i = torch.randint(0, V, (T, T))
    fast, loop = BookkeepingEngine(), LoopEngine()
    fast.attach(model)
    for _ in range(3):
        twin = copy.deepcopy(model)
        loop.attach(twin)
        found = fast.bounded_sum(losses_of(model, i), FlatClip(0.5)).value
        assert distance(found, loop.bounded_sum(losses_of(twin, i), FlatClip(0.5)).value) < 1e-9
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= 0.1 * found[name]
    fast.detach()


def test_autocast_keeps_the_bound_and_the_answer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))
    x, y = torch.randn(6, D), torch.randint(0, 4, (6,))
    engine, loop = BookkeepingEngine(), LoopEngine()
    found = {}
    for one in (engine, loop):
        one.attach(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = F.cross_entropy(model(x), y, reduction="none")
        found[one.name] = one.bounded_sum(losses, FlatClip(0.1)).value
        one.detach()
    assert distance(found["bookkeeping"], found["loop"]) < 2e-2
    assert all(g.dtype == torch.float32 for g in found["bookkeeping"].values())


@pytest.mark.parametrize("case", CASES)
def test_a_fresh_engine_gives_the_same_bits(case: str) -> None:
    """A resumed run attaches a new engine in the middle: what it measures again must not change a
    bit of the answer.
    """
    model = build(case)
    batches = [torch.randint(0, V, (size, T)) for size in (4, 6, 4)]
    old = BookkeepingEngine()
    old.attach(model)
    found = [old.bounded_sum(losses_of(model, i), FlatClip(0.5)).value for i in batches]
    old.detach()
    new = BookkeepingEngine()
    new.attach(model)
    again = new.bounded_sum(losses_of(model, batches[2]), FlatClip(0.5)).value
    new.detach()
    assert all(torch.equal(again[name], g) for name, g in found[2].items())


@pytest.mark.parametrize("order", ["attach then compile", "compile then attach"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model_gives_the_same_answer(backend: str, order: str) -> None:
    """Layers of different kinds share one entry point: a compiler must not bind it to one of
    them.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).double()
    x, y = torch.randn(6, D, dtype=torch.float64), torch.randint(0, 3, (6,))
    loop, fast = LoopEngine(), BookkeepingEngine()
    loop.attach(model)
    expected = loop.bounded_sum(F.cross_entropy(model(x), y, reduction="none"), FlatClip(0.3)).value
    loop.detach()
    torch._dynamo.reset()
    if order == "attach then compile":
        fast.attach(model)
        compiled = torch.compile(model, backend=backend)
    else:
        compiled = torch.compile(model, backend=backend)
        fast.attach(model)
    for _ in range(2):
        found = fast.bounded_sum(
            F.cross_entropy(compiled(x), y, reduction="none"), FlatClip(0.3)
        ).value
    fast.detach()
    torch._dynamo.reset()
    assert distance(found, expected) < 1e-9


def test_what_was_measured_is_let_go_before_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are joined to others for the sums must not be held beside them."""
    made: list[weakref.ref[object]] = []
    alive: list[int] = []
    add, sums = BoundedSum.add, ClippedSum.sums

    def noting(self: BoundedSum, name: str, part: object, parts: object) -> None:
        if isinstance(part, Direct):
            made.append(weakref.ref(part))
        add(self, name, part, parts)

    def looking(self: ClippedSum, *how: object) -> object:
        alive.append(sum(ref() is not None for ref in made))
        return sums(self, *how)

    monkeypatch.setattr(BoundedSum, "add", noting)
    monkeypatch.setattr(ClippedSum, "sums", looking)
    model, engine = (
        nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)),
        BookkeepingEngine(),
    )
    engine.attach(model)
    for _ in range(3):
        engine.bounded_sum(model(torch.randn(5, 6, 4)).square().mean((1, 2)), FlatClip(1.0))
    assert made
    assert alive == [0, 0, 0]


def test_a_layer_that_the_losses_do_not_reach_is_measured_once_they_do() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.pooler, self.head = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.used = False

        def forward(self, x: Tensor) -> Tensor:
            h = self.body(x)
            pooled = torch.tanh(self.pooler(h))
            return self.head(h + pooled if self.used else h)

    torch.manual_seed(0)
    model = Pooled().double()
    engine, loop = BookkeepingEngine(), LoopEngine()
    measured = []
    engine.attach(model)
    measure = engine._batch_axes
    engine._batch_axes = lambda *a: (measured.append(1), measure(*a))[1]  # type: ignore[method-assign]
    totals = []
    for step in range(8):
        model.used = step == 5
        x = torch.randn(7, 5, dtype=torch.float64)
        totals.append((x, model.used, engine.bounded_sum(model(x).square().sum(1), FlatClip(0.5))))
    engine.detach()
    assert len(measured) < 6  # at the first steps, and again at step 5
    loop.attach(model)
    for x, used, total in totals:
        model.used = used
        expected = loop.bounded_sum(model(x).square().sum(1), FlatClip(0.5)).value
        for name, value in expected.items():
            assert torch.allclose(total.value[name], value, atol=1e-12), name
    loop.detach()
