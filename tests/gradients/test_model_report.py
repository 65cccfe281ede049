"""The inspection tells the routes, the costs and the problems, and changes nothing."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from dpfy.cli.app import main
from dpfy.core.errors import InvalidInput
from dpfy.gradients.model_report import inspect
from dpfy.gradients.per_example.arithmetic import KEEP_ELEMENTS
from dpfy.gradients.per_example.convolution import ConvolutionGradient, Geometry
from dpfy.gradients.per_example.outer import Direct, Outer
from dpfy.gradients.step_cost import step_cost

sys.path.insert(0, str(Path(__file__).parent))
from compared import NoVmap


def test_routes_of_a_small_model() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4 * 36, 10)
    )
    model[3].bias.requires_grad_(False)
    found = inspect(model, torch.randn(8, 1, 8, 8))
    routes = {view.path: view.route for view in found.layers}
    assert routes == {"0": "products in chunks", "1": "direct", "3": "product of norms"}
    assert next(view.positions for view in found.layers) == 36
    assert found.layers[2].trainable == 4 * 36 * 10
    assert 1.0 <= found.time_ratio < 3.0
    assert not found.problems
    assert "product of norms" in found.table()
    json.dumps(found.as_dict())


def test_problems_and_strays_are_named() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.PReLU())
    before = copy.deepcopy(model.state_dict())
    found = inspect(model, torch.randn(4, 6))
    assert any("BatchNorm1d" in problem and "GroupNorm" in problem for problem in found.problems)
    assert {view.path: view.route for view in found.layers}[
        "2"
    ] == "split where examples are separate"
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())


def test_frozen_layers_cost_nothing() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    first, second = inspect(model, torch.randn(4, 6)).layers
    assert first.route.startswith("frozen")
    assert first.extra == 0
    assert second.route == "product of norms"


SHAPES = [
    (2, 64, 64),
    (8, 512, 512),
    (20, 20, 30),
    (64, 64, 64),
    (128, 512, 256),
    (200, 256, 256),
    (300, 300, 10),
    (500, 16, 16),
]


@pytest.mark.parametrize(("positions", "rows", "columns"), SHAPES)
@pytest.mark.parametrize("batch", [2, 4096])
def test_routes_are_those_that_the_engine_takes(
    positions: int, rows: int, columns: int, batch: int
) -> None:
    """Inspection told other routes than the engine took: it had its own rules."""
    layer = nn.Linear(columns, rows, bias=False)
    told = inspect(layer, torch.randn(2, positions, columns), batch).layers[0].route
    part = Outer(torch.randn(2, positions, rows), torch.randn(2, positions, columns))
    if isinstance(part.measured()[1], Direct) and batch * rows * columns <= KEEP_ELEMENTS:
        assert told == "products kept"
    else:
        assert told == ("gram matrices" if part._by_gram else "products in chunks")


@pytest.mark.parametrize(("size", "outs"), [(4, 4), (8, 256), (6, 8), (20, 8), (20, 64)])
def test_routes_of_convolutions_are_those_that_the_engine_takes(
    size: int, outs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(
        ConvolutionGradient,
        "_by_gram",
        _noting(taken, "gram matrices", ConvolutionGradient._by_gram),
    )
    layer = nn.Conv2d(outs, outs, 3)
    told = inspect(layer, torch.randn(2, outs, size, size)).layers[0].route
    x = torch.randn(2, outs, size, size)
    kept = ConvolutionGradient(
        x,
        torch.randn(2, outs, size - 2, size - 2),
        layer.weight,
        Geometry((1, 1), (0, 0), (1, 1), 1),
    ).measured()[1]
    assert told == (
        taken[0]
        if taken
        else "products kept"
        if not isinstance(kept, ConvolutionGradient)
        else "products in chunks"
    )


def _noting(taken: list[str], name: str, real: Callable[..., object]) -> Callable[..., object]:
    def noted(*arguments: object) -> object:
        taken.append(name)
        return real(*arguments)

    return noted


def test_a_wide_head_is_measured_by_gram_matrices_whatever_the_batch() -> None:
    """Its products fit into memory for a few examples only. For all others they were made, in
    parts, and then made again for the sum.
    """
    head = nn.Linear(256, 8192, bias=False)
    told = {
        inspect(head, torch.randn(2, 128, 256), batch).layers[0].route for batch in (2, 16, 4096)
    }
    assert told == {"gram matrices"}


class Odd(nn.Module):
    """A bare product, a function of parameters and a function of one's own."""

    def __init__(self, counts: bool = True) -> None:
        super().__init__()
        self.first, self.counts = nn.Linear(6, 6), counts
        self.bare, self.odd, self.own = (
            nn.Parameter(torch.rand(*shape)) for shape in ((6, 6), (6, 6), (6,))
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.counts
        return NoVmap.apply(
            torch.tanh(self.first(x) @ self.bare) @ torch.sigmoid(self.odd), self.own
        )


def test_what_goes_example_by_example_is_named_with_its_cost_and_the_way_out() -> None:
    model = Odd(counts=False)
    found = inspect(model, torch.randn(4, 6))
    assert found.per_example == {"odd": "vmap", "own": "loop"}
    assert found.as_dict()["per_example"] == found.per_example
    assert {view.path: view.route for view in found.layers}[
        "(model)"
    ] == "example by example (loop)"
    assert "EXAMPLE BY EXAMPLE (vmap): odd: " in found.table()
    assert "generate_vmap_rule" in found.table()
    bilinear = inspect(nn.Sequential(nn.Linear(6, 6), nn.PReLU()), torch.randn(4, 6))
    assert bilinear.layers[1].route == "by rules of its operations"
    assert not bilinear.per_example


def test_measured_steps_leave_the_model_as_it_was() -> None:
    model = Odd()
    before = copy.deepcopy(model.state_dict())
    cost = step_cost(model, torch.randn(4, 6), rounds=1)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any("forward" in vars(m) for m in model.modules())
    assert cost.time_ratio > 0
    assert cost.memory_ratio is None or cost.memory_ratio > 0
    assert "without noise and update" in cost.text()
    json.dumps(cost.as_dict())
    with pytest.raises(InvalidInput, match="rounds"):
        step_cost(model, torch.randn(4, 6), rounds=0)
    with pytest.raises(InvalidInput, match="model output"):
        step_cost(
            nn.Embedding(3, 2).requires_grad_(False), torch.zeros(2, dtype=torch.long), rounds=1
        )


def test_the_verb_measures_and_refuses_batches_that_are_too_large(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "inspect",
                "--model",
                "linear",
                "--shape",
                "4",
                "--batch-size",
                "8",
                "--measure",
                "--json",
            ]
        )
    assert ended.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert told["measured"]["batch"] == 8
    assert told["measured"]["time_ratio"] > 0
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "--shape", "1x28x28", "--batch-size", "100000000", "--measure"])
    assert ended.value.code == 2
    assert "--batch-size: got 100000000; must be at most" in capsys.readouterr().err


def test_attention_is_shown_with_its_projections() -> None:
    view = inspect(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), torch.randn(3, 5, 8))
    layers = {layer.path: layer for layer in view.layers}
    assert {layers[name].positions for name in ("self_attn", "self_attn.out_proj", "linear1")} == {
        5
    }
    assert all("apart" not in layer.route and "split" not in layer.route for layer in view.layers)
