"""`dpfy report compare`: finished runs side by side, ranked only where their claims can be ranked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpfy.cli import options
from dpfy.cli.output import PAGE, require_writable, save, tell


def runs(
    places: Annotated[
        list[Path], typer.Argument(help="Run folders or reports, two or more.", metavar="RUN...")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Also write the comparison as one page (HTML).")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Compare the privacy reports of finished runs.

    Claims about different units of privacy, adjacencies or settings are not ranked: the reason is
    given, and how to convert.

    Example: dpfy report compare runs/x runs/y
    """
    from dpfy.report import compare

    if out is not None:
        require_writable("--out", out, PAGE)
    found = compare.compare(places)
    if out is not None:
        save("--out", out, compare.page(found).encode(errors="backslashreplace"))
    tell(
        found.to_json(),
        [compare.text(found), *([] if out is None else [f"page: {out}"])],
        as_json=as_json,
    )
