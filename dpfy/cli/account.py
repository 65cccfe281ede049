"""`dpfy account`: the epsilon of a training run described by its noise, sampling rate and steps."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def account(
    noise_multiplier: Annotated[float, typer.Option(help="Standard deviation of the noise, in units of the clip norm.")],
    delta: Annotated[float, typer.Option(help="The delta of (epsilon, delta); well below 1/records.")],
    sampling_rate: Annotated[float, typer.Option(help="Probability that one example is in a batch (Poisson sampling).")] = 1.0,
    steps: Annotated[int, typer.Option(help="Number of noisy steps.")] = 1,
    accountant: Annotated[str | None, typer.Option(help="How epsilon is computed.")] = None,
    adjacency: Annotated[str, typer.Option(help="Which neighbour is hidden.")] = "add-or-remove-one",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the epsilon that a training run costs."""
    from dpfy import accounting
    from dpfy.core.events import Gaussian, PoissonSampled, Repeated
    from dpfy.core.unit import Adjacency

    name, relation = accountant or accounting.DEFAULT, Adjacency.parse(adjacency)
    event = Repeated(PoissonSampled(sampling_rate, Gaussian(noise_multiplier)), steps)
    curve = accounting.curve(event, adjacency=relation, accountant=name)
    answer = {"epsilon": accounting.epsilon(event, delta, adjacency=relation, accountant=name), "delta": delta}
    lower = curve.epsilon_lower(delta)
    if lower is not None:
        answer["epsilon_lower"] = lower
    rest = {
        "accountant": name,
        "adjacency": relation.value,
        "noise_multiplier": noise_multiplier,
        "sampling_rate": sampling_rate,
        "steps": steps,
    }
    if as_json:
        print(json.dumps(answer | rest))
    else:
        print(f"epsilon {answer['epsilon']:.6g} at delta {delta:g} ({relation.value}, {name} accountant)")
