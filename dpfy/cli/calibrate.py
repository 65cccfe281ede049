"""`dpfy plan calibrate`: the least noise, or the largest batch or number of steps, that reaches a target
epsilon.
"""

from __future__ import annotations

from typing import Annotated

import typer

from dpfy.cli.account import ACCOUNTANT, ADJACENCY, SAMPLING
from dpfy.cli.output import tell


def calibrate(
    epsilon: Annotated[float, typer.Option(help="The target epsilon.")],
    delta: Annotated[float, typer.Option(help="The target delta.")],
    sampling_rate: Annotated[
        float, typer.Option(help="Probability that one unit is in a batch.")
    ] = 1.0,
    steps: Annotated[int, typer.Option(help="Number of noisy steps.")] = 1,
    noise_multiplier: Annotated[
        float, typer.Option(help="Fixed noise, when --solve asks for something else.")
    ] = 0.0,
    solve: Annotated[str, typer.Option(help="What to find: noise, steps or batch-size.")] = "noise",
    sampling: Annotated[str, SAMPLING] = "poisson",
    records: Annotated[
        int, typer.Option(help="Number of units (fixed-size sampling, batch size).")
    ] = 0,
    batch_size: Annotated[int, typer.Option(help="Units in a batch (fixed-size sampling).")] = 0,
    accountant: Annotated[str, ACCOUNTANT] = "tight",
    adjacency: Annotated[str, ADJACENCY] = "add-or-remove-one",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the least noise multiplier that reaches a target epsilon.

    Example: dpfy plan calibrate --epsilon 1 --delta 1e-6 --sampling-rate 0.05 --steps 200
    """
    from dpfy.accounting import calculator, planning
    from dpfy.accounting.patterns import TrainingPattern
    from dpfy.core import check

    check.one_of("solve", solve, ("noise", "steps", "batch-size"))
    if solve == "noise":
        plan = TrainingPattern(1.0, sampling_rate, steps, sampling, records, batch_size)
        result = calculator.calibrate(
            plan, epsilon, delta, accountant=accountant, adjacency=adjacency
        )
        text = (
            f"noise multiplier {result['noise_multiplier']:.6g} gives epsilon "
            f"{result['epsilon']:.6g} at delta {delta:g}"
        )
    elif solve == "steps":
        found = planning.steps(
            epsilon, noise_multiplier, sampling_rate, delta, accountant=accountant
        )
        result = {
            "steps": found,
            "target_epsilon": epsilon,
            "delta": delta,
            "noise_multiplier": noise_multiplier,
        }
        text = f"{found} steps stay within epsilon {epsilon:g} at delta {delta:g}"
    else:
        found = planning.batch_size(
            epsilon, noise_multiplier, steps, delta, records=records, accountant=accountant
        )
        result = {
            "batch_size": found,
            "target_epsilon": epsilon,
            "delta": delta,
            "noise_multiplier": noise_multiplier,
        }
        text = f"batches of {found} (expected) stay within epsilon {epsilon:g} at delta {delta:g}"
    tell(result, text, as_json=as_json)
