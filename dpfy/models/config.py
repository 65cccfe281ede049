"""Which model to build: one frozen value, all of it public. It becomes the [model] section of a configuration file."""

from __future__ import annotations

from dataclasses import dataclass

from dpfy.core import check
from dpfy.core.errors import InvalidInput

FIELDS_OF_MODEL: dict[str, tuple[str, ...]] = {
    "linear": (),
    "mlp": ("hidden", "activation", "dropout"),
    "lenet5": ("activation",),
    "tanh-cnn": (),
    "scattering-linear": ("groups", "scale"),
}
"""Which fields each model reads. A field set for a model that ignores it is an error: nothing is swallowed."""

MODELS = tuple(FIELDS_OF_MODEL)
ACTIVATIONS = ("tanh", "relu")


@dataclass(frozen=True)
class ModelConfig:
    """A model by name. All fields are public and fixed before the data is seen.

    hidden, activation, dropout: of the multi-layer perceptron (bounded activations keep gradients small, so tanh is the default).
    groups, scale: of the scattering features: groups of channels that are normalised together within one image, and the public
    constant that the features are divided by (5 makes an MNIST image a vector of length about 10, so that little of the clip norm goes
    to the bias). seed: of the initial weights, which are public.
    """

    name: str = "scattering-linear"
    hidden: tuple[int, ...] = (128,)
    activation: str = "tanh"
    dropout: float = 0.0
    groups: int = 27
    scale: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        check.one_of("model.name", self.name, MODELS)
        check.one_of("model.activation", self.activation, ACTIVATIONS)
        if not isinstance(self.hidden, tuple | list):
            raise InvalidInput("model.hidden", self.hidden, "must be a list of sizes")
        object.__setattr__(self, "hidden", tuple(check.integer("model.hidden", size) for size in self.hidden))
        if check.nonnegative("model.dropout", self.dropout) >= 1:
            raise InvalidInput("model.dropout", self.dropout, "must be at least 0 and less than 1")
        if 81 % check.integer("model.groups", self.groups):
            raise InvalidInput("model.groups", self.groups, "must divide the 81 channels of the scattering transform")
        check.positive("model.scale", self.scale)
        check.integer("model.seed", self.seed, least=0)
        for name, field in self.__dataclass_fields__.items():
            if name in ("name", "seed", *FIELDS_OF_MODEL[self.name]) or getattr(self, name) == field.default:
                continue
            allowed = ", ".join(FIELDS_OF_MODEL[self.name]) or "only seed"
            raise InvalidInput(f"model.{name}", getattr(self, name), f"{self.name} does not read it (it reads: {allowed})")
