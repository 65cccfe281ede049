"""Images of random processes and the network that learns from them; features of the study of
CIFAR-10.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dpfy_lab import contrastive, random_images
from dpfy_lab.studies import cifar10
from dpfy_lab.studies.study import Options


def test_images_are_a_function_of_the_seed_and_differ() -> None:
    first = random_images.images(12, seed=3)
    assert (first.shape, first.dtype) == ((12, 3, 48, 48), torch.uint8)
    torch.manual_seed(99)  # nothing comes from torch's global generator
    assert torch.equal(first, random_images.images(12, seed=3))
    assert not torch.equal(first, random_images.images(12, seed=4))
    assert len({image.numpy().tobytes() for image in first}) == 12
    assert float(first.float().std()) > 20


def test_a_view_is_of_one_image() -> None:
    images = torch.rand(6, 3, 48, 48)
    torch.manual_seed(0)
    whole = contrastive.view(images)
    other = images.clone()
    other[1:] = torch.rand(5, 3, 48, 48)
    torch.manual_seed(0)
    assert torch.equal(whole[0], contrastive.view(other)[0])
    assert (whole.shape, bool((whole >= 0).all()), bool((whole <= 1).all())) == (
        (6, 3, 32, 32),
        True,
        True,
    )


def test_the_loss_is_that_of_finding_the_other_view() -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(6, 4, generator=generator)
    unit = points / points.norm(dim=1, keepdim=True)
    total = 0.0
    for i in range(6):
        others = [j for j in range(6) if j != i]
        scores = torch.stack([unit[i] @ unit[j] / 0.3 for j in others])
        total -= float(scores.log_softmax(0)[others.index((i + 3) % 6)]) / 6
    assert float(contrastive.agreement(points, 0.3)) == pytest.approx(total, rel=1e-5)


def test_a_network_learns_to_tell_images_apart() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 32), nn.ReLU())
    how = contrastive.Contrast(images=120, pairs=32, steps=101, rate=5e-3)
    losses = contrastive.learn(network, network, 32, how, "cpu")
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.3
    assert not network.training


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    """CIFAR-10's files with few images of random pixels, and a prior that learned nothing."""
    from safetensors.torch import save_file

    from dpfy.models.wide_resnet import WideResNet

    folder, rng = tmp_path / "cifar-10-batches-bin", np.random.default_rng(0)
    folder.mkdir()
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        table = rng.integers(0, 256, (4, 3073), dtype=np.uint8)
        table[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(table.tobytes())
    save_file({k: v.half() for k, v in WideResNet().state_dict().items()}, tmp_path / cifar10.PRIOR)
    monkeypatch.setattr(cifar10, "RECORDS", 20)
    monkeypatch.setattr(cifar10, "VALIDATION", 5)
    monkeypatch.setattr(cifar10, "SHIFTS", ((0, 0), (1, -1)))
    cifar10.extracted.cache_clear()
    return Options(data_dir=str(tmp_path))


def test_features_are_of_one_image_and_of_length_one(data: Options) -> None:
    features = cifar10.of_random_processes(data)
    images = torch.rand(3, 3, 32, 32)
    whole = cifar10.joined(features, images, "cpu")
    assert whole.shape == (3, 896 + 243, 16)
    torch.testing.assert_close(whole.flatten(1).norm(dim=1), torch.ones(3))
    alone = cifar10.joined(features, images[1:2], "cpu")
    torch.testing.assert_close(whole[1:2], alone, atol=1e-5, rtol=1e-4)


def test_a_run_verifies_and_names_the_prior_with_its_hash(data: Options) -> None:
    from dpfy.core.storage import sha256_of

    recipe = cifar10.HeadRecipe(0.05, 0.5, 0, 0.0, cifar10.Setting(2, 0.1, 4.0, 0.0, 0.9))
    found = cifar10.run_one("random", 3.0, 0, recipe, data)
    assert found["epsilon"] <= 3.0
    digest = sha256_of(Path(str(data.data_dir)) / cifar10.PRIOR)
    assert digest in found["public_data"][0]["provenance"]
    assert "photographs" in found["public_data"][0]["data"]
