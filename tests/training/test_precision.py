"""Mixed precision: bfloat16 under autocast trains, float16 and scaled losses are refused with the
way out.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.isolation import small_runs
from torch import Tensor, nn
from torch.nn import functional as F

import dpfy
from dpfy.core.errors import DpfyError, Unsupported


def under(dtype: torch.dtype, scale: bool = False) -> small_runs.Losses:
    """Losses of a forward pass under autocast, scaled as torch's recipe for float16 has it."""
    scaler = torch.amp.GradScaler("cpu")

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            each = F.cross_entropy(m(x).float(), y, reduction="none")
        return scaler.scale(each) if scale else each

    return losses


def in_half(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x.half()).float(), y, reduction="none")


def test_autocast_to_bfloat16_trains(tmp_path: Path) -> None:
    assert small_runs.train(tmp_path, small_runs.net(), under(torch.bfloat16)).steps_done == 4


@pytest.mark.parametrize("engine", ["bookkeeping", "loop"])
def test_float16_is_refused(engine: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"float16 on the way .*bfloat16"):
        small_runs.train(tmp_path, small_runs.net(), under(torch.float16), engine=engine)


def test_parameters_in_float16_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"parameters in float16 .*bfloat16"):
        small_runs.train(tmp_path, small_runs.net().half(), in_half)
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]  # nothing is reserved


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scaled_losses_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """Clipped as they come, every gradient would be 65,536 times as long as it is."""
    with pytest.raises(
        Unsupported,
        match=r"losses multiplied by 65536, as by a GradScaler, .*hand them over unscaled",
    ):
        small_runs.train(tmp_path, small_runs.net(), under(dtype, scale=True))


@pytest.mark.parametrize("weight", [torch.tensor(100.0), 2, 1e5, -0.5])
def test_losses_weighted_by_the_user_are_not(weight: float | Tensor, tmp_path: Path) -> None:
    assert (
        small_runs.train(
            tmp_path, small_runs.net(), lambda m, x, y: small_runs.plain(m, x, y) * weight
        ).steps_done
        == 4
    )


def test_a_refusal_that_is_caught_is_not_forgotten(tmp_path: Path) -> None:
    """Nothing is released with losses that nobody looked at."""
    model, plan = (
        small_runs.net(),
        dpfy.dpsgd(small_runs.RECORDS, 12, steps=4).with_noise(1.0, delta=1e-3),
    )
    sgd, losses, refused = torch.optim.SGD(model.parameters(), lr=0.1), under(torch.float16), []
    training = dpfy.PrivateTraining(
        model, sgd, small_runs.vectors(), plan, dpfy.Run(tmp_path / "run", seed=1)
    )

    def body() -> None:
        with training:
            for x, y in training.batches():
                try:
                    training.step(losses(model, x, y))
                except Unsupported as refusal:
                    refused.append(str(refusal))

    with pytest.raises(DpfyError, match=r"a run that stopped \(.*float16"):
        body()
    assert len(refused) == 1
    assert training.steps_done == 0
