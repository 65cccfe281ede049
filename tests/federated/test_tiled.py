"""Chains by products of matrices over tiles: what the layers compute, for any sizes; and what is
left to other ways.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from dpfy.federated.folded import chain
from dpfy.federated.tiled import SameMemory, stages, tiled

ACTIVATIONS = (nn.Tanh, nn.ReLU, nn.Sigmoid, nn.Identity)


def random_chain(rng: np.random.Generator) -> tuple[nn.Sequential, tuple[int, ...]]:
    """One to two convolutions with any kernel, stride, padding, activation and pool, or none; then
    dense layers.
    """
    channels, size = int(rng.integers(1, 4)), tuple(int(n) for n in rng.integers(9, 16, 2))
    shape, layers = (channels, *size), []
    for _ in range(rng.integers(0, 3)):
        kernel = tuple(int(n) for n in rng.integers(1, 5, 2))
        stride = tuple(int(rng.integers(1, k + 1)) if rng.random() < 0.4 else 1 for k in kernel)
        padding = tuple(int(n) for n in rng.integers(0, 3, 2))
        outputs = int(rng.integers(1, 5))
        layers.append(
            nn.Conv2d(channels, outputs, kernel, stride, padding, bias=bool(rng.random() < 0.7))
        )
        channels = outputs
        if rng.random() < 0.8:
            layers.append(ACTIVATIONS[rng.integers(4)]())
        size = nn.Sequential(*layers)(torch.zeros(1, *shape)).shape[2:]
        if rng.random() < 0.7 and min(size) >= 3:
            layers.append(nn.AvgPool2d((int(rng.integers(1, 4)), 2) if rng.random() < 0.5 else 2))
    layers.append(nn.Flatten())
    width = nn.Sequential(*layers)(torch.zeros(1, *shape)).shape[1]
    layers += [
        nn.Linear(width, 5, bias=bool(rng.random() < 0.7)),
        ACTIVATIONS[rng.integers(4)](),
        nn.Linear(5, 3),
    ]
    return nn.Sequential(*layers).double(), shape


@pytest.mark.parametrize("seed", range(40))
def test_outputs_and_gradients_are_those_of_the_layers(seed):
    """Of each client by itself, with weights of its own, also for the gradient of what came in."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model, shape = random_chain(rng)
    made = stages(chain(model, 3))
    assert made is not None
    clients, rows = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    weights = {
        n: torch.randn(clients, *p.shape, dtype=torch.float64, requires_grad=True)
        for n, p in model.named_parameters()
    }
    x = torch.randn(clients, rows, *shape, dtype=torch.float64, requires_grad=True)
    alone = [
        functional_call(model, {n: w[c] for n, w in weights.items()}, (x[c],))
        for c in range(clients)
    ]
    expected, found = torch.stack(alone), tiled(made, weights, x)
    assert torch.allclose(
        found, expected, rtol=0, atol=1e-10 * float(1 + expected.detach().abs().max())
    )
    given, of = torch.randn_like(expected), [x, *weights.values()]
    for right, mine in zip(
        torch.autograd.grad(expected, of, given), torch.autograd.grad(found, of, given), strict=True
    ):
        assert mine.shape == right.shape
        assert torch.allclose(mine, right, rtol=0, atol=1e-10 * float(1 + right.abs().max()))


def test_what_a_poisoned_client_sends_stays_with_it():
    model, shape = random_chain(np.random.default_rng(3))
    made = stages(chain(model, 3))
    weights = {
        n: torch.randn(3, *p.shape, dtype=torch.float64, requires_grad=True)
        for n, p in model.named_parameters()
    }
    x = torch.randn(3, 4, *shape, dtype=torch.float64)
    whole = torch.autograd.grad(tiled(made, weights, x).sum(), list(weights.values()))
    x[1] = float("nan")
    for clean, after in zip(
        whole,
        torch.autograd.grad(tiled(made, weights, x).sum(), list(weights.values())),
        strict=True,
    ):
        assert torch.equal(clean[[0, 2]], after[[0, 2]])


def test_other_chains_are_left_to_other_ways():
    dense = nn.Flatten(), nn.Linear(8, 2)
    others = [
        nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), *dense),
        nn.Sequential(nn.Conv2d(2, 4, 3, dilation=2), *dense),
        nn.Sequential(nn.Conv2d(2, 4, 3, padding="same"), *dense),
        nn.Sequential(nn.Conv2d(2, 4, 2, stride=3), *dense),
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), *dense),
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.AvgPool2d(3, 2), *dense),
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.AvgPool2d(2, padding=1), *dense),
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.AvgPool2d(2, ceil_mode=True), *dense),
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.AvgPool2d(2, divisor_override=3), *dense),
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.AvgPool2d(2), nn.Tanh(), *dense),
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.AvgPool2d(2), nn.AvgPool2d(2), *dense),
        nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(2, 4, 3), *dense),
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Tanh(), *dense),
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Tanh(), nn.Linear(8, 2)),
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.GELU(), *dense),
        nn.Sequential(nn.Tanh(), *dense),
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten()),
    ]
    for model in others:
        assert chain(model, 3) is not None, model
        assert stages(chain(model, 3)) is None, model


def test_memory_is_used_again_by_the_next_pass_of_a_thread_alone():
    memory, like = SameMemory(), torch.zeros(3)
    memory.begin()
    first, second = memory.empty(like, 2, 3), memory.empty(like, 2, 3)
    assert first.data_ptr() != second.data_ptr()
    memory.begin()
    assert memory.empty(like, 2, 3).data_ptr() == first.data_ptr()
    assert memory.empty(like, 4).shape == (4,)
    memory.begin()
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(memory.empty, like, 2, 3).result()
    assert theirs.data_ptr() not in (first.data_ptr(), second.data_ptr())
    memory.begin()
    assert memory.empty(like.double(), 2, 3).dtype == torch.float64


@pytest.mark.parametrize("seed", range(6))
def test_passes_in_the_same_memory_are_those_in_new(seed):
    """Of other sizes and weights, one after the other: nothing is left of the pass before, not even
    if that was poisoned.
    """
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model, shape = random_chain(rng)
    made, memory = stages(chain(model, 3)), SameMemory()
    for clients, rows in ((3, 4), (2, 5), (3, 4), (3, 4)):
        weights = {
            n: torch.randn(clients, *p.shape, dtype=torch.float64, requires_grad=True)
            for n, p in model.named_parameters()
        }
        x = torch.randn(clients, rows, *shape, dtype=torch.float64)
        memory.begin()
        poisoned = torch.full_like(x, float("nan"))
        torch.autograd.grad(tiled(made, weights, poisoned, memory).sum(), list(weights.values()))
        memory.begin()
        found = [
            torch.autograd.grad(tiled(made, weights, x, m).square().sum(), list(weights.values()))
            for m in (None, memory)
        ]
        assert all(map(torch.equal, *found))
