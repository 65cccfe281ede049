"""The variants of the future work: same budget, public schedules, and a rate that follows the
released norm.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfy
from dpfy.data.records import Records
from dpfy.gradients.clip import FlatClip, QuantileClip
from dpfy.noise.schedule import Schedule
from dpfy.noise.strategy import Identity
from dpfy_lab.studies import dpsgd_dpftrl, trials
from dpfy_lab.studies import dpsgd_dpftrl_future as future


def base() -> dpfy.Recipe:
    return dpfy.dpsgd(400, 40, steps=40, clip_norm=1.1)


@pytest.mark.parametrize("name", future.VARIANTS)
def test_every_variant_has_the_same_budget(name: str) -> None:
    variant = future.VARIANTS[name]
    plan = variant.recipe(base()).calibrate(2.0, 1e-4)
    assert 2.0 * 0.999 <= plan.epsilon <= 2.0
    assert isinstance(plan.recipe.clip, QuantileClip if variant.quantile else FlatClip)
    assert isinstance(
        plan.recipe.strategy, Schedule if "falling" in name or "rising" in name else Identity
    )
    assert name in future.WORDS
    constant = base().calibrate(2.0, 1e-4)
    if plan.recipe.strategy == Identity():
        assert plan.noise_multiplier == constant.noise_multiplier


def test_the_schedules_are_each_other_backwards() -> None:
    falling, rising = (future.VARIANTS[n].recipe(base()).strategy for n in ("falling", "rising"))
    assert isinstance(falling, Schedule)
    assert isinstance(rising, Schedule)
    assert falling.factors == rising.factors[::-1]
    assert list(falling.factors) == sorted(falling.factors, reverse=True)


def test_the_rate_follows_the_norm_that_was_released() -> None:
    """Rate times norm stays what it was at the start; the bill is that of the plan."""
    torch.manual_seed(0)
    data = Records((torch.randn(400, 6), torch.randint(0, 10, (400,))))
    model = nn.Linear(6, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plan = (
        future.Variant(0.5, future.FALLING, follow=True).recipe(base()).with_noise(1.0, delta=1e-4)
    )
    found = trials.following(model, optimizer, (data, data), plan, seed=0)
    norms = [row["clip_norm"] for row in found["curve"]]
    assert max(norms) / min(norms) > 1.05
    assert optimizer.param_groups[0]["lr"] * norms[-1] == pytest.approx(0.05 * 1.1)
    assert found["epsilon"] == plan.epsilon
    assert [row["step"] for row in found["curve"]] == list(range(2, 41, 2))


def test_cells_of_the_future_name_all_that_they_depend_on() -> None:
    from dpfy_lab.studies.study import Options

    cells = [cell for cell in dpsgd_dpftrl.fashion_cells(Options()) if cell.name != "fashion-plain"]
    assert len(cells) == len(future.VARIANTS) * len(future.EPSILONS) * len(future.SEEDS)
    assert len({str(sorted(cell.settings.items(), key=str)) for cell in cells}) == len(cells)
