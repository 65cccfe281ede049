"""`dpfy sign`: answer for a finished run with a key, or witness the head of a ledger while runs
last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpfy.cli import options
from dpfy.cli.output import one_line, tell
from dpfy.core.errors import InvalidInput


def sign(
    run: Annotated[Path | None, typer.Argument(help="The folder of a finished run.")] = None,
    key: Annotated[Path | None, typer.Option(help="Private Ed25519 key (PEM).")] = None,
    new_key: Annotated[
        Path | None, typer.Option(help="Make a key pair here: PATH (mode 0600) and PATH.pub.")
    ] = None,
    head: Annotated[
        Path | None, typer.Option(help="State the head of this ledger, signed if there is a --key.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --head: also write the statement to this new file.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Sign a finished run, make a key, or state the head of a ledger.

    Signing a run (RUN --key) first verifies it; what is signed is the head of its ledger and the
    hash of its report, in signature.json. The head of a ledger (--head) can be published, or signed
    by a witness, while runs last: dpfy verify --head then shows that no line before it was
    exchanged. Exit status 1: the run is not verified, and was not signed.

    Example: dpfy sign --new-key me.pem
    """
    if sum(choice is not None for choice in (run, new_key, head)) != 1:
        raise InvalidInput("sign", None, "give exactly one of RUN, --new-key and --head")
    if out is not None and head is None:
        raise InvalidInput("--out", str(out), "goes with --head")
    if new_key is not None:
        _make(new_key, as_json)
    elif head is not None:
        _state(head, key, out, as_json)
    elif run is not None:
        _sign(run, key, as_json)


def _make(path: Path, as_json: bool) -> None:
    from dpfy.report import signature

    public = signature.new_key(path)
    lines = [f"private key, to be kept: {path}", f"public key, to be given away: {public}"]
    tell({"private": str(path), "public": str(public)}, lines, as_json=as_json)


def _state(ledger: Path, key: Path | None, out: Path | None, as_json: bool) -> None:
    from dpfy.report import signature

    if not ledger.is_file():
        raise InvalidInput("--head", str(ledger), "is not a ledger")
    signed = signature.sign_head(ledger, key)
    if out is not None:
        signature.write_new(out, signed)
    answer: dict[str, Any] = (
        signed.statement | {"signatures": signed.signatures} | ({"file": str(out)} if out else {})
    )
    tell(
        answer,
        [
            f"{signed.head}  {ledger.name}, {signed.statement['entries']} lines",
            *([f"written: {out}"] if out else []),
        ],
        as_json=as_json,
    )


def _sign(run: Path, key: Path | None, as_json: bool) -> None:
    from dpfy.report import signature
    from dpfy.report.verify import verify

    if key is None:
        raise InvalidInput(
            "--key", None, "is needed to sign a run (dpfy sign --new-key PATH makes one)"
        )
    if not run.is_dir():
        raise InvalidInput("run", str(run), "is not the folder of a finished run")
    failed = [f for f in verify(run) if not f.holds and f.what != signature.CHECK]
    if failed:
        reasons = [{"check": f.what, "detail": f.detail} for f in failed]
        lines = [one_line(f"FAILED {f.what}: {f.detail}") for f in failed]
        tell(
            {"run": run.name, "signed": False, "failed": reasons},
            [*lines, f"{run.name}: NOT signed"],
            as_json=as_json,
        )
        raise typer.Exit(1)
    signed = signature.sign_run(run, key)
    answer = {
        "run": run.name,
        "signed": True,
        "file": str(run / signature.NAME),
        "statement": signed.statement,
    }
    tell(
        answer,
        f"signed: {run / signature.NAME} (report and ledger head {signed.head[:16]})",
        as_json=as_json,
    )
