"""`dpfy reproduce`: a published experiment, ours beside it, cell by cell."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpfy.cli.output import tell


def reproduce(
    name: Annotated[str | None, typer.Argument(help="Name of the study; see --list.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for cells and page; stored cells are not computed again."),
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="The short form of the study.")] = False,
    data_dir: Annotated[
        str | None, typer.Option(help="Folder with mnist/, fashion-mnist/ (else $DPFY_DATA).")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    jobs: Annotated[int, typer.Option(help="Cells at a time, each in a process of its own.")] = 1,
    listing: Annotated[bool, typer.Option("--list", help="Name the studies and exit.")] = False,
    stored: Annotated[
        bool,
        typer.Option("--stored", help="Compute nothing: make the page from the cells in --out."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Reproduce a published experiment and write a page with the paper's numbers beside ours.

    Every cell is stored as soon as it is computed: a study that is stopped goes on where it was
    when it is started again.
    """
    from dpfy.core.errors import InvalidInput
    from dpfy_lab import studies

    if listing:
        rows = {key: studies.study(key).title for key in studies.STUDIES}
        tell(
            {"studies": rows}, [f"{key:16} {title}" for key, title in rows.items()], as_json=as_json
        )
        return
    if name is None:
        raise InvalidInput(
            "name", None, f"give the name of a study: {', '.join(studies.STUDIES)} (or --list)"
        )
    from dpfy.training.runtime import check_device
    from dpfy_lab.studies.progress import page_of_stored, run_with_progress
    from dpfy_lab.studies.study import Options

    check_device(device)
    study = studies.study(name)
    options, folder = Options(fast, data_dir, device), out or Path("runs") / f"reproduce-{name}"
    finished = (
        page_of_stored(study, options, folder)
        if stored
        else run_with_progress(study, options, folder, jobs)
    )
    first = (
        f"{finished['cells']} cells ({finished['computed']} computed now) in "
        f"{finished['seconds']:.0f} s"
    )
    tell(finished, [first, f"  {finished['page']}"], as_json=as_json)
