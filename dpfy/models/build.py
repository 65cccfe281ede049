"""Models by a fixed table. Weights start from a public seed; linear heads start at zero."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import nn

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.models.config import LANGUAGE, ModelConfig
from dpfy.models.features import feature_shape
from dpfy.models.language import BYTES, ByteTransformer

MOST_PARAMETERS = 2**27
"""Of a model by name; larger ones are made by hand and trained with
:class:`dpfy.PrivateTraining`.
"""
ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


def build(config: ModelConfig, features: tuple[int, ...], classes: int) -> nn.Module:
    """The trainable model for raw records of shape `features`.

    When :func:`dpfy.models.features.features` gives a function, the model built here reads what
    that function returns.

    Guarantees: no layer mixes examples and none keeps statistics; the initial weights are a
    function of (config, features, classes) alone; torch's global generator is left as it was.
    """
    check.integer("classes", classes, least=2)
    sides = check.shape("features", features)
    require_fits(config, sides, classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return BUILDERS[config.name](config, sides, classes)


def require_fits(config: ModelConfig, features: tuple[int, ...], classes: int) -> None:
    """Refuse a model that would not fit in memory, by counting its parameters where none is
    allocated.
    """
    if _at_most(config, features, classes) <= MOST_PARAMETERS:
        return
    try:
        with torch.device("meta"):
            count = sum(
                p.numel() for p in BUILDERS[config.name](config, features, classes).parameters()
            )
    except RuntimeError:  # sizes whose product is no size
        count = MOST_PARAMETERS + 1
    if count > MOST_PARAMETERS:
        seen = f"records of shape {features}, {classes} classes"
        raise InvalidInput(
            "model.name", seen, f"{config.name} would have more than {MOST_PARAMETERS} parameters"
        )


def _at_most(config: ModelConfig, features: tuple[int, ...], classes: int) -> int:
    """A quick bound on the parameters: widths of fully connected layers; of a convolutional part,
    more than it can give.
    """
    if config.name in LANGUAGE:
        wide = max(config.width, classes, *features)
        return 13 * config.layers * wide**2 + 4 * wide**2
    if config.name in ("lenet5", "tanh-cnn"):
        widths = [32 * math.prod(features), 120, 120, classes]
    else:
        widths = [
            math.prod(feature_shape(config, features)),
            *(config.hidden if config.name == "mlp" else ()),
            classes,
        ]
    return sum(a * b + b for a, b in itertools.pairwise(widths)) + 1000 * features[0]


def _linear(config: ModelConfig, features: tuple[int, ...], classes: int) -> nn.Module:
    shape = feature_shape(config, features)
    head = nn.Linear(math.prod(shape), classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(nn.Flatten(), head) if len(shape) > 1 else head


def _mlp(config: ModelConfig, features: tuple[int, ...], classes: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()] if len(features) > 1 else []
    width = math.prod(features)
    for size in config.hidden:
        layers += [nn.Linear(width, size), ACTIVATIONS[config.activation]()]
        if config.dropout > 0:
            layers.append(nn.Dropout(config.dropout))
        width = size
    return nn.Sequential(*layers, nn.Linear(width, classes))


def _lenet5(config: ModelConfig, features: tuple[int, ...], classes: int) -> nn.Module:
    """LeCun et al. 1998, with average pooling. An image of 28 x 28 is padded to the 32 x 32 that it
    was made for.
    """
    activation = ACTIVATIONS[config.activation]
    body = nn.Sequential(
        nn.Conv2d(_channels(features), 6, 5, padding=2), activation(), nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5), activation(), nn.AvgPool2d(2), nn.Flatten(),
    )  # fmt: skip
    width = _width(body, features)
    tail = (
        nn.Linear(width, 120),
        activation(),
        nn.Linear(120, 84),
        activation(),
        nn.Linear(84, classes),
    )
    return nn.Sequential(*body, *tail)


def _tanh_cnn(config: ModelConfig, features: tuple[int, ...], classes: int) -> nn.Module:
    """A small CNN with bounded activations (Papernot et al. 2021; Tramer & Boneh 2021): 26,010
    parameters on 28 x 28 images.
    """
    body = nn.Sequential(
        nn.Conv2d(_channels(features), 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Flatten(),
    )  # fmt: skip
    width = _width(body, features)
    return nn.Sequential(*body, nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, classes))


def _gpt_small(config: ModelConfig, features: tuple[int, ...], classes: int) -> nn.Module:
    """A causal transformer: bytes to the logits of what follows each."""
    if len(features) != 1 or classes != BYTES:
        seen = f"records of shape {features}, {classes} classes"
        raise InvalidInput("model.name", seen, f"{config.name} reads sequences of bytes: text")
    return ByteTransformer(features[0], tokens=classes, width=config.width, layers=config.layers)


def _channels(features: tuple[int, ...]) -> int:
    if len(features) != 3:
        raise InvalidInput(
            "model.name",
            f"records of shape {features}",
            "a convolutional model needs (channels, height, width)",
        )
    return features[0]


def _width(body: nn.Module, features: tuple[int, ...]) -> int:
    """Number of values that the convolutional part gives for one record, found by running it on
    zeros.
    """
    try:
        with torch.no_grad():
            return int(body(torch.zeros(1, *features)).shape[1])
    except RuntimeError:
        raise InvalidInput(
            "model.name", f"records of shape {features}", "images are too small for this model"
        ) from None


BUILDERS: dict[str, Callable[[ModelConfig, tuple[int, ...], int], nn.Module]] = {
    "linear": _linear,
    "scattering-linear": _linear,
    "mlp": _mlp,
    "lenet5": _lenet5,
    "tanh-cnn": _tanh_cnn,
    "gpt-small": _gpt_small,
}
