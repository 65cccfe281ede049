from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dpfy.core.errors import InvalidInput
from dpfy.models import MODELS, ModelConfig
from dpfy.models.build import BUILDERS, build
from dpfy.models.config import LANGUAGE
from dpfy.models.features import feature_shape, features, full_model

IMAGE = (1, 28, 28)
IMAGES = [name for name in MODELS if name not in LANGUAGE]


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_model_has_a_builder() -> None:
    assert set(BUILDERS) == set(MODELS)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("linear", 7_850),
        ("mlp", 784 * 128 + 128 + 1290),
        ("lenet5", 61_706),
        ("tanh-cnn", 26_010),
        ("scattering-linear", 39_700),
    ],
)
def test_sizes_on_mnist_are_the_published_ones(name: str, parameters: int) -> None:
    assert size(build(ModelConfig(name=name), IMAGE, 10)) == parameters


@pytest.mark.parametrize("name", IMAGES)
def test_the_full_model_maps_raw_records_to_what_the_head_says(name: str) -> None:
    config = ModelConfig(name=name)
    head = build(config, IMAGE, 7)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(
                0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    images = torch.rand(5, *IMAGE, generator=torch.Generator().manual_seed(2))
    transform = features(config)
    inputs = images if transform is None else transform(images)
    assert tuple(inputs.shape[1:]) == feature_shape(config, IMAGE)
    full = full_model(config, head)
    logits = full(images)
    assert logits.shape == (5, 7)
    torch.testing.assert_close(logits, head(inputs))
    assert size(full) == size(head)
    assert float(logits.detach().std()) > 0


@pytest.mark.parametrize("name", IMAGES)
def test_the_start_depends_on_the_public_seed_alone(name: str) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = build(ModelConfig(name=name), IMAGE, 10).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    second = build(ModelConfig(name=name), IMAGE, 10).state_dict()
    other = build(ModelConfig(name=name, seed=1), IMAGE, 10).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    if name in ("linear", "scattering-linear"):
        assert not any(bool(value.any()) for value in first.values())
    else:
        assert not any(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", IMAGES)
def test_no_model_mixes_examples_or_keeps_statistics(name: str) -> None:
    config = ModelConfig(name=name)
    model = full_model(config, build(config, IMAGE, 10)).train()
    assert not list(model.buffers())
    images = torch.rand(4, *IMAGE, generator=torch.Generator().manual_seed(3), requires_grad=True)
    nn.init.normal_(list(model.parameters())[-2])
    (gradient,) = torch.autograd.grad(model(images)[2].sum(), images)
    assert [bool(row.any()) for row in gradient] == [False, False, True, False]
    copy.deepcopy(model)  # an averaged copy must be possible


def test_the_perceptron_follows_its_configuration() -> None:
    model = build(ModelConfig(name="mlp", hidden=(5, 4), activation="relu", dropout=0.5), (88,), 2)
    kinds = [type(layer) for layer in model.children()]
    assert kinds == [nn.Linear, nn.ReLU, nn.Dropout, nn.Linear, nn.ReLU, nn.Dropout, nn.Linear]
    assert size(model) == 89 * 5 + 6 * 4 + 5 * 2


def test_linear_reads_vectors_and_images() -> None:
    assert build(ModelConfig(name="linear"), (88,), 2)(torch.zeros(3, 88)).shape == (3, 2)
    assert build(ModelConfig(name="linear"), (3, 4, 4), 2)(torch.zeros(3, 3, 4, 4)).shape == (3, 2)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("lenet5", (88,), "a convolutional model needs"),
        ("tanh-cnn", (1, 5, 5), "images are too small for this model"),
        ("scattering-linear", (88,), "scattering needs images of one channel"),
        ("scattering-linear", (3, 32, 32), "scattering needs images of one channel"),
        ("linear", (), "must be the shape of one record"),
        ("linear", (10**30, 1), "must be at most"),
        ("mlp", (2**20, 2**20, 2**20), "must have at most 134217728 values"),
        ("lenet5", (1, 2**20, 0), "at least 1"),
    ],
)
def test_records_that_do_not_fit_the_model_are_refused(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        build(ModelConfig(name=name), shape, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "lenet"}, r"model.name: got 'lenet'; must be one of .*did you mean 'lenet5'"),
        (
            {"name": "mlp", "activation": "gelu"},
            "model.activation: got 'gelu'; must be one of tanh, relu",
        ),
        (
            {"name": "mlp", "hidden": (0,)},
            "model.hidden: got 0; must be a whole number of at least 1",
        ),
        ({"name": "mlp", "hidden": 128}, "model.hidden: got 128; must be a list of sizes"),
        (
            {"name": "mlp", "dropout": 1.0},
            "model.dropout: got 1.0; must be at least 0 and less than 1",
        ),
        ({"groups": 10}, "model.groups: got 10; must divide the 81 channels"),
        ({"scale": 0}, "model.scale: got 0; must be greater than 0"),
        ({"seed": -1}, "model.seed: got -1; must be a whole number of at least 0"),
        ({"name": "linear", "hidden": (3,)}, r"model.hidden: got \(3,\); linear does not read it"),
        ({"name": "tanh-cnn", "dropout": 0.5}, "model.dropout: got 0.5; tanh-cnn does not read it"),
    ],
)
def test_a_bad_configuration_names_field_value_and_rule(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        ModelConfig(**fields)  # type: ignore[arg-type]


def test_a_list_from_toml_becomes_sizes() -> None:
    assert ModelConfig(name="mlp", hidden=[3, 4]).hidden == (3, 4)  # type: ignore[arg-type]
