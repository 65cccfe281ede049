"""The options that mean the same in every command, and what a command does with them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer


def option(help_text: str, *names: str, hidden: bool = False) -> Any:
    """An option whose default is not shown."""
    return typer.Option(*names, help=help_text, show_default=False, hidden=hidden)


Table = Annotated[
    str,
    typer.Argument(metavar="DATA", help="The private table: CSV or Parquet.", show_default=False),
]
SchemaFile = Annotated[str, option("Public schema of the columns (TOML), or adult.", "--schema")]
Out = Annotated[Path | None, option("Run folder (default: new, in runs/).", "--out")]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on with the run in --out: give the same command again."),
]
LedgerFile = Annotated[
    Path | None, option("Ledger of the data set, over all its releases.", "--ledger")
]
Person = Annotated[str | None, option("Column with the person that a row belongs to.", "--person")]
AtMost = Annotated[int | None, option("Most rows of one person that are used.", "--at-most")]
Seed = Annotated[
    int | None,
    option("Fix all randomness, for tests: protects nothing.", "--insecure-seed", hidden=True),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any field, as section.key; repeat it.",
        show_default=False,
    ),
]
ShowConfig = Annotated[
    bool, typer.Option("--show-config", help="Print all fields as TOML, and stop.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def run_folder(out: Path | None, resume: bool) -> Path:
    """The folder of a run: a new one, or with `resume` one that holds a run.

    Raises:
        InvalidInput: There is nothing to resume.
    """
    from dpfy.core.errors import InvalidInput
    from dpfy.runs.folder import ended
    from dpfy.runs.mark import Mark
    from dpfy.runs.run import fresh_path

    if resume and out is None:
        raise InvalidInput("--resume", True, "needs --out, the folder of the run to resume")
    out = out or fresh_path()
    if resume and Mark.find(out) is None and not ended(out):
        raise InvalidInput(
            "--resume", str(out), "holds no run to resume; leave --resume out to start one"
        )
    return out


def toml(fields: Mapping[str, Any]) -> str:
    """Strings, numbers and lists of them as TOML; what is None is left out."""
    return "".join(
        f"{key} = {json.dumps(value, default=str)}\n"
        for key, value in fields.items()
        if value is not None
    )


def command_line(words: list[str], fields: Mapping[str, Any]) -> str:
    """The command of these words, with a flag for every field that is given."""
    flags = [
        word
        for key, value in fields.items()
        if value is not None
        for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    return shlex.join(["dpfy", *words, *flags])
