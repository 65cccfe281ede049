"""`dpfy verify`: recompute the guarantee of a finished run, check every hash, and who signed it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpfy.cli.output import one_line, tell


def verify(
    run: Annotated[
        Path,
        typer.Argument(
            help="The folder of a finished run; or a privacy.json, or a ledger (.jsonl), by itself."
        ),
    ],
    key: Annotated[
        list[Path] | None,
        typer.Option(help="Public key (PEM) that must have signed; may be repeated."),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="A published head that the ledger must extend: 64 hex digits, or a file."
        ),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Ledger of the data set, in which the run must be billed too."),
    ] = None,
    require: Annotated[
        str | None,
        typer.Option(
            help="Fail below this level: start, completion or signature; or if a file is not "
            "covered."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a finished run from outside.

    Recomputes every number of the card from the ledger with the accountant of the run, and asks a
    second, independent one; checks the hash chain of the ledger, that card and plan state what was
    reserved before the data was read, the numbers in every sentence, the hashes of all files, that
    no other file lies in the folder, that no audit contradicts the claim, and that the run's
    secrets are erased.

    Each line is ok, FAILED, "not checked" (it cannot be, or it is the publisher's word) or none
    (nothing is there). The level says how much the verdict is worth: nothing (the files agree with
    each other); a head of the ledger published at the start, or at completion (--head); a signature
    (--key). Below it stands what someone who can write to the folder could still have changed.
    --ledger checks that the ledger of the data set bears the charge. Exit status 0: everything
    holds. 1: something does not; the line names the file and the field.
    """
    from dpfy.report.verify import judge

    verdict, name = (
        judge(run, keys=key or (), head=head, ledger=ledger, require=require),
        run.name or run.resolve().name,
    )
    level, good = verdict.level, verdict.holds
    rows = [
        {"check": f.what, "holds": f.holds, "status": f.status, "detail": f.detail}
        for f in verdict.findings
    ]
    lines = [f"{f.status:11} {f.what}: {f.detail}" for f in verdict.findings]
    lines += [f"level: {level.words}", f"could still be forged: {level.open}"] if good else []
    lines.append(f"{name}: {'verified' if good else 'NOT verified'}")
    answer = {
        "run": name,
        "verified": good,
        "level": level.name,
        "open": level.open,
        "checks": rows,
    }
    tell(answer, [one_line(line) for line in lines], as_json=as_json)
    raise typer.Exit(0 if good else 1)
