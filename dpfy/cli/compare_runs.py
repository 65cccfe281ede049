"""`dpfy compare runs`: finished runs side by side, ranked only where their claims can be ranked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def runs(
    places: Annotated[list[Path], typer.Argument(help="Run folders or cards, two or more.", metavar="RUN...")],
    out: Annotated[Path | None, typer.Option(help="Also write the comparison as one page (HTML).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare the privacy cards of finished runs.

    Claims about different units of privacy, adjacencies or settings are not ranked: the reason is given, and how to convert.
    """
    from dpfy.report import compare

    found = compare.compare(places)
    if out is not None:
        from dpfy.core.storage import write_atomically

        write_atomically(out, compare.page(found).encode())
    print(json.dumps(found.to_json()) if as_json else compare.text(found))
    if out is not None and not as_json:
        print(f"page: {out}")
