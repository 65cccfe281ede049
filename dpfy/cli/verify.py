"""`dpfy verify`: recompute the guarantee of a finished run, check every hash, and who signed it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpfy.cli.answer import one_line, tell


def verify(
    run: Annotated[
        Path, typer.Argument(help="The folder of a finished run; or a privacy.json, or a ledger (.jsonl), by itself.")
    ],
    key: Annotated[list[Path] | None, typer.Option(help="Public key (PEM) that must have signed; may be repeated.")] = None,
    head: Annotated[
        str | None, typer.Option(help="A published head that the ledger must extend: 64 hex digits, or a file.")
    ] = None,
    ledger: Annotated[Path | None, typer.Option(help="Ledger of the data set, in which the run must be billed too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a finished run from outside.

    Recomputes every number of the card from the ledger with the accountant of the run, and asks a second, independent one; checks the
    hash chain of the ledger, that card and plan state what was reserved before the data was read, the hashes of card, model, pages and
    all other files, that no audit contradicts the claim, and that the run's secrets are erased. This shows that the files agree with
    each other; who answers for them is checked with --key, what a witness saw during the run with --head, and that the ledger of the
    data set bears the bill with --ledger. Exit status 0: everything holds. 1: something does not; the line names the file and the field.
    """
    from dpfy.report.verify import verify as check_run

    findings, name = check_run(run, keys=key or (), head=head, ledger=ledger), run.name or run.resolve().name
    good = all(f.holds for f in findings)
    rows = [{"check": f.what, "holds": f.holds, "detail": f.detail} for f in findings]
    lines = [f"{'ok    ' if f.holds else 'FAILED'} {f.what}: {f.detail}" for f in findings]
    lines.append(f"{name}: {'verified' if good else 'NOT verified'}")
    tell({"run": name, "verified": good, "checks": rows}, [one_line(line) for line in lines], as_json=as_json)
    raise typer.Exit(0 if good else 1)
