"""`dpfy plan calibrate`: the least noise, the most steps, epochs or units in a batch, the fewest records,
or the largest clip norm, that reaches a target epsilon.
"""

from __future__ import annotations

from typing import Annotated

import typer

from dpfy.cli import options
from dpfy.cli.account import ACCOUNTANT, ADJACENCY, SAMPLING, Rate, Steps, chosen_delta
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
    sampling_rate: Rate = 1.0,
    steps: Steps = 1,
    noise_multiplier: Annotated[
        float, typer.Option(help="Fixed noise, when --solve asks for something else.")
    ] = 0.0,
    solve: Annotated[
        str,
        typer.Option(
            help="What to find: noise, steps, epochs, batch-size, records, or clip-norm (for "
            "--stddev)."
        ),
    ] = "noise",
    stddev: Annotated[
        float, typer.Option(help="Noise on the sum of clipped gradients, for --solve clip-norm.")
    ] = 0.0,
    sampling: Annotated[str, SAMPLING] = "poisson",
    records: Annotated[
        int, typer.Option(help="Number of units (fixed-size sampling, --solve, delta).")
    ] = 0,
    batch_size: Annotated[
        int, typer.Option(help="Units in a batch (fixed-size sampling, --solve).")
    ] = 0,
    accountant: Annotated[str, ACCOUNTANT] = "tight",
    adjacency: Annotated[str, ADJACENCY] = "add-or-remove-one",
    as_json: options.Json = False,
) -> None:
    """Print the least noise multiplier that reaches a target epsilon, or limits an attack (--tpr
    0.02 --at-fpr 0.01).

    Example: dpfy plan calibrate --epsilon 1 --delta 1e-6 --sampling-rate 0.05 --steps 200
    """
    from dpfy.accounting import calculator, planning
    from dpfy.accounting.interpretation import AttackTarget
    from dpfy.accounting.patterns import TrainingPattern
    from dpfy.core import check
    from dpfy.core.errors import InvalidInput

    check.one_of("solve", solve, ("noise", "clip-norm", *planning.UNKNOWNS))
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
    delta, origin = chosen_delta(delta, records if solve != "records" else 0)
    plan = TrainingPattern(
        noise_multiplier or 1.0, sampling_rate, steps, sampling, records, batch_size
    )
    within = f"epsilon {epsilon:g} at delta {delta:g}"
    names = {"accountant": accountant, "adjacency": adjacency}
    if solve in ("noise", "clip-norm"):
        if solve == "noise":
            result = calculator.calibrate(plan, epsilon, delta, **names)
            text = ""
        else:
            result = calculator.clip_norm(plan, stddev, epsilon, delta, **names)
            text = f"clip norm {result['clip_norm']:.6g} with noise {stddev:g} on the sum: "
        text += (
            f"noise multiplier {result['noise_multiplier']:.6g} gives epsilon "
            f"{result['epsilon']:.6g} at delta {delta:g}"
        )
    else:
        check.positive("noise_multiplier", noise_multiplier)
        result = calculator.solve(solve, plan, epsilon, delta, **names)
        found = result[solve.replace("-", "_")]
        text = {
            "steps": f"{found} steps stay within {within}",
            "epochs": f"{found} epochs stay within {within}",
            "batch-size": f"batches of {found} (expected) stay within {within}",
            "records": f"{found} records are enough for {within}"
            if found
            else f"no number of records is enough for {within}",
        }[solve]
    result = origin | result
    tell(result, text, as_json=as_json)
