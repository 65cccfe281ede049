"""`dpfy`: the entry point. Exit status 0 is success, 1 a check that failed, 2 bad input with one line that says what is wrong."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dpfy import __version__
from dpfy.cli import (
    account,
    audit,
    calibrate,
    compare,
    compare_mechanisms,
    compare_runs,
    explore,
    inspect,
    report,
    reproduce,
    train,
    verify,
)
from dpfy.core.errors import DpfyError

HELP = """Differentially private machine learning: the guarantee printed is the guarantee delivered.

Start with [b]dpfy train[/b]: it trains a private model on embedded data and leaves a run folder that anyone can check with
[b]dpfy verify[/b]. Plan before you touch data with [b]dpfy account[/b] (what does this noise cost?), [b]dpfy calibrate[/b]
(how much noise do I need?) and [b]dpfy explore[/b]. Attack the claim with [b]dpfy audit[/b], read it with [b]dpfy report[/b].
Verbs that answer with numbers take --json and then print one JSON object on standard output.
"""

app = typer.Typer(
    name="dpfy", help=HELP, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False
)
app.command("train")(train.train)
app.command("verify")(verify.verify)
app.command("account")(account.account)
app.command("calibrate")(calibrate.calibrate)
app.command("inspect")(inspect.inspect)
app.command("report")(report.report)
app.add_typer(audit.app, name="audit")
app.command("explore")(explore.explore)
app.command("reproduce")(reproduce.reproduce)
compare.app.command("runs")(compare_runs.runs)
compare.app.command("mechanisms")(compare_mechanisms.mechanisms)
app.add_typer(compare.app, name="compare")


@app.callback()
def about(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Show the version."""
    if version:
        print(__version__)
        raise typer.Exit()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and exit with its status. Errors are one line on standard error."""
    try:
        status = app(arguments, standalone_mode=False)
        code = status if isinstance(status, int) else 0
    except DpfyError as problem:
        print(f"dpfy: {problem}", file=sys.stderr)
        code = 2
    except Exception as problem:
        if not hasattr(problem, "format_message"):
            raise
        if message := problem.format_message().replace("\n", " "):
            print(f"dpfy: {message}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("dpfy: interrupted; a run that was under way can be resumed with --resume", file=sys.stderr)
        code = 130
    sys.exit(code)
