"""Whatever fails on the fast way, a step goes on by the portable one: the same update, one
warning.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from dpfy.gradients import kernels
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Flatten(),
        nn.Linear(288, 4),
    )


def step(model: nn.Module, engine: BookkeepingEngine, k: int) -> dict[str, Tensor]:
    x = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(k))
    found = engine.bounded_sum(model(x).square().sum(1), FlatClip(0.5)).value
    with torch.no_grad():
        for name, p in model.named_parameters():
            p -= 0.01 * found[name]
    return found


@pytest.mark.parametrize("first", [0, 50])
def test_a_kernel_that_fails_is_done_without(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a GPU every kernel fails as soon as it is believed to be usable."""
    monkeypatch.setattr(kernels, "FAILED", {})
    monkeypatch.setattr(kernels, "triton", None)
    model = network()
    twin, fast, usual = copy.deepcopy(model), BookkeepingEngine(), BookkeepingEngine()
    fast.attach(model)
    usual.attach(twin)
    expected = [step(twin, usual, k) for k in range(first + 3)]
    for k in range(first):
        step(model, fast, k)
    monkeypatch.setattr(kernels, "_possible", lambda t: True)
    with pytest.warns(UserWarning, match="GPU kernels") as told:
        found = [step(model, fast, k) for k in range(first, first + 3)]
    assert len({str(each.message).split("failed")[0] for each in told}) == len(told) <= 3
    assert kernels.FAILED
    for mine, theirs in zip(found, expected[first:], strict=True):
        for name, value in theirs.items():
            assert torch.allclose(mine[name], value, rtol=1e-4, atol=1e-6), name
    fast.detach()
    usual.detach()


def test_errors_of_the_users_own_are_no_failures_of_kernels() -> None:
    def wrong() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        kernels.with_portable_way(wrong)
    assert not kernels.FAILED
