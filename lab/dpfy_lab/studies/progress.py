"""A study with a progress bar on standard error."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy_lab.studies import parallel
from dpfy_lab.studies.study import Options, Study, load_cell, run, stored, write_page


def run_with_progress(
    study: Study, options: Options, folder: Path, jobs: int = 1
) -> dict[str, Any]:
    """Run `study` into `folder`, `jobs` cells at a time; what was done, as JSON."""
    start = time.monotonic()
    cells = study.cells(options)
    stored = sum(load_cell(cell, folder) is not None for cell in cells)
    columns = (
        TextColumn(study.name),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(cells))
        if check.integer("--jobs", jobs) > 1:
            todo = parallel.missing(study.name, options, folder)
            told = f"{min(jobs, len(todo))} at a time"
            parallel.compute(
                study.name,
                options,
                folder,
                todo,
                jobs=jobs,
                show=lambda done: bar.update(task, completed=stored + done, description=told),
            )
        page = run(
            study,
            options,
            folder,
            lambda done, total, name: bar.update(task, completed=done, description=name),
        )
    return {
        "study": study.name,
        "page": str(page),
        "cells": len(cells),
        "computed": len(cells) - stored,
        "seconds": round(time.monotonic() - start, 3),
    }


def page_of_stored(study: Study, options: Options, folder: Path) -> dict[str, Any]:
    """Make the page from what `folder` holds; what was done, as JSON."""
    start = time.monotonic()
    results = stored(study, options, folder)
    if not results:
        raise InvalidInput(
            "--out", str(folder), f"holds no cell of {study.name} with these options"
        )
    try:
        page = write_page(study, results, folder)
    except KeyError as missing:
        raise InvalidInput(
            "--stored", str(folder), f"the page needs the cell {missing}, which is not stored"
        ) from None
    return {
        "study": study.name,
        "page": str(page),
        "cells": len(results),
        "computed": 0,
        "seconds": round(time.monotonic() - start, 3),
    }
