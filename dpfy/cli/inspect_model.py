"""`dpfy inspect`: what private training will do with a model, layer by layer, before any data is
read.
"""

from __future__ import annotations

from typing import Annotated

import typer

from dpfy.cli import options
from dpfy.cli.output import tell

SAMPLE = 4
"""Records that the model is tried on; the batch to plan for is only counted with."""

MEASURED_NUMBERS = 2**27
"""Numbers in a batch that is made up to be measured, at most."""


def inspect(
    model: Annotated[
        str, typer.Option(help="A model by name: linear, mlp, lenet5, tanh-cnn, scattering-linear.")
    ] = "tanh-cnn",
    shape: Annotated[str, typer.Option(help="Shape of one record, e.g. 1x28x28.")] = "1x28x28",
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    batch_size: Annotated[int, typer.Option(help="Physical batch to plan for.")] = 256,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Run plain and private steps in turns on random records: time and peak memory.",
        ),
    ] = False,
    diagnose: Annotated[
        bool,
        typer.Option(
            "--diagnose",
            help="Train on generated records without clipping and noise, with clipping, with both.",
        ),
    ] = False,
    records: Annotated[int, typer.Option(help="Records to generate (diagnose).")] = 1000,
    steps: Annotated[int, typer.Option(help="Steps of each training (diagnose).")] = 40,
    epsilon: Annotated[float, typer.Option(help="What the run may cost (diagnose).")] = 3.0,
    delta: Annotated[float, typer.Option(help="Delta (diagnose).")] = 1e-4,
    clip_norm: Annotated[float, typer.Option(help="Clipping norm (diagnose).")] = 1.0,
    learning_rate: Annotated[float, typer.Option(help="Of SGD (diagnose).")] = 0.5,
    as_json: options.Json = False,
) -> None:
    """Show every layer's route, its expected cost against plain training, and what is not supported
    and why; with --diagnose, why a private model does not learn.

    Expected costs are counted arithmetic. With --measure some seconds of plain and private steps of
    the whole batch tell what this machine really takes for both, without noise and update. For a
    model of your own: dpfy.inspect(model, sample, measure=True).

    Example: dpfy inspect --model tanh-cnn --shape 1x28x28 --batch-size 512 --measure
    """
    import torch

    from dpfy.core import check
    from dpfy.core.errors import InvalidInput
    from dpfy.gradients.model_report import inspect as look
    from dpfy.models.build import build
    from dpfy.models.config import LANGUAGE, ModelConfig
    from dpfy.models.features import full_model

    check.integer("--batch-size", batch_size, least=2, most=2**31)
    try:
        sides = [int(side) for side in shape.split("x", check.SIDES)]
    except ValueError:
        raise InvalidInput(
            "--shape", shape, "must be whole numbers with x between them, e.g. 1x28x28"
        ) from None
    features = check.shape("--shape", sides)
    config = ModelConfig(name=model)
    made = full_model(config, build(config, features, check.integer("--classes", classes, least=2)))
    most = max(MEASURED_NUMBERS // torch.Size(features).numel(), 2) if measure else SAMPLE
    many = (
        check.integer("--batch-size", batch_size, most=most) if measure else min(batch_size, SAMPLE)
    )
    sample = torch.randn(many, *features)
    if model in LANGUAGE:
        sample = torch.randint(0, classes, (many, *features))
    if diagnose:
        from dpfy.plan.recipe import dpsgd
        from dpfy.training.diagnosis import diagnose as dry_run
        from dpfy.training.diagnosis import generated

        if model in LANGUAGE:
            raise InvalidInput("--diagnose", model, "is for classifiers: choose another --model")
        count = check.integer("--records", records, least=20, most=10**6)
        batch = min(batch_size, count)
        recipe = dpsgd(records=count, batch_size=batch, steps=steps, clip_norm=clip_norm)
        plan = recipe.calibrate(epsilon=epsilon, delta=delta)
        x, y = generated(tuple(features), classes, count + max(count // 2, 50))
        judged = dry_run(
            made, (x[:count], y[:count]), (x[count:], y[count:]), plan, learning_rate=learning_rate
        )
        tell(judged.as_dict(), f"{plan}\n{judged}", as_json=as_json)
        raise typer.Exit(0 if all(verdict.fine for verdict in judged.verdicts()) else 1)
    found = look(made, sample, batch_size, measure)
    tell(found.as_dict(), found.table(), as_json=as_json)
    raise typer.Exit(1 if found.problems else 0)
