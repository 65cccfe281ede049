"""`dpfy plan account`: the epsilon of a training run described by its noise, sampling rate and steps, or
by a file of phases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpfy.cli import options
from dpfy.cli.output import tell

ACCOUNTANT = typer.Option(
    help="How epsilon is computed: tight (default), rdp, pld, zcdp, gdp, advanced, basic."
)
ADJACENCY = typer.Option(help="Which change is hidden: add-or-remove-one, replace-one, zero-out.")
SAMPLING = typer.Option(
    help="How batches are formed: poisson, truncated-poisson, without-replacement, "
    "with-replacement, random-allocation, shuffled, buffer-shuffled, fixed-order."
)
Delta = Annotated[float, typer.Option(help="The delta of (epsilon, delta); below 1/records.")]
Noise = Annotated[float, typer.Option(help="Noise (standard deviation) in clip norms.")]
Rate = Annotated[float, typer.Option(help="Probability that one unit is in a batch.")]
Steps = Annotated[int, typer.Option(help="Number of noisy steps.")]


def chosen_delta(delta: float | None, records: int) -> tuple[float, dict[str, str]]:
    """The delta that was given, or that for so many records, and where it came from."""
    from dpfy.core import check
    from dpfy.core.errors import InvalidInput
    from dpfy.core.guarantee import default_delta

    if delta is not None:
        return delta, {}
    if not check.integer("records", records, least=0, most=check.RECORDS):
        raise InvalidInput("--delta", None, "is needed, or --records, from which it is derived")
    told = f"the largest power of ten that is at most 1 / {records}^1.1 and 1e-5"
    return default_delta(records), {"delta_from": told}


def account(
    delta: Annotated[
        float | None,
        typer.Option(
            show_default=False,
            help="The delta of (epsilon, delta); without it derived from --records, as everywhere.",
        ),
    ] = None,
    noise_multiplier: Noise = -1.0,
    sampling_rate: Rate = 1.0,
    steps: Steps = 1,
    sampling: Annotated[str, SAMPLING] = "poisson",
    records: Annotated[int, typer.Option(help="Number of units (fixed-size sampling, delta).")] = 0,
    batch_size: Annotated[int, typer.Option(help="Units in a batch (fixed-size sampling).")] = 0,
    local_epsilon: Annotated[
        float,
        typer.Option(
            help="Reports private one by one, instead of noise: --sampling shuffled (with "
            "--records) or check-ins."
        ),
    ] = 0.0,
    answers: Annotated[
        int,
        typer.Option(help="Answers of shuffled randomised responses; any randomiser without it."),
    ] = 0,
    slots: Annotated[int, typer.Option(help="Slots to check into (check-ins).")] = 0,
    phases: Annotated[
        Path | None,
        typer.Option(
            help=r"TOML file with \[\[phase]] tables: a schedule, or tuning and training."
        ),
    ] = None,
    group_size: Annotated[
        int, typer.Option(help="Units that take part together or not at all.")
    ] = 1,
    accountant: Annotated[str, ACCOUNTANT] = "tight",
    adjacency: Annotated[str, ADJACENCY] = "add-or-remove-one",
    meaning: Annotated[bool, typer.Option(help="Also say what it means for an attacker.")] = False,
    as_json: options.Json = False,
) -> None:
    """Print the epsilon that a training run costs.

    Example: dpfy plan account --noise-multiplier 1.0 --sampling-rate 0.005 --steps 200 --delta 1e-6
    """
    from dpfy.accounting.calculator import account as answer
    from dpfy.accounting.calculator import read
    from dpfy.accounting.patterns import ReportPattern, TrainingPattern
    from dpfy.accounting.user_level import MOST_GROUP
    from dpfy.core import check
    from dpfy.core.errors import InvalidInput

    if local_epsilon and (phases is not None or noise_multiplier >= 0):
        raise InvalidInput(
            "--local-epsilon", local_epsilon, "goes without --noise-multiplier and --phases"
        )
    if phases is None and noise_multiplier < 0 and not local_epsilon:
        raise InvalidInput(
            "--noise-multiplier",
            None,
            "is needed unless --phases names a file or --local-epsilon is given",
        )
    plan: list[TrainingPattern | ReportPattern]
    if local_epsilon:
        plan = [
            ReportPattern(local_epsilon, sampling, records, slots, sampling_rate, steps, answers)
        ]
    elif phases is not None:
        plan = [*read(phases)]
    else:
        plan = [
            TrainingPattern(noise_multiplier, sampling_rate, steps, sampling, records, batch_size)
        ]
    check.integer("--group-size", group_size, most=MOST_GROUP)
    delta, origin = chosen_delta(delta, records)
    result = origin | answer(
        plan,
        delta,
        accountant=accountant,
        adjacency=adjacency,
        meaning=meaning,
        group_size=group_size,
    )
    lower = (
        f" (at least {result['epsilon_lower']:.6g})"
        if result.get("epsilon_lower") is not None
        else ""
    )
    first = (
        f"epsilon {result['epsilon']:.6g}{lower} at delta {delta:g} ({result['adjacency']}, "
        f"{result['accountant']} accountant)"
        + (f", for {group_size} units together" if group_size > 1 else "")
    )
    tell(
        result,
        [first, *(f"  {line}" for line in (*result["assumptions"], *result.get("meaning", ())))],
        as_json=as_json,
    )
