"""`dpfy plan compare mechanisms`: every proven way to add noise, calibrated to one guarantee, least
error first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpfy.cli import options
from dpfy.cli.output import PICTURE, require_writable, save, tell


def mechanisms(
    records: Annotated[int, typer.Option(help="Public number of training records.")],
    batch_size: Annotated[float, typer.Option(help="Mean size of a batch.")],
    steps: Annotated[int, typer.Option(help="Noisy steps.")],
    epsilon: Annotated[float, typer.Option(help="Epsilon that every mechanism is calibrated to.")],
    delta: Annotated[float, typer.Option(help="Delta; below 1/records.")],
    sampling: Annotated[
        str, typer.Option(help="any, poisson or fixed-order: what can be done with your data.")
    ] = "any",
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw C, its inverse and the accumulation of noise into this file (SVG, PNG)."
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Compare mechanisms at one guarantee by the error they leave in the sums of mean gradients
    (clip norm 1). Looks at no data.

    Example: dpfy plan compare mechanisms --records 60000 --batch-size 2048 --steps 200
    --epsilon 3 --delta 1e-6
    """
    from dpfy.core import check
    from dpfy.plan.auto import SAMPLINGS, CalibrationTarget, compare

    check.one_of("sampling", sampling, SAMPLINGS)
    if plot is not None:
        require_writable("--plot", plot, PICTURE)
    found = compare(
        records, batch_size, steps, CalibrationTarget(epsilon, delta), sampling=sampling
    )
    if plot is not None:
        from dpfy.plan.pictures import draw

        save("--plot", plot, draw(found, plot.suffix[1:].lower()))
    rows = [candidate.to_json() for candidate in found]
    setting = {
        "records": records,
        "batch_size": batch_size,
        "steps": steps,
        "epsilon": epsilon,
        "delta": delta,
    }
    picture = [] if plot is None else [f"picture: {plot}"]
    tell(
        setting | {"sampling": sampling, "mechanisms": rows},
        [HEAD, *map(_line, rows), *picture],
        as_json=as_json,
    )


HEAD = f"{'mechanism':<20}{'sampling':<16}{'noise':>10}{'noise std':>12}{'rmse':>12}{'max error':>12}{'buffers':>9}"


def _line(row: dict[str, Any]) -> str:
    numbers = f"{row['noise_multiplier']:>10.4f}{row['noise_std']:>12.4f}{row['rmse']:>12.6f}{row['max_error']:>12.6f}"
    return f"{row['mechanism']:<20}{row['sampling']:<16}{numbers}{row['buffers']:>9}"
