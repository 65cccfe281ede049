"""`dpfy report`: the privacy report of a finished run as a page, as Markdown or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dpfy.cli import compare_runs, derive, options
from dpfy.cli.output import tell
from dpfy.cli.plugins import group

app = group(
    """Write the privacy report of a finished run; set runs side by side; add a file that was made
    from a run without its data. The options of dpfy report RUN: dpfy report page --help.

    Example: dpfy report runs/x""",
    short="Write the privacy report of a run; compare runs; add a derived file.",
    default="page",
)
app.command("compare")(compare_runs.runs)
app.command("derive")(derive.derive)


@app.command("page")
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run, or a privacy.json.")],
    form: Annotated[str, typer.Option("--format", help="html, md or json.")] = "html",
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    as_json: options.Json = False,
) -> None:
    """Write the privacy report of a finished run as a page (report.html), as Markdown (report.md), or
    print it as JSON.

    The page is one file without scripts or network; an audit made after the run (audit.json) is
    shown in it.

    Example: dpfy report runs/x --format md
    """
    from dpfy.report import compare

    written = compare.publish(run, form)
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
