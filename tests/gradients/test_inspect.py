"""The inspection tells the routes, the costs and the problems, and changes nothing."""

from __future__ import annotations

import copy
import json

import torch
from torch import nn

from dpfy.gradients.inspect import inspect


def test_routes_of_a_small_model() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4 * 36, 10))
    model[3].bias.requires_grad_(False)
    found = inspect(model, torch.randn(8, 1, 8, 8))
    routes = {view.path: view.route for view in found.layers}
    assert routes == {"0": "products kept", "1": "direct", "3": "product of norms"}
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
    assert {view.path: view.route for view in found.layers}["2"] == "taken apart where examples are separate"
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())


def test_frozen_layers_cost_nothing() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    first, second = inspect(model, torch.randn(4, 6)).layers
    assert first.route.startswith("frozen")
    assert first.extra == 0
    assert second.route == "product of norms"
