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
    account,
    audit,
    calibrate,
    compare,
    compare_estimators,
    compare_local,
    compare_mechanisms,
    compare_runs,
    compare_users,
    derive,
    errors,
    explore,
    fit,
    init,
    inspect_model,
    ledger,
    output,
    plugins,
    predict,
    query,
    report,
    sign,
    synthesize,
    train,
    tune,
    verify,
)

HELP = """Differentially private machine learning: the guarantee printed is the guarantee delivered.

Start with [b]dpfy train[/b]: it trains a private model on embedded data and leaves a run folder
that anyone can check with [b]dpfy verify[/b]. [b]dpfy init[/b] drafts schema and job for a table of
your own. Plan before you touch data with [b]dpfy account[/b] (what does this noise cost?),
[b]dpfy calibrate[/b] (how much noise do I need?) and [b]dpfy explore[/b]. Attack the claim with
[b]dpfy audit[/b], read it with [b]dpfy report[/b]; use the model with [b]dpfy predict[/b];
[b]dpfy query[/b] asks private statistics of a table, [b]dpfy fit[/b] fits classical learners to it,
[b]dpfy synthesize[/b] makes a synthetic one; [b]dpfy ledger[/b] shows what all runs on a data set
have spent together.

Every verb takes --json and then prints one JSON object on standard output.
"""

COMPLETE = "_DPFY_COMPLETE"
"""Set by the shell when it asks how a word may go on (--install-completion)."""

app = typer.Typer(
    name="dpfy",
    cls=plugins.VerbGroup,
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("train")(train.train)
app.command("init")(init.init)
app.command("verify")(verify.verify)
app.command("sign")(sign.sign)
app.command("derive")(derive.derive)
app.command("account")(account.account)
app.command("calibrate")(calibrate.calibrate)
app.command("inspect")(inspect_model.inspect)
app.add_typer(predict.app, name="predict")
app.command("query")(query.query)
app.command("fit")(fit.fit)
app.command("report")(report.report)
app.add_typer(ledger.app, name="ledger")
app.add_typer(audit.app, name="audit")
app.add_typer(synthesize.app, name="synthesize")
app.command("explore")(explore.explore)
compare.app.command("runs")(compare_runs.runs)
compare.app.command("mechanisms")(compare_mechanisms.mechanisms)
compare.app.command("local")(compare_local.local)
compare.app.command("users")(compare_users.users)
compare.app.command("estimators")(compare_estimators.estimators)
app.add_typer(compare.app, name="compare")
app.add_typer(tune.app, name="tune")


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
    sys.exit(errors.run(_command(), given))


@cache
def _command() -> Any:
    return plugins.unwrapped(typer.main.get_command(app))
