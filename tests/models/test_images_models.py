"""EfficientNet-Lite0 and wide residual networks: published shapes, frozen statistics, examples kept
apart, and private steps through every layer by a rule.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

import dpfy
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.models.efficientnet import STAGES, EfficientNetLite0, SamePadded, from_published
from dpfy.models.wide_resnet import StandardisedConv2d, WideResNet, folded


def theirs() -> dict[str, torch.Tensor]:
    """Tensors by the names of the published file, filled at random."""
    generator = torch.Generator().manual_seed(0)
    found = {}

    def norm(name: str, width: int) -> None:
        for part in ("weight", "bias", "running_mean", "running_var"):
            found[f"{name}.{part}"] = torch.rand(width, generator=generator) + 0.5
        found[f"{name}.num_batches_tracked"] = torch.tensor(7)

    def conv(name: str, *shape: int) -> None:
        found[f"{name}.weight"] = torch.randn(shape, generator=generator) * 0.05

    conv("_conv_stem", 32, 3, 3, 3)
    norm("_bn0", 32)
    number, into = 0, 32
    for count, kernel, _, wider, out in STAGES:
        for _ in range(count):
            name, inside = f"_blocks.{number}", into * wider
            if wider > 1:
                conv(f"{name}._expand_conv", inside, into, 1, 1)
                norm(f"{name}._bn0", inside)
            conv(f"{name}._depthwise_conv", inside, 1, kernel, kernel)
            norm(f"{name}._bn1", inside)
            conv(f"{name}._project_conv", out, inside, 1, 1)
            norm(f"{name}._bn2", out)
            number, into = number + 1, out
    conv("_conv_head", 1280, 320, 1, 1)
    norm("_bn1", 1280)
    found["_fc.weight"], found["_fc.bias"] = torch.zeros(1000, 1280), torch.zeros(1000)
    return found


def test_published_tensors_go_where_they_belong() -> None:
    tensors = theirs()
    network = EfficientNetLite0()
    network.load_state_dict(from_published(tensors))
    block = network.blocks[11]
    assert torch.equal(block.project[0].weight, tensors["_blocks.11._project_conv.weight"])
    assert torch.equal(block.depthwise[1].running_var, tensors["_blocks.11._bn1.running_var"])
    assert sum(p.numel() for p in network.parameters()) == 4_652_008
    assert [tuple(m.shape[1:]) for m in network.maps(torch.rand(1, 3, 224, 224))][-3:] == [
        (192, 7, 7),
        (320, 7, 7),
        (1280, 7, 7),
    ]


@pytest.mark.parametrize("change", ["missing", "more", "shape"])
def test_other_tensors_are_refused(change: str) -> None:
    tensors = theirs()
    if change == "missing":
        del tensors["_blocks.3._bn1.bias"]
    elif change == "more":
        tensors["_blocks.16._bn1.bias"] = torch.zeros(1)
    else:
        tensors["_fc.bias"] = torch.zeros(10)
    with pytest.raises(Corrupt, match="EfficientNet-Lite0 weights"):
        from_published(tensors)


@pytest.mark.parametrize("side", [7, 8, 31, 32])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 2), (1, 1)])
def test_padding_keeps_the_side_rounded_up_and_adds_below_first(
    side: int, kernel: int, stride: int
) -> None:
    conv = SamePadded(1, 1, kernel, stride, bias=False)
    image = torch.randn(1, 1, side, side)
    sides = -(-side // stride)
    total = max((sides - 1) * stride + kernel - side, 0)
    padded = torch.zeros(1, 1, side + total, side + total)
    padded[:, :, total // 2 : total // 2 + side, total // 2 : total // 2 + side] = image
    torch.testing.assert_close(conv(image), functional.conv2d(padded, conv.weight, stride=stride))


def test_statistics_never_change_and_examples_do_not_mix() -> None:
    network = EfficientNetLite0(classes=10).train()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    images = torch.rand(4, 3, 32, 32)
    whole = network(images)
    torch.testing.assert_close(whole[:1], network(images[:1]), atol=1e-5, rtol=1e-4)
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())


@pytest.mark.parametrize("depth", [10, 16])
def test_standardised_weights_are_standardised_and_fold(depth: int) -> None:
    network = WideResNet(depth, 1, classes=7)
    conv = next(m for m in network.modules() if isinstance(m, StandardisedConv2d))
    with torch.no_grad():
        for p in network.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    flat = (conv.scaled() / conv.gain.view(-1, 1, 1, 1)).flatten(1)
    torch.testing.assert_close(flat.mean(1), torch.zeros(len(flat)), atol=1e-6, rtol=0)
    torch.testing.assert_close(flat.square().sum(1), torch.ones(len(flat)), atol=1e-3, rtol=0)
    images = torch.rand(3, 3, 32, 32)
    torch.testing.assert_close(network(images), folded(network)(images), atol=1e-4, rtol=1e-4)
    assert len(network.units(images)) == (depth - 4) // 2


def test_a_depth_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidInput, match="depth"):
        WideResNet(18, 4)


@pytest.mark.parametrize("standardised", [True, False])
def test_a_private_step_equals_the_oracle(standardised: bool, tmp_path: Path) -> None:
    images, labels = torch.rand(6, 3, 8, 8, dtype=torch.float64), torch.arange(6) % 3
    weights = []
    for engine in ("bookkeeping", "loop"):
        torch.manual_seed(0)
        network = WideResNet(10, 1, classes=3, standardised=standardised).double()
        torch.nn.init.normal_(network.head.weight)
        plan = dpfy.dpsgd(6, 6, steps=1, clip_norm=0.5).with_noise(1.0, delta=1e-3)
        dpfy.fit(
            network,
            (images, labels),
            plan=plan,
            optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
            run=dpfy.Run(tmp_path / engine, seed=1),
            runtime=dpfy.Runtime(engine=engine),
        )
        weights.append(network.state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], atol=1e-9, rtol=1e-9)
