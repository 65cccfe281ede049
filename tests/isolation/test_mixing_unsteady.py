"""Where a GPU adds in any order, the same work gives other last bits: that is no mixing, and hides
none that is larger.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.isolation import small_runs
from tests.isolation.small_runs import Apply
from torch import Tensor, nn

from dpfy.core.errors import Unsupported
from dpfy.isolation import equality

SIZE = 1e-7
_DRAWN = np.random.default_rng(0)


@torch.library.custom_op("dpfy_tests::unsteady", mutates_args=())
def unsteady(x: Tensor) -> Tensor:
    """`x`, in other last bits every time: the numbers come from where no recording sees them."""
    return x * (1 + SIZE * torch.from_numpy(_DRAWN.standard_normal(tuple(x.shape))).to(x.dtype))


class Unsteady(torch.autograd.Function):
    """The identity, whose gradient is never the same twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        found: Tensor = torch.ops.dpfy_tests.unsteady(grad)
        return found


def through(share: float = 0.0) -> nn.Module:
    """A model with such a gradient in its middle, and with a share of the batch's mean."""
    return Apply(lambda h: Unsteady.apply(h - share * h.detach().mean(0) if share else h))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor stands for a device that adds in any order. The weights are the same ones
    whatever ran before: what 1e-4 of a mean moves depends on them.
    """
    torch.manual_seed(1)
    monkeypatch.setattr(equality, "EXACT", ())


@pytest.mark.usefixtures("gpu")
def test_gradients_that_move_by_themselves_are_trained_on(tmp_path: Path) -> None:
    assert small_runs.train(tmp_path, through()).steps_done == 4


def test_where_bits_repeat_they_are_refused(tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    with pytest.raises(Unsupported, match="mix examples"):
        small_runs.train(tmp_path, through())


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("share", [1.0, 1e-2, 1e-4])
def test_mixing_that_is_larger_is_refused(tmp_path: Path, share: float) -> None:
    with pytest.raises(Unsupported, match="mix examples"):
        small_runs.train(tmp_path, through(share))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("share", [1.0, 1e-3])
def test_mixing_in_the_backward_pass_alone_is_refused(tmp_path: Path, share: float) -> None:
    """The forward pass keeps the examples apart: only what arrives at the layer below shows it."""

    class Shared(Unsteady):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            found: Tensor = torch.ops.dpfy_tests.unsteady(grad + share * grad.mean(0))
            return found

    with pytest.raises(Unsupported, match="mix examples"):
        small_runs.train(tmp_path, Apply(Shared.apply))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("share", [1.0, 1e-2, 1e-4])
def test_gradients_that_lean_on_other_examples_are_refused(tmp_path: Path, share: float) -> None:
    """Each stays in its row, but its size follows the others: the losses do not show it."""

    class Leaning(Unsteady):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x.mean())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            found: Tensor = torch.ops.dpfy_tests.unsteady(grad * (1 + share * ctx.saved_tensors[0]))
            return found

    with pytest.raises(Unsupported, match="mix examples"):
        small_runs.train(tmp_path, Apply(Leaning.apply))
