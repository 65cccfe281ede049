"""`dpfy report`: the privacy card of a finished run as a page, as Markdown or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dpfy.cli.output import tell


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run, or a privacy.json.")],
    form: Annotated[str, typer.Option("--format", help="html, md or json.")] = "html",
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write the privacy card of a finished run as a page (report.html), as Markdown (report.md), or
    print it as JSON.

    The page is one file without scripts or network; an audit made after the run (audit.json) is
    shown in it.
    """
    from dpfy.report import publish

    written = publish.publish(run, form)
    if written.file is None:
        tell(json.loads(written.text), written.text.rstrip("\n"), as_json=as_json)
    else:
        tell(
            {"run": run.name, "format": form, "file": str(written.file)},
            str(written.file),
            as_json=as_json,
        )
    if show and written.file is not None:
        import webbrowser

        webbrowser.open(written.file.resolve().as_uri())
