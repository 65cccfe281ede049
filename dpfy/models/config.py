"""Which model to build: one frozen value, all of it public. It becomes the [model] section of a
configuration file.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.settings import setting

FIELDS_OF_MODEL: dict[str, tuple[str, ...]] = {
    "linear": (),
    "mlp": ("hidden", "activation", "dropout"),
    "lenet5": ("activation",),
    "tanh-cnn": (),
    "scattering-linear": ("groups", "scale"),
    "gpt-small": ("width", "layers"),
}
"""Which fields each model reads. A field set for a model that ignores it is an error: nothing is
swallowed.
"""

MODELS = tuple(FIELDS_OF_MODEL)
LANGUAGE = ("gpt-small",)
"""Models of sequences of symbols, which they read to guess each symbol from those before it."""
ACTIVATIONS = ("tanh", "relu")


@dataclass(frozen=True)
class ModelConfig:
    """A model by name. All fields are public and fixed before the data is seen."""

    name: str = setting("scattering-linear", f"Model: {', '.join(MODELS)}.")
    hidden: tuple[int, ...] = setting((128,), "Sizes of the hidden layers (mlp).")
    activation: str = setting(
        "tanh", "tanh or relu (mlp, lenet5): bounded activations keep gradients small."
    )
    dropout: float = setting(0.0, "Share of hidden units left out at random (mlp).")
    groups: int = setting(
        27, "Groups of scattering channels that are normalised together within one image."
    )
    scale: float = setting(
        5.0,
        "Public constant that scattering features are divided by: little of the clip norm goes to "
        "the bias.",
    )
    width: int = setting(128, "Width of a language model, a multiple of 4 (gpt-small).")
    layers: int = setting(4, "Layers of a language model (gpt-small).")
    seed: int = setting(0, "Seed of the initial weights, which are public.")

    def __post_init__(self) -> None:
        check.one_of("model.name", self.name, MODELS)
        check.one_of("model.activation", self.activation, ACTIVATIONS)
        if not isinstance(self.hidden, tuple | list):
            raise InvalidInput("model.hidden", self.hidden, "must be a list of sizes")
        object.__setattr__(
            self, "hidden", tuple(check.integer("model.hidden", size) for size in self.hidden)
        )
        if check.nonnegative("model.dropout", self.dropout) >= 1:
            raise InvalidInput("model.dropout", self.dropout, "must be at least 0 and less than 1")
        if 81 % check.integer("model.groups", self.groups):
            raise InvalidInput(
                "model.groups",
                self.groups,
                "must divide the 81 channels of the scattering transform",
            )
        check.positive("model.scale", self.scale)
        if check.integer("model.width", self.width, most=4096) % 4:
            raise InvalidInput("model.width", self.width, "must be a multiple of 4")
        check.integer("model.layers", self.layers, most=100)
        check.integer("model.seed", self.seed, least=0)
        for name, field in self.__dataclass_fields__.items():
            if (
                name in ("name", "seed", *FIELDS_OF_MODEL[self.name])
                or getattr(self, name) == field.default
            ):
                continue
            allowed = ", ".join(FIELDS_OF_MODEL[self.name]) or "only seed"
            raise InvalidInput(
                f"model.{name}",
                getattr(self, name),
                f"{self.name} does not read it (it reads: {allowed})",
            )
