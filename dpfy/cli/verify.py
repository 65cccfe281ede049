"""`dpfy verify`: recompute the guarantee of finished runs, check every hash, and who signed them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpfy.cli import options
from dpfy.cli.output import one_line, tell


def verify(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folders of finished runs; or a privacy.json, or a ledger (.jsonl), by itself.",
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
        typer.Option(help="Ledger of the data set, in which the run must be charged too."),
    ] = None,
    require: Annotated[
        str | None,
        typer.Option(
            help="Fail below this level: start, completion or signature; or if a file is not "
            "covered."
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Check finished runs from outside.

    Recomputes every number of the report from the ledger, with the accountant of the run and with a
    second, independent one. Checks the hash chain of the ledger, that everything was reserved
    before the data was read, the numbers in every sentence, the hashes of all files, that no audit
    contradicts the claim, and that the run's secrets are erased.

    Each line is ok, FAILED, "not checked" (it cannot be, or it is the publisher's word) or none
    (nothing is there). The level says how much the verdict is worth: nothing (the files agree with
    each other), a published head of the ledger (--head), or a signature (--key). Exit status 0:
    everything is right. 1: something is not; the line names the file and the field.

    Example: dpfy verify runs/x
    """
    from dpfy.core.errors import InvalidInput

    given = {"keys": key or (), "head": head, "ledger": ledger, "require": require}
    if len(runs) == 1:
        answer, lines = _judged(runs[0], given)
        tell(answer, lines, as_json=as_json)
        raise typer.Exit(0 if answer["verified"] else 1)
    if head is not None:
        raise InvalidInput("--head", head, "is of one run: verify that run by itself")
    answers, lines = [], []
    for run in runs:
        try:
            answer, _ = _judged(run, given)
        except InvalidInput as problem:
            answer = {"run": _name(run), "verified": False, "error": str(problem)}
        answers.append(answer)
        lines += _short(answer)
    good = sum(answer["verified"] for answer in answers)
    lines.append(f"{good} of {len(answers)} verified")
    tell({"runs": answers, "verified": good == len(answers)}, lines, as_json=as_json)
    raise typer.Exit(0 if good == len(answers) else 1)


def _name(run: Path) -> str:
    return run.name or run.resolve().name


def _judged(run: Path, given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The verdict on a run as an object, and every line of it."""
    from dpfy.report.verify import judge

    verdict, name = judge(run, **given), _name(run)
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
    return answer, [one_line(line) for line in lines]


def _short(answer: dict[str, Any]) -> list[str]:
    """A run in a line, and a line for each check that failed."""
    if "error" in answer:
        return [one_line(f"{answer['run']}: NOT verified: {answer['error']}")]
    if answer["verified"]:
        return [one_line(f"{answer['run']}: verified (level: {answer['level']})")]
    failed = [row for row in answer["checks"] if not row["holds"]]
    said = [f"{row['status']} {row['check']}: {row['detail']}" for row in failed]
    return [one_line(f"{answer['run']}: NOT verified"), *("  " + one_line(line) for line in said)]
