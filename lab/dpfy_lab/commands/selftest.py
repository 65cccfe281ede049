"""`dpfy audit selftest`: every seeded mistake is caught, and the code as it is passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dpfy.cli.output import out as say
from dpfy.cli.output import tell

if TYPE_CHECKING:
    from dpfy_lab.selftest.examine import SelfTestRow


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

    from dpfy_lab.checks import CHECKS
    from dpfy_lab.mistakes import MISTAKES
    from dpfy_lab.selftest import examine

    torch.set_num_threads(1)

    def show(row: SelfTestRow) -> None:
        caught = f"{row.words}: {', '.join(row.caught_by) or 'NOT CAUGHT'}"
        words = caught if row.mistake else _of_the_code(row)
        seconds = sum(row.seconds.values())
        line = f"{'ok    ' if row.good else 'FAILED'} {row.name}: {words} ({seconds:.1f} s)"
        print(line, file=sys.stderr) if as_json else say(line)

    rows = examine.run(MISTAKES.values(), CHECKS, every=every, show=show)
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


def _of_the_code(row: SelfTestRow) -> str:
    """What is said of the code as it is."""
    alarms = [f"{name}: {line}" for name, line in row.found.items() if line is not None]
    return "; ".join(alarms) or "passes every check"
