"""`dpfy verify`: recompute the guarantee of a finished run and check every hash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def verify(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run, or a privacy.json by itself.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a finished run from outside.

    Recomputes every number of the card from the ledger with the accountant of the run, and asks a second, independent one; checks the
    hash chain of the ledger, the digest and schema of the card, the hashes of model, plan, configuration and metrics, that they belong
    together, that the pages say what the card says, and that the run's secrets are erased. Of a card by itself, what can be checked
    without the run is checked. Exit status 0: everything holds. 1: something does not; the line names the file and the field.
    """
    from dpfy.report.verify import verify as check_run

    findings = check_run(run)
    good = all(f.holds for f in findings)
    if as_json:
        rows = [{"check": f.what, "holds": f.holds, "detail": f.detail} for f in findings]
        print(json.dumps({"run": run.name, "verified": good, "checks": rows}))
    else:
        for f in findings:
            print(f"{'ok    ' if f.holds else 'FAILED'} {f.what}: {f.detail}")
        print(f"{run.name}: {'verified' if good else 'NOT verified'}")
    raise typer.Exit(0 if good else 1)
