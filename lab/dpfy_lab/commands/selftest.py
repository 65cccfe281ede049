"""`dpfy audit selftest`: every seeded mistake is caught, and the code as it is passes."""

from __future__ import annotations

from typing import Annotated

import typer

from dpfy.cli.output import out as say
from dpfy.cli.output import tell


def selftest(
    every: Annotated[
        bool,
        typer.Option(
            "--every", help="Run every check on every bug, not only the one that must catch it."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Switch in classic mistakes, one at a time, and show that each is caught; the code as it is
    must pass.
    """
    import sys

    import torch

    from dpfy.audit import selftest as suite
    from dpfy.cli.whole_bench import WholeBench

    torch.set_num_threads(1)

    def show(row: suite.Row) -> None:
        words = (
            "passes every check"
            if not row.bug.caught_by
            else f"{row.bug.words}: {', '.join(row.caught_by) or 'NOT CAUGHT'}"
        )
        seconds = sum(row.seconds.values())
        line = f"{'ok    ' if row.good else 'FAILED'} {row.bug.name}: {words} ({seconds:.1f} s)"
        print(line, file=sys.stderr) if as_json else say(line)

    rows = suite.run(WholeBench(), every=every, show=show)
    good = all(row.good for row in rows)
    seconds = sum(sum(row.seconds.values()) for row in rows)
    summary = {
        "good": good,
        "bugs": len(rows) - 1,
        "seconds": round(seconds, 1),
        "rows": [row.to_json() for row in rows],
    }
    tell(
        summary,
        f"{len(rows) - 1} bugs, {sum(row.good for row in rows[1:])} caught; {seconds:.0f} s",
        as_json=as_json,
    )
    raise typer.Exit(0 if good else 1)
