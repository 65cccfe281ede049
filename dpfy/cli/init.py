"""`dpfy init`: the schema and the job of a table of one's own, drafted without a look at its
records.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpfy.cli import options
from dpfy.cli.output import tell
from dpfy.core.errors import InvalidInput


def _columns(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, metavar="COLUMN", show_default=False)


def init(
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="The table: CSV or Parquet.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder for the two files.")] = Path("."),
    label: Annotated[str | None, _columns("What is to be predicted.")] = None,
    number: Annotated[list[str] | None, _columns("A column of numbers; repeat it.")] = None,
    category: Annotated[list[str] | None, _columns("A column of words; repeat it.")] = None,
    date: Annotated[list[str] | None, _columns("A column of dates; repeat it.")] = None,
    text: Annotated[list[str] | None, _columns("A column of free text; repeat it.")] = None,
    ignore: Annotated[list[str] | None, _columns("A column that is not used; repeat it.")] = None,
    user: Annotated[
        str | None, _columns("Column with the person that a row belongs to.", "--person")
    ] = None,
    at_most: Annotated[
        int | None,
        typer.Option(help="Most rows of one person that are used.", show_default=False),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="The file is public: read its values too.")
    ] = False,
    check: Annotated[
        str | None,
        typer.Option(
            metavar="SAMPLE",
            help="Check public sample rows: DATA is then the schema. Needs --public.",
            show_default=False,
        ),
    ] = None,
    header: Annotated[
        bool, typer.Option("--header", help="Names in the first line may look like numbers.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace drafts that are there.")] = False,
    as_json: options.Json = False,
) -> None:
    """Draft a schema and a job for a table of your own.

    Only the names of the columns are read (and the types that a Parquet file states): kinds are
    guessed from names, and ranges, categories, classes and the number of records are left as
    "?" for you to fill in from what is public. With --public, for a file that holds nobody's
    secrets, they are read from it.

    With --check, DATA is a schema: every column of the sample rows with cells that do not fit is
    listed, and the exit status is 1 if there is one. --public declares that the sample is public.

    Example: dpfy init people.csv --label income --ignore id
    """
    from dpfy.data import draft

    if check is not None:
        if not public:
            rule = (
                "needs --public: what does not fit is listed, so the rows must be nobody's secret"
            )
            raise InvalidInput("--check", check, rule)
        problems = draft.misfits(data, check)
        tell({"problems": problems}, problems or ["every cell fits"], as_json=as_json)
        raise typer.Exit(bool(problems))
    given = draft.ColumnChoices(
        label,
        tuple(number or ()),
        tuple(category or ()),
        tuple(ignore or ()),
        user,
        at_most,
        tuple(date or ()),
        tuple(text or ()),
    )
    found = draft.write(data, out, given, public=public, header=header, force=force)
    left = found["open"]
    no_label = (
        []
        if found["label"] is not None
        else ['  no column was taken for the label: set kind = "label" in the schema (or --label)']
    )
    lines = [
        f"{found['columns']} columns; "
        f"{'values were read, as you said that the file is public' if public else 'no record was read'}",
        f"  {found['schema']}: {left} open"
        if left
        else f"  {found['schema']}: nothing is open; check it",
        f"  {found['job']}: privacy.records is open"
        + (", data.most_records too" if user and at_most is None else ""),
        *no_label,
        f'fill in every "?", then: dpfy train {found["job"]}',
    ]
    tell(found, lines, as_json=as_json)
