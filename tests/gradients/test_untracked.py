"""Uses of parameters that no layer row explains: position tables, scales, class tokens. Exact,
separate, and measured once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpfy.core.errors import Unsupported
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engine import Grads
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import LoopEngine
from dpfy.gradients.per_example.embedding import EmbeddingGradient
from dpfy.gradients.per_example.outer import Direct

T, C, V = 5, 4, 11


class Base(nn.Module):
    """Token embedding, something strange, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(V, C), nn.Linear(C, V)

    def strange(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, index: Tensor) -> Tensor:
        return self.head(torch.tanh(self.strange(self.token(index))))


class Positions(Base):
    """A table of positions, looked up once for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(T + 2, C)

    def strange(self, x: Tensor) -> Tensor:
        return x + self.position(torch.arange(T, device=x.device)[None])


class RepeatedPositions(Positions):
    """The same row of the table at several positions, without a first dimension, taken away instead
    of added, and scaled.
    """

    def strange(self, x: Tensor) -> Tensor:
        return torch.add(x, self.position(torch.arange(T, device=x.device) // 2), alpha=-0.7)


class Scale(Base):
    """A bare scale, as in RMSNorm of most language models, and a bare shift with a first dimension
    of one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = (
            nn.Parameter(torch.rand(C) + 0.5),
            nn.Parameter(torch.randn(1, T, 1)),
        )

    def strange(self, x: Tensor) -> Tensor:
        return self.shift + self.scale * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3))


class ClassToken(Base):
    """A token that every example starts with."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 1, C))

    def strange(self, x: Tensor) -> Tensor:
        return torch.cat([self.start.expand(len(x), -1, -1), x[:, 1:]], 1)


class FarBelow(Base):
    """Other operations between the parameter and the place where it meets the batch, and two uses
    of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(C, T))

    def strange(self, x: Tensor) -> Tensor:
        return x * self.table.t().sigmoid()[None] + self.table.mean()


class Both(Base):
    """The parameter reaches one addition by both of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(C))

    def strange(self, x: Tensor) -> Tensor:
        return (x * self.shift) + self.shift


class Turned(Base):
    """A real scale that meets complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(C // 2) + 0.5)

    def strange(self, x: Tensor) -> Tensor:
        turned = self.scale * torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * (0.6 + 0.8j)
        return torch.view_as_real(turned).flatten(-2)


class Norms(Base):
    """Normalisation by functions, as layers do that change the type or the order of dimensions
    first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(C) + 0.5), nn.Parameter(torch.randn(C))
        self.group_scale, self.group_shift = (
            nn.Parameter(torch.rand(C) + 0.5),
            nn.Parameter(torch.randn(C)),
        )

    def strange(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x, (C,), self.scale, self.shift)
        return F.group_norm(x.mT, 2, self.group_scale, self.group_shift).mT


class Checkpointed(Scale):
    """Saved tensors may be unpacked only once."""

    def strange(self, x: Tensor) -> Tensor:
        return checkpoint(super().strange, x, use_reentrant=False)  # type: ignore[no-any-return]


class RelativeBias(Base):
    """Scores with a bias for each distance: a table with fewer rows than there are places, by a
    layer and bare, and functions of parameters on the way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_layer, self.bare = nn.Embedding(3, 2), nn.Parameter(torch.randn(4, 2))
        self.rate = nn.Parameter(torch.rand(2, 1, 1))

    def strange(self, x: Tensor) -> Tensor:
        places = (torch.arange(T)[:, None] - torch.arange(T)).abs()
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        scores = heads @ heads.mT + self.by_layer(places % 3).permute(2, 0, 1)[None]
        scores = scores + self.bare[(places % 4).view(-1)].view(T, T, 2).permute(2, 0, 1)[None]
        slope = (1.5 - torch.sigmoid(self.rate)).exp().reciprocal().tanh()
        return ((scores - slope).softmax(-1) @ heads).transpose(1, 2).flatten(-2)


KINDS: list[type[Base]] = [
    RelativeBias,
    Positions,
    RepeatedPositions,
    Scale,
    ClassToken,
    FarBelow,
    Both,
    Turned,
    Norms,
    Checkpointed,
]


def losses_of(model: nn.Module, index: Tensor) -> Tensor:
    target = index.roll(-1, 1)
    return F.cross_entropy(model(index).mT, target, reduction="none").mean(1)


def distance(a: Grads, b: Grads) -> float:
    assert list(a) == list(b)
    gap = math.sqrt(sum(float((a[k] - b[k]).square().sum()) for k in a))
    return gap / math.sqrt(sum(float(b[k].square().sum()) for k in b))


def pair(
    kind: Callable[[], nn.Module],
) -> tuple[nn.Module, BookkeepingEngine, nn.Module, LoopEngine]:
    torch.manual_seed(0)
    model = kind().double()
    oracle = copy.deepcopy(model)
    fast, loop = BookkeepingEngine(), LoopEngine()
    fast.attach(model)
    loop.attach(oracle)
    return model, fast, oracle, loop


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [2, T, 7])
def test_equals_the_loop(kind: type[Base], batch: int) -> None:
    model, fast, oracle, loop = pair(kind)
    for clip in (FlatClip(0.05), FlatClip(math.inf)):
        index = torch.randint(0, V, (batch, T))
        expected = loop.bounded_sum(losses_of(oracle, index), clip).value
        for _ in range(2):
            assert distance(fast.bounded_sum(losses_of(model, index), clip).value, expected) < 1e-9


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_loop_on_a_gpu(kind: type[Base]) -> None:
    model, fast, oracle, loop = pair(kind)
    model.float().cuda()
    for clip in (FlatClip(0.05), FlatClip(math.inf)):
        index = torch.randint(0, V, (6, T))
        expected = loop.bounded_sum(losses_of(oracle, index), clip).value
        for _ in range(2):
            found = fast.bounded_sum(losses_of(model, index.cuda()), clip).value
            assert distance({k: g.double().cpu() for k, g in found.items()}, expected) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_the_place_of_the_examples_is_found_once(
    kind: type[Base], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions that a layer looks up take one more: their layer runs otherwise from then on."""
    model, fast, _, _ = pair(kind)
    for _ in range(1 + (kind in (Positions, RelativeBias))):
        fast.bounded_sum(losses_of(model, torch.randint(0, V, (6, T))), FlatClip(1.0))
    monkeypatch.setattr(fast, "_refuted", lambda *given: pytest.fail("checked again"))
    for batch in (6, 3, 9):
        fast.bounded_sum(losses_of(model, torch.randint(0, V, (batch, T))), FlatClip(1.0))


@pytest.mark.parametrize("kind", [Positions, RepeatedPositions, Scale, Norms])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_example_that_is_not_finite_adds_zero_and_spoils_nobody(
    kind: type[Base], bad: float
) -> None:
    """The gradient is not finite though the loss is: only its own example may be blamed for
    that.
    """

    class Spoilt(kind):  # type: ignore[misc, valid-type]
        def strange(self, x: Tensor) -> Tensor:
            out: Tensor = super().strange(x)
            out.register_hook(
                lambda g: torch.where(torch.arange(len(g))[:, None, None] == 2, bad, g)
            )
            return out

    model, fast, oracle, loop = pair(Spoilt)
    index = torch.randint(0, V, (6, T))
    clean = index[torch.arange(6) != 2]
    oracle.__class__ = kind
    expected = loop.bounded_sum(losses_of(oracle, clean), FlatClip(0.05)).value
    for _ in range(2):
        assert (
            distance(fast.bounded_sum(losses_of(model, index), FlatClip(0.05)).value, expected)
            < 1e-9
        )


def test_the_examples_of_a_position_table_are_not_written_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kept as rows to add: no table per example."""
    model, fast, _, _ = pair(Positions)
    seen = {}
    inner = fast._isolate

    def look(losses: Tensor, parts: dict[str, list[object]], sound: bool) -> None:
        seen.update(parts)
        inner(losses, parts, sound)  # type: ignore[arg-type]

    monkeypatch.setattr(fast, "_isolate", look)
    fast.bounded_sum(losses_of(model, torch.randint(0, V, (6, T))), FlatClip(1.0))
    assert [type(part) for part in seen["position.weight"]] == [EmbeddingGradient]
    model, fast, _, _ = pair(Scale)
    monkeypatch.setattr(fast, "_isolate", look)
    inner = BookkeepingEngine._isolate.__get__(fast)
    fast.bounded_sum(losses_of(model, torch.randint(0, V, (6, T))), FlatClip(1.0))
    assert [type(part) for part in seen["scale"]] == [Direct]
    assert not fast._suspects


SWAPPED: dict[
    str, tuple[nn.Module, Callable[[nn.Module, dict[str, Tensor]], dict[str, Tensor]]]
] = {
    "linear": (nn.Linear(C, C), lambda m, p: {"weight": p["weight"] * 2, "bias": p["bias"]}),
    "constants": (nn.Linear(C, C), lambda m, p: {"weight": torch.ones(C, C, dtype=torch.float64)}),
    "norm": (nn.LayerNorm(C), lambda m, p: {"weight": p["weight"].exp()}),
    "recurrent": (
        nn.GRU(C, C, batch_first=True),
        lambda m, p: {"weight_ih_l0": p["weight_ih_l0"].tanh()},
    ),
    "several": (
        nn.Sequential(nn.Linear(C, C), nn.Tanh(), nn.LayerNorm(C)),
        lambda m, p: {k: v * 1.5 for k, v in p.items()},
    ),
}


class Swapped(Base):
    """A layer as it is, and once more with something in the place of its parameters."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer, self.swap = copy.deepcopy(SWAPPED[name][0]), SWAPPED[name][1]

    def strange(self, x: Tensor) -> Tensor:
        given = self.swap(self.layer, dict(self.layer.named_parameters()))
        both = self.layer(x), torch.func.functional_call(self.layer, given, (x,))
        return sum(y[0] if isinstance(y, tuple) else y for y in both)


@pytest.mark.parametrize("name", SWAPPED)
def test_layers_with_something_in_the_place_of_their_parameters_equal_the_loop(name: str) -> None:
    torch.manual_seed(0)
    model = Swapped(name).double()
    twin = copy.deepcopy(model)
    fast, slow = BookkeepingEngine(), LoopEngine()
    fast.attach(model)
    slow.attach(twin)
    for batch in (4, 3, 1):
        index = torch.randint(0, V, (batch, T))
        found, expected = (
            engine.bounded_sum(
                F.cross_entropy(net(index).mean(1), index[:, 0], reduction="none"), FlatClip(0.2)
            ).value
            for engine, net in ((fast, model), (slow, twin))
        )
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)


def test_parameters_of_another_module_in_a_layer_are_refused_in_words() -> None:
    other, model = nn.Linear(C, C), nn.Sequential(nn.Linear(C, C))
    engine = BookkeepingEngine()
    engine.attach(model)
    losses = torch.func.functional_call(
        model[0], dict(other.named_parameters()), (torch.randn(3, C),)
    ).sum(1)
    with pytest.raises(Unsupported, match="0 with parameters of another module"):
        engine.bounded_sum(losses, FlatClip(1.0))
