"""`dpfy plan calibrate`: the least noise, or the largest batch or number of steps, that reaches a target
epsilon.
"""

from __future__ import annotations

from typing import Annotated

import typer

from dpfy.cli.account import ACCOUNTANT, ADJACENCY, SAMPLING
from dpfy.cli.output import tell


def calibrate(
    epsilon: Annotated[
        float | None, typer.Option(show_default=False, help="The target epsilon.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(show_default=False, help="The target delta.")
    ] = None,
    advantage: Annotated[
        float | None,
        typer.Option(
            show_default=False,
            help="Instead of epsilon: the most by which an attack's true-positive rate may exceed "
            "its false-positive rate.",
        ),
    ] = None,
    tpr: Annotated[
        float | None,
        typer.Option(
            show_default=False,
            help="Instead of epsilon: the highest true-positive rate of an attack, with --at-fpr.",
        ),
    ] = None,
    at_fpr: Annotated[
        float | None, typer.Option(show_default=False, help="The false-positive rate of --tpr.")
    ] = None,
    reconstruction: Annotated[
        float | None,
        typer.Option(
            show_default=False,
            help="Instead of epsilon: the highest chance to reconstruct a record, with --prior.",
        ),
    ] = None,
    prior: Annotated[
        float | None,
        typer.Option(show_default=False, help="The chance to guess it without the release."),
    ] = None,
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
    """Print the least noise multiplier that reaches a target epsilon, or limits an attack.

    Example: dpfy plan calibrate --epsilon 1 --delta 1e-6 --sampling-rate 0.05 --steps 200

    Example: dpfy plan calibrate --tpr 0.02 --at-fpr 0.01 --sampling-rate 0.05 --steps 200
    """
    from dpfy.accounting import calculator, planning
    from dpfy.accounting.interpretation import AttackTarget
    from dpfy.accounting.patterns import TrainingPattern
    from dpfy.core import check
    from dpfy.core.errors import InvalidInput

    check.one_of("solve", solve, ("noise", "steps", "batch-size"))
    targets = (advantage, tpr, reconstruction)
    if sum(one is not None for one in (epsilon, *targets)) != 1:
        raise InvalidInput(
            "--epsilon", epsilon, "give one of --epsilon, --advantage, --tpr and --reconstruction"
        )
    for name, success, at in (("--at-fpr", tpr, at_fpr), ("--prior", reconstruction, prior)):
        if (success is None) != (at is None):
            raise InvalidInput(name, at, "goes with --tpr (--at-fpr) or --reconstruction (--prior)")
    if epsilon is None:
        if solve != "noise":
            raise InvalidInput("--solve", solve, "goes with --epsilon")
        plan = TrainingPattern(1.0, sampling_rate, steps, sampling, records, batch_size)
        success = next(one for one in targets if one is not None)
        result = calculator.calibrate_risk(
            plan,
            AttackTarget(success, at_fpr if tpr is not None else prior),
            delta,
            accountant=accountant,
            adjacency=adjacency,
        )
        limit = "an advantage" if advantage is not None else "a true-positive rate"
        at_rate = f" at a false-positive rate of {at_fpr:g}" if tpr is not None else ""
        if reconstruction is not None:
            limit, at_rate = "a chance of reconstruction", f" (guessing: {prior:g})"
        text = (
            f"noise multiplier {result['noise_multiplier']:.6g} keeps attacks to {limit} of "
            f"{result['reached']:.6g}{at_rate}"
        )
        tell(result, text, as_json=as_json)
        return
    if delta is None:
        raise InvalidInput("--delta", None, "is needed with --epsilon")
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
