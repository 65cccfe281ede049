"""`dpfy plan compare`: bounds and tuning routes side by side, as a table, as JSON, as a picture."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfy.cli import options
from dpfy.cli.account import ADJACENCY, Delta, Noise, Rate, Steps
from dpfy.cli.output import require_writable, save, tell
from dpfy.cli.plugins import group

app = group(
    """Compare bounds, tuning routes, mechanisms and more, side by side.

    Example: dpfy plan compare bounds --noise-multiplier 1 --steps 10 --delta 1e-6"""
)
PLOT = typer.Option(help="Also draw the table as an SVG file.")
TUNED_STEPS = 10_000_000
"""The longest run whose tuning is priced: beyond it the routes take minutes to compute."""
SVG = {".svg": (b"<?xml",)}


@app.command()
def bounds(
    noise_multiplier: Noise,
    delta: Delta,
    sampling_rate: Rate = 1.0,
    steps: Steps = 1,
    adjacency: Annotated[str, ADJACENCY] = "add-or-remove-one",
    plot: Annotated[Path | None, PLOT] = None,
    as_json: options.Json = False,
) -> None:
    """Print every bound on epsilon for one training run, tightest first.

    Example: dpfy plan compare bounds --noise-multiplier 1 --steps 10 --delta 1e-6
    """
    from dpfy.accounting import calculator
    from dpfy.accounting.patterns import TrainingPattern

    if plot is not None:
        require_writable("--plot", plot, SVG)
    rows = calculator.bounds(
        [TrainingPattern(noise_multiplier, sampling_rate, steps)], delta, adjacency
    )
    if plot is not None:
        draw(
            plot,
            [(row["accountant"], row["epsilon"]) for row in rows if row["epsilon"] is not None],
            f"epsilon at delta {delta:g}",
        )
    values = ["-" if row["epsilon"] is None else f"{row['epsilon']:.6g}" for row in rows]
    lines = [
        f"{row['accountant']:<16} {value:>12}  {row['kind']}"
        for row, value in zip(rows, values, strict=True)
    ]
    tell({"delta": delta, "adjacency": adjacency, "bounds": rows}, lines, as_json=as_json)


@app.command()
def tuning(
    noise_multiplier: Noise,
    delta: Delta,
    sampling_rate: Rate = 1.0,
    steps: Steps = 1,
    trials: Annotated[int, typer.Option(help="How many settings are tried (on average).")] = 100,
    adjacency: Annotated[str, ADJACENCY] = "add-or-remove-one",
    plot: Annotated[Path | None, PLOT] = None,
    as_json: options.Json = False,
) -> None:
    """Print what tuning costs by every proven route, cheapest first, and what the guide prints
    without a proof.

    Example: dpfy plan compare tuning --noise-multiplier 1 --steps 10 --delta 1e-6 --trials 20
    """
    from dpfy.accounting.patterns import TrainingPattern
    from dpfy.accounting.tuning import printed, routes
    from dpfy.core import check
    from dpfy.core.unit import Adjacency

    if plot is not None:
        require_writable("--plot", plot, SVG)
    check.integer("steps", steps, least=0, most=TUNED_STEPS)
    check.integer("trials", trials, most=TUNED_STEPS)
    event = TrainingPattern(noise_multiplier, sampling_rate, steps).claim().event
    among = Adjacency.parse(adjacency)
    found = routes(event, trials, delta, adjacency=among)
    if plot is not None:
        label = f"epsilon at delta {delta:g}"
        draw(plot, [(route.name, route.epsilon) for route in found], label)
    claimed = printed(event, trials, delta, adjacency=among)
    told, lines = priced(found, claimed)
    tell({"delta": delta, "trials": trials} | told, lines, as_json=as_json)


def priced(found: Sequence[Any], claimed: Any) -> tuple[dict[str, Any], list[str]]:
    """What the routes of a search cost, and what is printed elsewhere without a proof: as JSON, and
    as lines.
    """
    rows = [{"route": one.name, "epsilon": one.epsilon, "note": one.note} for one in found]
    lines = [f"{one.name:<42} {one.epsilon:>10.4f}  {one.note}" for one in found]
    lines += ["", f"{claimed.name:<42} {claimed.figure:>10.4f}  {claimed.note}"]
    told = {"cheapest": found[0].name, "routes": rows, "not_a_guarantee": claimed.to_json()}
    return told, lines


def draw(path: Path, rows: list[tuple[str, float]], label: str) -> None:
    """Horizontal bars, one a row, on a logarithmic axis where the values span decades."""
    import matplotlib

    from dpfy.core.errors import InvalidInput

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = [(name, value) for name, value in rows if math.isfinite(value)]
    if not rows:
        raise InvalidInput("--plot", str(path), "there is no finite bound to draw")
    figure, axes = pyplot.subplots(figsize=(7, 0.4 * len(rows) + 1), layout="constrained")
    values = [value for _, value in rows]
    bars = axes.barh([name for name, _ in rows], values)
    axes.bar_label(bars, fmt="%.4g", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    if min(values) > 0 and max(values) / min(values) > 20:
        axes.set_xscale("log")
    axes.margins(x=0.15)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg")
    pyplot.close(figure)
    save("--plot", path, drawn.getvalue())
