"""`dpfy plan compare local`: local protocols for frequencies at one guarantee, least error first."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dpfy.cli import options
from dpfy.cli.output import tell


def local(
    epsilon: Annotated[
        float, typer.Option(help="Epsilon of one report; behind a shuffler, of all of them.")
    ],
    values: Annotated[
        int, typer.Option(help="How many values there are, of which each person has one.")
    ],
    reports: Annotated[int, typer.Option(help="How many people report.")] = 10_000,
    shuffler: Annotated[
        str | None, typer.Option(help="Who shuffles the reports, if anybody is trusted to.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Delta behind the shuffler.")] = None,
    as_json: options.Json = False,
) -> None:
    """Compare local protocols by the error they leave in the share of one value. Looks at no data.

    Without --shuffler nobody is trusted, and nothing is gained from the number of reports. With it,
    who is named is trusted to put the reports in a random order and to show nobody who sent which.

    Example: dpfy plan compare local --epsilon 2 --values 100 --reports 100000
    """
    from dpfy.core import check
    from dpfy.core.errors import InvalidInput
    from dpfy.local.choice import compare, compare_shuffled

    if (shuffler is None) != (delta is None):
        raise InvalidInput(
            "--delta",
            delta,
            "must be given with --shuffler, and only with it: a local guarantee has no delta",
        )
    if shuffler is None or delta is None:
        found, trusted = compare(epsilon, values, reports), "nobody but one's own device"
    else:
        trusted = f"one's own device, and the shuffler: {check.one_line('--shuffler', shuffler)}"
        found = compare_shuffled(epsilon, delta, values, reports)
    rows = [candidate.to_json() for candidate in found]
    setting = {
        "epsilon": epsilon,
        "delta": delta or 0.0,
        "values": values,
        "reports": reports,
        "trusted": trusted,
    }
    tell(
        setting | {"best": found[0].name, "protocols": rows},
        [HEAD, *map(_line, rows), f"trusted: {trusted}"],
        as_json=as_json,
    )


HEAD = f"{'protocol':<26}{'local epsilon':>14}{'std error':>12}{'rare value':>12}{'bits':>8}"


def _line(row: dict[str, Any]) -> str:
    numbers = (
        f"{row['epsilon']:>14.4f}{row['standard_error']:>12.6f}{row['standard_error_rare']:>12.6f}"
    )
    return f"{row['protocol']:<26}{numbers}{row['bits']:>8.0f}"
