"""The options that mean the same in every command, and what a command does with them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def option(help_text: str, *names: str, hidden: bool = False) -> Any:
    """An option whose default is not shown."""
    return typer.Option(*names, help=help_text, show_default=False, hidden=hidden)


SchemaFile = Annotated[str, option("Public schema of the columns (TOML), or adult.", "--schema")]
Out = Annotated[Path | None, option("Run folder (default: new, in runs/).", "--out")]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on with the run in --out."),
]
Seed = Annotated[
    int | None,
    option("Fix all randomness, for tests: protects nothing.", "--insecure-seed", hidden=True),
]
ShowConfig = Annotated[
    bool, typer.Option("--show-config", help="Print all fields as TOML, and stop.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def holds_run(out: Path | None) -> bool:
    """Whether a run that has not ended is in the folder."""
    from dpfy.runs.mark import Mark

    return out is not None and Mark.find(out) is not None


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
