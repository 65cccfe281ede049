"""`dpfy`: the entry point. Exit status 0 is success, 1 a check that failed, 2 bad input with one
line that says what is wrong.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Annotated, Any

import typer

from dpfy import __version__
from dpfy.cli import (
    aliases,
    audit,
    errors,
    fit,
    init,
    inspect_model,
    ledger,
    output,
    plan,
    plugins,
    predict,
    query,
    report,
    serve,
    sign,
    synthesize,
    train,
    tune,
    verify,
)

HELP = """Differentially private machine learning: the guarantee printed is the guarantee delivered.

Start with [b]dpfy train[/b]: it trains a private model on embedded data and leaves a run folder
that anyone can check with [b]dpfy verify[/b]. For a table of your own begin with [b]dpfy init
people.csv[/b]. Every command takes --json and then prints one JSON object. Exit status: 0 success,
1 a check that failed, 2 bad input.

Example: dpfy query people.csv "mean(age)" --schema people.toml --epsilon 0.5
"""

COMPLETE = "_DPFY_COMPLETE"
"""Set by the shell when it asks how a word may go on (--install-completion)."""

app = plugins.group(HELP, name="dpfy")
WORK, RELEASED, PLAN = "Private data", "Released runs", "Planning and checking"

app.command("init", rich_help_panel=WORK)(init.init)
app.command("train", rich_help_panel=WORK)(train.train)
app.command("fit", rich_help_panel=WORK)(fit.fit)
app.command("query", rich_help_panel=WORK)(query.query)
app.add_typer(synthesize.app, name="synthesize", rich_help_panel=WORK)
app.command("tune", rich_help_panel=WORK)(tune.tune)
app.add_typer(serve.app, name="serve", rich_help_panel=WORK)
app.command("predict", rich_help_panel=RELEASED)(predict.predict)
app.command("verify", rich_help_panel=RELEASED)(verify.verify)
app.add_typer(report.app, name="report", rich_help_panel=RELEASED)
app.command("sign", rich_help_panel=RELEASED)(sign.sign)
app.add_typer(ledger.app, name="ledger", rich_help_panel=RELEASED)
app.add_typer(plan.app, name="plan", rich_help_panel=PLAN)
app.add_typer(audit.app, name="audit", rich_help_panel=PLAN)
app.command("inspect", rich_help_panel=PLAN)(inspect_model.inspect)


def _version(asked: bool) -> None:
    if asked:
        output.out(__version__)
        raise typer.Exit()


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_version
        ),
    ] = False,
) -> None:
    """Show the version."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and exit with its status. Errors are one line on standard error."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if os.environ.get(COMPLETE):
        _command().main(given, prog_name="dpfy")  # answers the shell and exits
    words = aliases.renewed(given)
    status = errors.run(_command(), words)
    if words != given and status == 0:  # a refusal is one line
        print(aliases.note(words), file=sys.stderr)
    sys.exit(status)


@cache
def _command() -> Any:
    return plugins.unwrapped(typer.main.get_command(app))
