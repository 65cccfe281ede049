"""`dpfy ledger`: what a data set has spent, on what, and what is left. Looking never changes the
ledger.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dpfy.cli import options
from dpfy.cli.output import PICTURE, require_writable, save, tell
from dpfy.cli.plugins import group

app = group(
    """What a data set has spent, on what, and what is left of its budget.

    Example: dpfy ledger show people.jsonl""",
    name="ledger",
)

File = Annotated[
    Path,
    typer.Argument(metavar="LEDGER", help="The ledger of a data set, or of a run (ledger.jsonl)."),
]
AtDelta = Annotated[
    float | None,
    typer.Option(
        "--delta",
        help="Delta of the epsilons (default: the budget's, or that of the reservations).",
    ),
]


@app.command("show")
def show(
    ledger: File,
    delta: AtDelta = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write the picture of what was spent here (SVG).")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show every reservation: when, what for, what was released, its own epsilon, the total so far,
    and the budget.

    Each line names the folder of its run. A reservation is open (nothing was released yet), started
    (charged permanently), finished, or given back (not counted). Where no accountant bounds a release,
    the reason is printed instead of its epsilon.

    Example: dpfy ledger show people.jsonl --plot spent.svg
    """
    from dpfy.core.ledger import Ledger
    from dpfy.report import spending, spending_page

    if plot is not None:
        require_writable("--plot", plot, {".svg": PICTURE[".svg"]})
    found = spending.of(Ledger.read(ledger), delta)
    answer, lines = found.to_json(), spending_page.table(found)
    if plot is not None:
        save("--plot", plot, spending_page.picture(found))
        answer, lines = answer | {"plot": str(plot)}, [*lines, f"picture: {plot}"]
    tell(answer, lines, as_json=as_json)


@app.command("create")
def create(
    ledger: File,
    epsilon: Annotated[
        float, typer.Option(help="What everything together may cost.", show_default=False)
    ],
    delta: Annotated[float, typer.Option(help="Delta of the budget.", show_default=False)],
    at_most: Annotated[
        int | None,
        typer.Option(
            help="Persons are protected, of whom at most so many rows are used (without it, each "
            "row is a person's).",
            show_default=False,
        ),
    ] = None,
    approximation: Annotated[
        float | None,
        typer.Option(
            help="Part of delta set aside for releases that may fail with a small probability, such "
            "as top() (default: a fifth of delta; 0 refuses them)."
        ),
    ] = None,
    unit: Annotated[
        str | None,
        typer.Option(
            help="Another unit than a row or a person, in the words of its reports.",
            show_default=False,
        ),
    ] = None,
    adjacency: Annotated[
        str, typer.Option(help="add-or-remove-one, replace-one or zero-out.")
    ] = "add-or-remove-one",
    as_json: options.Json = False,
) -> None:
    """Make a ledger with a budget: it refuses whatever would exceed it.

    All runs that are given the ledger (--ledger) then share the budget. A budget is set once, when
    the ledger is made; dpfy ledger show says what is left.

    Example: dpfy ledger create visits.jsonl --epsilon 8 --delta 1e-6 --at-most 5
    """
    from dpfy.core import check
    from dpfy.core.errors import InvalidInput
    from dpfy.core.ledger import Ledger
    from dpfy.core.unit import EXAMPLE, Adjacency, Unit, user_unit
    from dpfy.report import figures, spending, spending_page

    wanted = figures.new_budget(
        ledger, check.epsilon("--epsilon", epsilon), check.delta("--delta", delta), approximation
    )
    whose = EXAMPLE if at_most is None else user_unit(check.integer("--at-most", at_most))
    whose = whose if unit is None else Unit(unit, whose.most_records)
    if not os.path.lexists(ledger):
        if not ledger.parent.is_dir():
            raise InvalidInput("ledger", str(ledger), "must lie in a folder that exists")
        Ledger.open(ledger, unit=whose, adjacency=Adjacency.parse(adjacency), budget=wanted)
    elif (held := Ledger.read(ledger).terms) != wanted.to_json():
        raise InvalidInput(
            "--epsilon", epsilon, f"{ledger.name} was made with {held}; a budget is set once"
        )
    found = spending.allowance(Ledger.read(ledger))
    tell(
        {"ledger": ledger.name, "budget": found.to_json()},
        spending_page.budget(found),
        as_json=as_json,
    )


@app.command("recover")
def recover(
    ledger: File,
    head: Annotated[
        str,
        typer.Option(
            help="The hash of its last line, from elsewhere: a published head, a signature, a copy "
            "of LEDGER.head."
        ),
    ],
    as_json: options.Json = False,
) -> None:
    """Accept a ledger again whose LEDGER.head is lost.

    Without that file nobody can tell whether lines were removed from the end of the ledger, so
    nothing more can be reserved in it. If its last line has the hash that you state, the file is
    written again, and the ledger keeps a note of it. If it has not, lines are missing: bring back a
    copy, or begin a new ledger with the budget that you can prove is left.

    Example: dpfy ledger recover people.jsonl
    """
    from dpfy.core.ledger import Ledger

    entries = len(Ledger.recover(ledger, head).bodies)
    tell(
        {"ledger": ledger.name, "entries": entries, "recovered": True},
        f"recovered: {ledger}, {entries} lines",
        as_json=as_json,
    )
