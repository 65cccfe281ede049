"""`dpfy inspect`: what private training will do with a model, layer by layer, before any data is read."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def inspect(
    model: Annotated[str, typer.Option(help="A model by name: linear, mlp, lenet5, tanh-cnn, scattering-linear.")] = "tanh-cnn",
    shape: Annotated[str, typer.Option(help="Shape of one record, e.g. 1x28x28.")] = "1x28x28",
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    batch_size: Annotated[int, typer.Option(help="Physical batch to plan for.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show every layer's route, its expected cost against plain training, and what is not supported and why.

    Example: dpfy inspect --model tanh-cnn --shape 1x28x28 --batch-size 512
    """
    import torch

    from dpfy.core import check
    from dpfy.core.errors import InvalidInput
    from dpfy.gradients.inspect import inspect as look
    from dpfy.models.build import build
    from dpfy.models.config import ModelConfig

    check.integer("--batch-size", batch_size, least=2)
    try:
        features = tuple(int(side) for side in shape.split("x"))
    except ValueError:
        raise InvalidInput("--shape", shape, "must be whole numbers with x between them, e.g. 1x28x28") from None
    if not all(side > 0 for side in features):
        raise InvalidInput("--shape", shape, "must have positive sides")
    made = build(ModelConfig(name=model), features, check.integer("--classes", classes))
    found = look(made, torch.randn(batch_size, *features))
    print(json.dumps(found.as_dict()) if as_json else found.table())
    raise typer.Exit(1 if found.problems else 0)
