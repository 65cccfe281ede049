"""`dpfy compare`: bounds and tuning routes side by side, as a table, as JSON, as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dpfy.cli.account import ADJACENCY

app = typer.Typer(help="Compare bounds, tuning routes and more, side by side.", no_args_is_help=True)
PLOT = typer.Option(help="Also draw the table as an SVG file.")


@app.command()
def bounds(
    noise_multiplier: Annotated[float, typer.Option(help="Standard deviation of the noise in units of the clip norm.")],
    delta: Annotated[float, typer.Option(help="The delta of (epsilon, delta).")],
    sampling_rate: Annotated[float, typer.Option(help="Probability that one unit is in a batch.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Number of noisy steps.")] = 1,
    adjacency: Annotated[str, ADJACENCY] = "add-or-remove-one",
    plot: Annotated[Path | None, PLOT] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print every bound on epsilon for one training run, tightest first."""
    from dpfy.accounting import answers
    from dpfy.accounting.patterns import Training

    rows = answers.bounds([Training(noise_multiplier, sampling_rate, steps)], delta, adjacency)
    if plot is not None:
        _draw(plot, [(row["accountant"], row["epsilon"]) for row in rows if row["epsilon"] is not None], delta)
    if as_json:
        print(json.dumps({"delta": delta, "adjacency": adjacency, "bounds": rows}))
        return
    for row in rows:
        value = "-" if row["epsilon"] is None else f"{row['epsilon']:.6g}"
        print(f"{row['accountant']:<16} {value:>12}  {row['kind']}")


@app.command()
def tuning(
    noise_multiplier: Annotated[float, typer.Option(help="Noise of one run, in units of the clip norm.")],
    delta: Annotated[float, typer.Option(help="The delta of (epsilon, delta).")],
    sampling_rate: Annotated[float, typer.Option(help="Probability that one unit is in a batch.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Number of noisy steps of one run.")] = 1,
    trials: Annotated[int, typer.Option(help="How many settings are tried (on average).")] = 100,
    adjacency: Annotated[str, ADJACENCY] = "add-or-remove-one",
    plot: Annotated[Path | None, PLOT] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print what tuning costs by every route, cheapest first."""
    from dpfy.accounting.patterns import Training
    from dpfy.accounting.tuning import routes
    from dpfy.core.unit import Adjacency

    event = Training(noise_multiplier, sampling_rate, steps).claim().event
    found = routes(event, trials, delta, adjacency=Adjacency.parse(adjacency))
    if plot is not None:
        _draw(plot, [(route.name, route.epsilon) for route in found], delta)
    if as_json:
        rows = [{"route": route.name, "epsilon": route.epsilon, "note": route.note} for route in found]
        print(json.dumps({"delta": delta, "trials": trials, "cheapest": found[0].name, "routes": rows}))
        return
    for route in found:
        print(f"{route.name:<42} {route.epsilon:>10.4f}  {route.note}")


def _draw(path: Path, rows: list[tuple[str, float]], delta: float) -> None:
    """Horizontal bars, one a row, on a logarithmic axis where the values span decades."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 0.4 * len(rows) + 1), layout="constrained")
    values = [value for _, value in rows]
    bars = axes.barh([name for name, _ in rows], values)
    axes.bar_label(bars, fmt="%.4g", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel(f"epsilon at delta {delta:g}")
    if min(values) > 0 and max(values) / min(values) > 20:
        axes.set_xscale("log")
    axes.margins(x=0.15)
    figure.savefig(path, format="svg")
    pyplot.close(figure)
