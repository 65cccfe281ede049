"""The arguments of Opacus mean here what they mean there, or are refused with the way out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpfy
from dpfy.core.errors import DpfyError
from dpfy.gradients.clip import FlatClip, GroupClip

pytestmark = pytest.mark.filterwarnings("ignore:DataLoader")
RECORDS, BATCH, EPOCHS = 96, 16, 2


def parts():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, 5, generator=generator)
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=BATCH, shuffle=True)
    return {
        "module": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.5),
        "data_loader": loader,
        "records": RECORDS,
    }


BASE = {"max_grad_norm": 0.8, "epochs": EPOCHS, "target_delta": 1e-3}


def made(**settings):
    return dpfy.from_opacus(**parts() | BASE | {"noise_multiplier": 1.1} | settings)


def test_rate_steps_noise_and_divisor_are_those_of_opacus():
    """There: rate 1 / len(loader), len(loader) steps an epoch, noise of multiplier times norm, a
    mean over rate times records.
    """
    plan = made().plan
    assert plan.recipe.sampler.rate == pytest.approx(BATCH / RECORDS)
    assert plan.recipe.steps == EPOCHS * (RECORDS // BATCH)
    assert plan.recipe.expected_batch == pytest.approx(BATCH)
    assert plan.stddev == pytest.approx(1.1 * 0.8)
    assert plan.recipe.clip == FlatClip(0.8)


def test_a_target_is_met():
    plan = made(noise_multiplier=None, target_epsilon=2.0).plan
    assert 1.9 < plan.epsilon <= 2.0
    assert (
        made(noise_multiplier=None, target_epsilon=2.0, accountant="rdp").plan.noise_multiplier
        > plan.noise_multiplier
    )


def test_it_trains(tmp_path):
    given = parts()
    with dpfy.from_opacus(
        **given | BASE,
        noise_multiplier=1.1,
        run=dpfy.Run(tmp_path / "run"),
        max_physical_batch_size=8,
    ) as training:
        for x, y in training.batches():
            training.step(nn.functional.cross_entropy(given["module"](x), y, reduction="none"))
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))
    assert training.plan.epsilon < math.inf


def test_per_layer_norms_make_one_bound():
    plan = made(clipping="per_layer", max_grad_norm=[0.3, 0.4, 0.5, 0.6]).plan
    assert plan.recipe.clip == GroupClip(
        ("0.weight", "0.bias", "2.weight", "2.bias"), (0.3, 0.4, 0.5, 0.6)
    )
    assert plan.stddev == pytest.approx(1.1 * math.hypot(0.3, 0.4, 0.5, 0.6))


def test_secure_mode_is_exact_noise_and_modes_are_engines():
    assert made(secure_mode=True).plan.recipe.noise == "exact"
    assert made(grad_sample_mode="ghost").runtime.engine == "bookkeeping"
    assert (
        made(grad_sample_mode="functorch", max_physical_batch_size=7).runtime.max_physical_batch
        == 7
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"poisson_sampling": False},
            "poisson_sampling=False is not supported; its charge is not that of Poisson batches",
        ),
        ({"batch_first": False}, "batch_first=False is not supported; put the examples first"),
        ({"loss_reduction": "sum"}, "loss_reduction: got 'sum'"),
        ({"noise_generator": torch.Generator()}, "a noise_generator of your own is not supported"),
        ({"grad_sample_mode": "ghost_fsdp"}, "grad_sample_mode: got 'ghost_fsdp'; must be one of"),
        ({"clipping": "adaptive"}, "clipping: got 'adaptive'; must be one of flat, per_layer"),
        ({"clipping": "per_layer"}, "max_grad_norm: got 0.8"),
        ({"max_grad_norm": [1.0, 2.0]}, 'a list goes with clipping="per_layer"'),
        ({"accountant": "gdp"}, "accountant: got 'gdp'; must be one of"),
        ({"target_epsilon": 1.0}, "give noise_multiplier or target_epsilon, one of them"),
        ({"noise_multiplier": None}, "give noise_multiplier or target_epsilon, one of them"),
        ({"epochs": 0}, "epochs: got 0"),
        ({"data_loader": [1, 2]}, "data_loader: got 'list'; must be a DataLoader"),
        ({"records": 3}, "records: got 3; must be at least the batch size (16)"),
        ({"records": None}, "records: got None"),
    ],
)
def test_what_has_no_proof_or_another_meaning_is_refused(settings, told):
    with pytest.raises(DpfyError) as refused:
        made(**settings)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
