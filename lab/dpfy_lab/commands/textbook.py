"""`dpfy plan textbook`: formulas of the texts beside what the accountant says. No data is read."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from dpfy.cli.output import tell

app = typer.Typer(
    help="Formulas of the texts, beside what the accountant says. Nothing is charged by them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
NOISE = typer.Option(help="Standard deviation of the noise in units of the clip norm.")
RATE = typer.Option(help="Probability that one unit is in a batch.")
STEPS = typer.Option(help="Number of noisy steps.")
EPSILON = typer.Option(help="The epsilon.")
DELTA = typer.Option(help="The delta of (epsilon, delta).")
JSON = typer.Option("--json", help="Print one JSON object.")


def _told(answer: dict[str, Any], as_json: bool) -> None:
    """A row in each line; figures with six digits."""

    def words(row: dict[str, Any]) -> str:
        return ", ".join(
            f"{key.replace('_', ' ')} {value:.6g}" if isinstance(value, float) else str(value)
            for key, value in row.items()
        )

    lines: list[str] = []
    for key, value in answer.items():
        rows = value if isinstance(value, list) else [value]
        for row in rows:
            name = f"{key}: " if isinstance(value, dict) else ""
            lines.append(name + words(row) if isinstance(row, dict) else words({key: row}))
    tell(answer, lines, as_json=as_json)


@app.command()
def conversions(
    noise_multiplier: Annotated[float, NOISE],
    delta: Annotated[float, DELTA],
    sampling_rate: Annotated[float, RATE] = 1.0,
    steps: Annotated[int, STEPS] = 1,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """The rows of the guide's table 2 as numbers: two compositions, plain and optimal Rényi
    conversion, and the tight bound.
    """
    from dpfy_lab import textbook

    rows = textbook.conversions(noise_multiplier, sampling_rate, steps, delta)
    _told({"bounds": rows}, as_json)


@app.command()
def loss(
    noise_multiplier: Annotated[float, NOISE],
    epsilon: Annotated[float, EPSILON],
    sampling_rate: Annotated[float, RATE] = 1.0,
    steps: Annotated[int, STEPS] = 1,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """The chance that the privacy loss exceeds epsilon: Key Results 1 and 2 of the building-blocks
    text.
    """
    from dpfy_lab import textbook

    _told({**textbook.loss_tail(noise_multiplier, sampling_rate, steps, epsilon)}, as_json)


@app.command()
def rules(
    epsilon: Annotated[float, EPSILON],
    delta: Annotated[float, DELTA],
    sampling_rate: Annotated[float, RATE] = 1.0,
    steps: Annotated[int, STEPS] = 1,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Noise multipliers by the rules of the texts, Algorithm 1 among them, and what they cost."""
    from dpfy_lab import textbook

    _told({"rules": textbook.noise_rules(epsilon, delta, sampling_rate, steps)}, as_json)


@app.command()
def mean(
    records: Annotated[int, typer.Option(help="Number of records.")] = 10_000,
    sample: Annotated[int, typer.Option(help="Expected records of a sample.")] = 250,
    most: Annotated[float, typer.Option(help="The largest value.")] = 1e6,
    epsilon: Annotated[float, EPSILON] = 0.5,
    delta: Annotated[float, DELTA] = 1e-6,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Noise on a private mean of all records, and of a sample: the salaries of the building-blocks
    text.
    """
    from dpfy_lab import textbook

    _told({**textbook.private_mean(records, sample, most, epsilon, delta)}, as_json)


@app.command()
def risk(
    records: Annotated[int, typer.Option(help="Number of records.")],
    dimension: Annotated[int, typer.Option(help="Number of parameters.")],
    epsilon: Annotated[float, EPSILON] = 1.0,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Rates of excess risk of the guide, section 4.2.1, without constants."""
    from dpfy_lab import textbook

    _told({**textbook.excess_risk(records, dimension, epsilon)}, as_json)


@app.command()
def scale(
    noise_multiplier: Annotated[float, NOISE],
    batch_size: Annotated[float, typer.Option(help="Expected records in a batch.")],
    records: Annotated[int, typer.Option(help="Number of records.")],
    delta: Annotated[float, DELTA],
    factor: Annotated[float, typer.Option(help="Batch and noise are multiplied by it.")] = 2.0,
    steps: Annotated[int, STEPS] = 1,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """The guide's scaling law: batch and noise times one factor, and what both cost."""
    from dpfy_lab import textbook

    rows = textbook.scaled(noise_multiplier, batch_size, factor, records, steps, delta)
    _told({"plans": rows}, as_json)


@app.command()
def norms(
    dimension: Annotated[int, typer.Option(help="Number of parameters.")],
    epsilon: Annotated[float, EPSILON],
    delta: Annotated[float, DELTA],
    sampling_rate: Annotated[float, RATE] = 1.0,
    steps: Annotated[int, STEPS] = 1,
    spread: Annotated[
        float,
        typer.Option(
            help="L1 norm of a gradient over its L2 norm; 0: that of Gaussian coordinates."
        ),
    ] = 0.0,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """L1 clipping with Laplace noise against L2 clipping with Gaussian noise, at one guarantee."""
    from dpfy_lab import textbook

    usual = max(1.0, math.sqrt(2 * dimension / math.pi))
    found = textbook.norms(dimension, epsilon, delta, sampling_rate, steps, spread or usual)
    _told({**found}, as_json)
