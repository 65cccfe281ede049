"""`dpfy calibrate`: the least noise that reaches a target epsilon."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def calibrate(
    epsilon: Annotated[float, typer.Option(help="The target epsilon.")],
    delta: Annotated[float, typer.Option(help="The target delta.")],
    sampling_rate: Annotated[float, typer.Option(help="Probability that one example is in a batch (Poisson sampling).")] = 1.0,
    steps: Annotated[int, typer.Option(help="Number of noisy steps.")] = 1,
    accountant: Annotated[str | None, typer.Option(help="How epsilon is computed.")] = None,
    adjacency: Annotated[str, typer.Option(help="Which neighbour is hidden.")] = "add-or-remove-one",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the least noise multiplier that reaches a target epsilon."""
    from dpfy import accounting
    from dpfy.core.events import Event, Gaussian, PoissonSampled, Repeated
    from dpfy.core.unit import Adjacency

    name, relation = accountant or accounting.DEFAULT, Adjacency.parse(adjacency)

    def make(noise: float) -> Event:
        return Repeated(PoissonSampled(sampling_rate, Gaussian(noise)), steps)

    noise = accounting.calibrate.noise(make, epsilon, delta, adjacency=relation, accountant=name)
    reached = accounting.epsilon(make(noise), delta, adjacency=relation, accountant=name)
    if as_json:
        print(
            json.dumps(
                {
                    "noise_multiplier": noise,
                    "epsilon": reached,
                    "delta": delta,
                    "accountant": name,
                    "adjacency": relation.value,
                    "sampling_rate": sampling_rate,
                    "steps": steps,
                }
            )
        )
    else:
        print(
            f"noise multiplier {noise:.6g} gives epsilon {reached:.6g} at delta {delta:g} ({relation.value}, {name} accountant)"
        )
