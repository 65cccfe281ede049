"""Model repair: what private training refuses is replaced, said so, and trains; statistics of batch
normalisation stay what they are.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import dpfy
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.gradients.checker import check_model, probe_mixing
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import LoopEngine
from dpfy.training import Result

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
import small

KINDS = {
    nn.BatchNorm1d: (5,),
    nn.BatchNorm2d: (4, 4),
    nn.BatchNorm3d: (2, 3, 3),
    nn.SyncBatchNorm: (4,),
}


def pretrained(seed: int = 0) -> nn.Module:
    """A small convolutional network whose batch normalisation has seen data."""
    torch.manual_seed(seed)
    body = [
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
    ]
    net = nn.Sequential(*body, nn.Flatten(), nn.Linear(8 * 4 * 4, 3))
    with torch.no_grad():
        for _ in range(5):
            net(torch.randn(16, 1, 8, 8) * 2 + 1)
        for norm in (net[1], net[4]):
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.uniform_(-0.5, 0.5)
    return net


IMAGES = torch.randn(60, 1, 8, 8, generator=torch.Generator().manual_seed(3)) + 1
LABELS = torch.arange(60) % 3
PUBLIC = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(4)) + 1


def fit(net: nn.Module, path: Path, **options: object) -> Result:
    plan = dpfy.dpsgd(60, 15, steps=4, clip_norm=1.0).with_noise(1.0, delta=1e-3)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    run = dpfy.Run(path, seed=5, resume=True)
    return dpfy.fit(net, (IMAGES, LABELS), plan=plan, optimizer=optimizer, run=run, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_normalisation_of_any_kind_becomes_group_normalisation(kind):
    net = nn.Sequential(kind(48), nn.Sequential(kind(48, affine=False)))
    with torch.no_grad():
        net[0].weight.fill_(2.0)
    before = copy.deepcopy(net.state_dict())
    fixed, replaced = dpfy.repair(net)
    assert replaced == (f"0: {kind.__name__} by GroupNorm", f"1.0: {kind.__name__} by GroupNorm")
    assert isinstance(fixed[0], nn.GroupNorm)
    assert float(fixed[0].weight.detach()[0]) == 2.0
    assert fixed[0].weight is not net[0].weight
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())
    assert not list(fixed.buffers())
    check_model(fixed)
    probe_mixing(fixed, (torch.randn(3, 48, *KINDS[kind]),))
    assert dpfy.repair(fixed).replaced == ()


@pytest.mark.parametrize("channels", [2, 8, 17, 32, 100])
def test_channels_without_places_are_not_normalised_away(channels):
    """A group of one channel and one place is always zero."""
    fixed = dpfy.repair(nn.BatchNorm1d(channels)).model
    x = torch.randn(50, channels)
    assert float(fixed(x).var(0).min()) > 0.1
    with pytest.raises(Unsupported, match="of one number alone"):
        dpfy.repair(nn.BatchNorm1d(1))


def test_the_rest_of_what_is_refused_by_name_is_repaired_too():
    net = nn.ModuleDict(
        {
            "instance": nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
            "words": nn.Embedding(5, 3, max_norm=1.0, scale_grad_by_freq=True),
            "bag": nn.EmbeddingBag(5, 3, scale_grad_by_freq=True),
            "spectral": nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
            "plain": nn.Linear(3, 3),
        }
    )
    with pytest.raises(Unsupported):
        check_model(net)
    fixed, replaced = dpfy.repair(net)
    check_model(fixed)
    assert len(replaced) == 4
    assert "words: Embedding with max_norm and scale_grad_by_freq by Embedding" in replaced
    assert net["words"].max_norm == 1.0
    x = torch.randn(2, 4, 5, 5)
    assert torch.allclose(
        fixed["instance"](x),
        functional.instance_norm(x, weight=net["instance"].weight, bias=net["instance"].bias),
    )


def test_a_layer_used_twice_stays_one_layer():
    norm = nn.BatchNorm2d(6)
    fixed = dpfy.repair(nn.ModuleList([norm, nn.Sequential(norm)])).model
    assert fixed[0] is fixed[1][0]


def test_what_cannot_be_repaired_is_one_line():
    with pytest.raises(InvalidInput, match=r"model: got 'str'; must be a torch.nn.Module"):
        dpfy.repair("resnet")
    with pytest.raises(Unsupported, match="repair it first, then compile it"):
        dpfy.repair(torch.compile(nn.BatchNorm2d(6)))
    with pytest.raises(Unsupported, match="lazy module"):
        dpfy.repair(nn.Sequential(nn.LazyBatchNorm2d()))
    with pytest.raises(Unsupported, match=r"1 \(BatchNorm2d\): keeping statistics of nothing"):
        dpfy.repair(nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6)), statistics="ImageNet")
    with pytest.raises(Unsupported, match="keeping statistics that it does not have"):
        dpfy.repair(nn.BatchNorm2d(6, track_running_stats=False), statistics="ImageNet")
    with pytest.raises(InvalidInput, match="statistics: got None; must say"):
        dpfy.repair(pretrained(), public=PUBLIC)
    with pytest.raises(InvalidInput, match="statistics: got ''; must be one line"):
        dpfy.repair(pretrained(), statistics="")
    with pytest.raises(InvalidInput, match="at least 2 public records"):
        dpfy.repair(pretrained(), statistics="KMNIST", public=PUBLIC[:1])


def test_batch_normalisation_in_evaluation_mode_is_refused_with_both_ways_out():
    """Whether its statistics are public, only the caller knows; and train() would turn it on
    again.
    """
    with pytest.raises(
        Unsupported,
        match=r"dpfy.repair\(model\) puts GroupNorm.*dpfy.repair\(model, statistics=.*freezes it",
    ):
        check_model(pretrained().eval())


@pytest.mark.parametrize("affine", [True, False])
def test_frozen_statistics_are_kept_in_every_mode_and_the_card_says_whose_they_are(
    tmp_path, affine
):
    net = pretrained()
    fixed, replaced = dpfy.repair(net, statistics="public pretraining, 80 pictures")
    assert (
        replaced[0]
        == "1: BatchNorm2d by FrozenBatchNorm (statistics: public pretraining, 80 pictures)"
    )
    assert fixed.state_dict().keys() == net.state_dict().keys()
    due = net.eval()(IMAGES)
    for mode in (True, False):
        assert torch.allclose(fixed.train(mode)(IMAGES), due, atol=1e-5)
    if not affine:
        for norm in (fixed[1], fixed[4]):
            norm.requires_grad_(False)
    before = {name: value.clone() for name, value in fixed.state_dict().items()}
    fit(fixed, tmp_path / "run")
    after = dpfy.load(
        tmp_path / "run", dpfy.repair(pretrained(), statistics="the same").model
    ).state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert not {name for name in moved if "running" in name or "tracked" in name}
    assert ("1.weight" in moved) == affine
    card = small.card_of(tmp_path / "run")
    assert card["components"]["replaced"] == [
        "BatchNorm2d by FrozenBatchNorm (statistics: public pretraining, 80 pictures)"
    ]
    row = next(row for row in card["accounting"]["assumptions"] if row["what"] == "normalisation")
    assert (row["holds"], row["done"]) == (
        "stated",
        "declared by the caller: public pretraining, 80 pictures",
    )
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))
    assert "public pretraining" in (tmp_path / "run" / "report.html").read_text()


def test_statistics_that_somebody_moves_while_it_trains_end_the_run(tmp_path):
    fixed = dpfy.repair(pretrained(), statistics="public").model
    plan = dpfy.dpsgd(60, 15, steps=4, clip_norm=1.0).with_noise(1.0, delta=1e-3)
    training = dpfy.PrivateTraining(
        fixed, torch.optim.SGD(fixed.parameters(), lr=0.1), (IMAGES, LABELS), plan, tmp_path / "run"
    )

    def train():
        with training:
            for x, y in training.batches():
                fixed[1].running_mean += 0.1 * x.mean()
                training.step(functional.cross_entropy(fixed(x), y, reduction="none"))

    with pytest.raises(Unsupported, match="buffer that the forward pass changes from the batch"):
        train()


def sums(engine, net, x, y):
    engine.attach(net)
    try:
        losses = functional.cross_entropy(net(x), y, reduction="none")
        return engine.bounded_sum(losses, FlatClip(0.5), None).value
    finally:
        engine.detach()


@pytest.mark.parametrize("public", [None, PUBLIC])
def test_engines_agree_on_the_layers(public):
    net = dpfy.repair(pretrained(), statistics="public", public=public).model.double()
    x, y = IMAGES[:10].double(), LABELS[:10]
    due, found = (sums(engine, net, x, y) for engine in (LoopEngine(), BookkeepingEngine()))
    for name in due:
        assert torch.allclose(due[name], found[name], atol=1e-9)


def test_public_statistics_follow_the_weights_and_no_example_reaches_another(tmp_path):
    net = pretrained()
    fixed, replaced = dpfy.repair(net, statistics="20 public pictures", public=PUBLIC)
    assert replaced[1] == "4: BatchNorm2d by PublicBatchNorm (statistics: 20 public pictures)"
    probe_mixing(fixed, (IMAGES[:4],))
    assert torch.allclose(
        fixed(PUBLIC), net.train()(PUBLIC), atol=1e-5
    )  # as batch normalisation of the public batch itself
    assert torch.allclose(fixed.eval()(IMAGES)[:1], fixed.eval()(IMAGES[:1]), atol=1e-6)
    fit(fixed, tmp_path / "run", evaluation=dpfy.PublicTest((IMAGES + 1, LABELS)))
    again = dpfy.load(
        tmp_path / "run", dpfy.repair(pretrained(seed=1), statistics="20", public=PUBLIC * 0).model
    )
    assert torch.equal(again(IMAGES), fixed(IMAGES))
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))
    with pytest.raises(InvalidInput, match=r"call the model that dpfy.repair returned"):
        dpfy.repair(pretrained(), statistics="x", public=PUBLIC).model.model(IMAGES)


def test_a_resumed_run_with_public_statistics_is_the_uninterrupted_one(tmp_path):
    class Stop(Exception):
        pass

    def run(path, stop):
        net, calls = dpfy.repair(pretrained(), statistics="public", public=PUBLIC).model, []

        def enter(module, args):
            calls.append(1)
            if stop and len(calls) > 2:
                raise Stop

        net.register_forward_pre_hook(enter)
        fit(net, path)

    run(tmp_path / "whole", False)
    with pytest.raises(Stop):
        run(tmp_path / "cut", True)
    run(tmp_path / "cut", False)
    assert (tmp_path / "cut" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


@pytest.mark.gpu
@pytest.mark.parametrize("public", [None, PUBLIC])
def test_the_layers_run_in_captured_steps(tmp_path, public):
    """On a GPU, with and without graphs, and as on a CPU: the same noise, weights alike but for
    rounding.
    """
    found = []
    for device, graph in (("cpu", False), ("cuda", False), ("cuda", True)):
        net = dpfy.repair(pretrained(), statistics="public", public=public).model
        runtime = dpfy.Runtime(device=device, graph=graph)
        plan = dpfy.dpsgd(60, 15, steps=8, clip_norm=1.0).with_noise(0.0, delta=1e-3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        run = dpfy.Run(tmp_path / f"{device}{graph}", seed=5)
        data = {"input": IMAGES, "labels": LABELS} if public is None else (IMAGES, LABELS)
        with torch.backends.cudnn.flags(allow_tf32=False):
            dpfy.fit(net, data, plan=plan, optimizer=optimizer, run=run, runtime=runtime)
        found.append([p.detach().cpu() for p in net.parameters()])
    for other in found[1:]:
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found[0], other, strict=True))
