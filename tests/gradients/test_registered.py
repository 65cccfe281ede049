"""Rules that users add for their own layers: exact, as fast as ours, and refused where they are
wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dpfy
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import LoopEngine
from dpfy.gradients.layers.registered import register_layer
from dpfy.gradients.layers.table import REGISTERED, rule_for
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.record_losses import losses_of_rows

Rule = Callable[..., dict[str, Any]]


class Scaled(nn.Module):
    """y = exp(s) * (x W'): nothing that the rules of operations know as a whole."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outs, ins) / ins**0.5)
        self.scale = nn.Parameter(torch.randn(outs) / 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.exp(self.scale) * (x @ self.weight.t())


def right(layer: Scaled, g: Tensor, x: Tensor) -> dict[str, Any]:
    products = g * torch.exp(layer.scale)
    scale = products * (x @ layer.weight.t())
    return {"weight": (products, x), "scale": scale.flatten(1, -2).sum(1) if g.dim() > 2 else scale}


def changed(name: str, change: Callable[[Any], Any]) -> Rule:
    def rule(layer: Scaled, g: Tensor, x: Tensor) -> dict[str, Any]:
        found = right(layer, g, x)
        return found | {name: change(found[name])}

    return rule


class Net(nn.Module):
    def __init__(self, layer: type[nn.Module] = Scaled, sequence_first: bool = False) -> None:
        super().__init__()
        self.first, self.own, self.last = nn.Linear(5, 6), layer(6, 4), nn.Linear(4, 3)
        self.sequence_first = sequence_first

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.sequence_first else x
        y = self.last(torch.tanh(self.own(torch.relu(self.first(x)))))
        y = y.transpose(0, 1) if self.sequence_first else y
        return y.flatten(1).sin().mean(1)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)


def batch(step: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step), dtype=dtype)


def sums(engine: Any, model: nn.Module, x: Tensor, clip: float = 0.05) -> dict[str, Tensor]:
    engine.attach(model)
    try:
        return dict(engine.bounded_sum(model(x), FlatClip(clip)).value)
    finally:
        engine.detach()


def agree(model: nn.Module, x: Tensor) -> None:
    found, expected = sums(BookkeepingEngine(), model, x), sums(LoopEngine(), model, x)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sequence_first", [False, True])
@pytest.mark.parametrize("shape", [(7, 5), (7, 9, 5)])
def test_a_rule_equals_the_loop(shape: tuple[int, ...], sequence_first: bool) -> None:
    if sequence_first and len(shape) == 2:
        pytest.skip("no sequence")
    register_layer(Scaled, right)
    model = Net(sequence_first=sequence_first).double()
    assert rule_for(model.own) is REGISTERED[Scaled]
    agree(model, batch(0, *shape))


def test_the_rule_does_the_work_and_nothing_is_sent_through_the_graph() -> None:
    used: list[int] = []

    @register_layer(Scaled)
    def rule(layer: Scaled, g: Tensor, x: Tensor) -> dict[str, Any]:
        used.append(len(g))
        return right(layer, g, x)

    model, engine = Net().double(), BookkeepingEngine()
    engine.attach(model)
    for step in range(3):
        engine.bounded_sum(model(batch(step, 7, 5)), FlatClip(1.0))
        assert not engine.sums.untracked
        assert engine.per_example_parameters == {}
    assert used.count(7) >= 3
    engine.detach()


def test_state_of_the_layer_is_what_the_calls_of_the_model_make_it() -> None:
    register_layer(Scaled, right)
    model, engine = Net().double(), BookkeepingEngine()
    before = dict(model.named_parameters())
    engine.attach(model)
    for step in range(4):
        engine.bounded_sum(model(batch(step, 7, 5)), FlatClip(1.0))
    engine.detach()
    assert int(model.own.calls) == 4
    assert all(p is before[name] for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("scale", lambda t: 2 * t),
        ("scale", lambda t: t - t.mean(0)),
        ("scale", lambda t: t * 1.0001),
        ("weight", lambda pair: (pair[0], pair[1] - pair[1].mean(0))),
        ("weight", lambda pair: (pair[0].roll(1, 0), pair[1])),
        ("weight", lambda pair: (pair[0] * float("nan"), pair[1])),
    ],
)
def test_a_wrong_rule_is_refused_at_the_first_step(name: str, change: Callable[[Any], Any]) -> None:
    register_layer(Scaled, changed(name, change))
    with pytest.raises(Unsupported, match=f"rule gives another gradient for '{name}'"):
        sums(BookkeepingEngine(), Net().double(), batch(0, 7, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_rule_is_refused_in_narrow_types_too(dtype: torch.dtype) -> None:
    x = batch(0, 7, 5, dtype=torch.float32).to(dtype)
    register_layer(Scaled, right)
    sums(BookkeepingEngine(), Net().to(dtype), x)
    REGISTERED.clear()
    register_layer(Scaled, changed("scale", lambda t: 1.01 * t))
    with pytest.raises(Unsupported, match="another gradient"):
        sums(BookkeepingEngine(), Net().to(dtype), x)


def test_a_rule_that_is_wrong_for_later_batches_alone_is_found() -> None:
    def rule(layer: Scaled, g: Tensor, x: Tensor) -> dict[str, Any]:
        found = right(layer, g, x)
        return found | {"scale": found["scale"] * (2 if layer.late else 1)}

    register_layer(Scaled, rule)
    model, engine = Net().double(), BookkeepingEngine()
    model.own.late = False
    engine.attach(model)
    engine.bounded_sum(model(batch(0, 7, 5)), FlatClip(1.0))
    model.own.late = True

    def go_on() -> None:
        for step in range(1, 9):
            engine.bounded_sum(model(batch(step, 7, 5)), FlatClip(1.0))

    with pytest.raises(Unsupported, match="another gradient"):
        go_on()
    engine.detach()


def test_a_layer_that_draws_random_numbers_has_no_rule() -> None:
    class Dropped(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.5)

    register_layer(Dropped, right)
    with pytest.raises(Unsupported, match="no random numbers"):
        sums(BookkeepingEngine(), Net(Dropped).double(), batch(0, 7, 5))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "must give gradients for scale, weight and no other"),
        (None, "must give gradients for scale, weight and no other"),
        ({"weight": 0, "scale": 0, "bias": 0}, "and no other parameters"),
    ],
)
def test_a_rule_gives_what_every_parameter_receives(given: Any, message: str) -> None:
    register_layer(Scaled, lambda layer, g, x: given)
    with pytest.raises(InvalidInput, match=message):
        sums(BookkeepingEngine(), Net().double(), batch(0, 7, 5))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("scale", lambda t: t.sum(0), r"must have shape \[examples, 4\]"),
        ("scale", lambda t: t[:3], r"must have shape \[examples, 4\]"),
        ("weight", lambda pair: pair[::-1], r"must make a matrix of shape \[4, 6\]"),
        ("weight", lambda pair: (pair[0][:3], pair[1]), "examples in their first dimension"),
    ],
)
def test_a_rule_gives_gradients_of_the_right_shapes(
    name: str, change: Callable[[Any], Any], message: str
) -> None:
    register_layer(Scaled, changed(name, change))
    with pytest.raises(InvalidInput, match=message):
        sums(BookkeepingEngine(), Net().double(), batch(0, 7, 5))


def test_frozen_parameters_need_no_gradient() -> None:
    register_layer(Scaled, lambda layer, g, x: {"weight": right(layer, g, x)["weight"]})
    model = Net().double()
    model.own.scale.requires_grad_(False)
    agree(model, batch(0, 7, 5))


class Table(nn.Module):
    """Rows of a table times an input: two tensors, one of whole numbers, one given by name."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(8, 6))

    def forward(self, index: Tensor, *, times: Tensor, power: int = 1) -> Tensor:
        return self.rows[index] * times**power


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = Table(), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        index = (x[..., 0] * 4).long().abs() % 8
        return self.last(self.table(index, times=x, power=2)).flatten(1).sin().mean(1)


def test_several_inputs_come_in_the_order_of_the_call() -> None:
    def rule(layer: Table, g: Tensor, index: Tensor, times: Tensor) -> dict[str, Any]:
        return {"rows": (F.one_hot(index, 8).to(g.dtype), g * times**2)}

    register_layer(Table, rule)
    agree(Lookup().double(), batch(0, 7, 3, 6))


class Shift(nn.Module):
    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(ins))

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.shift) if self.training else x


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.own, self.last = nn.Linear(5, 6), Shift(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x)) * 1.0
        return self.last(self.own(y) + y.sum() * 0).sin().mean(1)


def test_a_layer_may_return_its_own_input() -> None:
    register_layer(Shift, lambda layer, g, x: {"shift": g * layer.training})
    model = Shifted().double()
    agree(model, batch(0, 7, 5))
    agree(model.eval(), batch(0, 7, 5))


def test_activation_checkpointing_keeps_its_promise() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    register_layer(Scaled, right)
    agree(Checkpointed().double(), batch(0, 7, 9, 5))


def test_losses_for_one_record_are_exact_without_the_rule() -> None:
    register_layer(Scaled, right)
    model = Net().double()
    x = batch(0, 7, 9, 5)
    expected = sums(LoopEngine(), model, x)
    engine = BookkeepingEngine()
    engine.attach(model)
    losses = losses_of_rows(lambda m, record: m(record[None])[0], model, x)
    found = engine.bounded_sum(losses, FlatClip(0.05)).value
    engine.detach()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_layers_whose_children_hold_parameters_run_without_the_rule() -> None:
    class Outside(nn.Module):
        def __init__(self, *sizes: int) -> None:
            super().__init__()
            self.inner, self.gain = nn.Linear(*sizes), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.gain

    register_layer(Outside, lambda layer, g, x: {"gain": g.sum(1)})
    assert rule_for(Outside(6, 4)) is None
    agree(Net(Outside).double(), batch(0, 7, 5))


def test_layers_with_parametrizations_run_without_the_rule() -> None:
    register_layer(Scaled, right)
    model = Net().double()
    nn.utils.parametrizations.weight_norm(model.own)
    assert rule_for(model.own) is None
    agree(model, batch(0, 7, 5))


def test_a_subclass_with_another_forward_has_another_rule() -> None:
    class Same(Scaled):
        pass

    class Other(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square()

    register_layer(Scaled, right)
    assert rule_for(Same(6, 4)) is not None
    assert rule_for(Other(6, 4)) is None
    agree(Net(Other).double(), batch(0, 7, 5))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (nn.Linear, "must not be a layer of torch"),
        (nn.Bilinear, "must not be a layer of torch"),
        (Tensor, "must be a type of torch.nn.Module"),
        (type("Empty", (nn.Module,), {}), "must have a forward of its own"),
    ],
)
def test_what_is_no_layer_of_ones_own_is_refused(kind: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        register_layer(kind, right)


def test_a_layer_has_one_rule() -> None:
    assert dpfy.register_layer(Scaled, right) is right
    with pytest.raises(InvalidInput, match="or have a rule"):
        register_layer(Scaled, right)


def test_a_layer_that_gives_two_tensors_is_refused() -> None:
    class Two(Scaled):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x

    class Taken(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.own(self.first(x))[0].sum(1)

    register_layer(Two, right)
    with pytest.raises(Unsupported, match="gives a tuple"):
        sums(BookkeepingEngine(), Taken(Two).double(), batch(0, 7, 5))


def test_contributions_of_factors_are_never_written_out() -> None:
    kinds: list[type[Contribution]] = []
    register_layer(Scaled, right)
    model, engine = Net().double(), BookkeepingEngine()
    engine.attach(model)
    add = engine.sums.add
    engine.sums.add = lambda name, part, parts: (  # type: ignore[method-assign]
        kinds.append(type(part)) if name == "own.weight" else None,
        add(name, part, parts),
    )
    engine.bounded_sum(model(batch(0, 7, 9, 5)), FlatClip(1.0))
    engine.detach()
    assert [kind.__name__ for kind in kinds] == ["Outer"]
