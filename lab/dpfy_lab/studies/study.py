"""What a study is: cells that are computed and stored one by one, and a page made from what is
stored.
"""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dpfy
from dpfy.core.codec import canonical, digest
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput
from dpfy.core.storage import write_atomically

if TYPE_CHECKING:
    from dpfy_lab.studies.page import Page

NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
FOLDER = "cells"


@dataclass(frozen=True)
class Options:
    """How a study is run: `fast` for the short form on embedded data, where the data lies, on which
    device.
    """

    fast: bool = False
    data_dir: str | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Cell:
    """One number or curve of a study: its name, all settings that its result depends on, and the
    function that computes it.

    `settings` is JSON; a stored result is taken up again only if the settings are the same.
    `compute` gives JSON.
    """

    name: str
    settings: Mapping[str, Any]
    compute: Callable[[], Mapping[str, Any]] = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InvalidInput(
                "cell", self.name, "a name is small letters, digits, dots, dashes and underscores"
            )
        canonical(dict(self.settings))


@dataclass(frozen=True)
class Stored:
    """A cell's result as it lies on disk."""

    name: str
    settings: dict[str, Any]
    result: dict[str, Any]
    made: dict[str, Any]


class Results(Mapping[str, Stored]):
    """All stored cells of a study by name, in the study's order."""

    def __init__(self, cells: Sequence[Stored], options: Options) -> None:
        self._cells = {cell.name: cell for cell in cells}
        self.options = options

    def __getitem__(self, name: str) -> Stored:
        return self._cells[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)

    def starting(self, prefix: str) -> list[Stored]:
        """The cells whose name starts with `prefix`."""
        return [cell for name, cell in self._cells.items() if name.startswith(prefix)]

    def seconds(self) -> tuple[float, float]:
        """(wall seconds, processor seconds) of all cells together."""
        return sum(c.made["seconds"] for c in self.values()), sum(
            c.made["cpu_seconds"] for c in self.values()
        )


@dataclass(frozen=True)
class Study:
    """A published experiment: title, source, its cells for given options, and the page for given
    results.
    """

    name: str
    title: str
    source: str
    cells: Callable[[Options], list[Cell]]
    page: Callable[[Results], Page]


def machine(device: str) -> dict[str, str]:
    """Where a cell was computed: processor or accelerator, and the versions that matter."""
    import torch

    name = (
        torch.cuda.get_device_name()
        if device.startswith("cuda")
        else f"{platform.machine()} processor"
    )
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "dpfy": dpfy.__version__,
    }
    return {"device": name, "threads": str(torch.get_num_threads())} | versions


def run_cell(cell: Cell, folder: Path, options: Options, at_once: int = 1) -> Stored:
    """The stored result of `cell`, computed and stored first if it is not there with the same
    settings.

    `at_once` is noted with the time: how many cells shared the machine.
    """
    kept = load_cell(cell, folder)
    if kept is not None:
        return kept
    start, start_cpu = time.monotonic(), time.process_time()
    result = dict(cell.compute())
    made: dict[str, Any] = {
        "seconds": round(time.monotonic() - start, 3),
        "cpu_seconds": round(time.process_time() - start_cpu, 3),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "at_once": at_once,
        **machine(options.device),
    }
    body = {"name": cell.name, "settings": dict(cell.settings), "result": result, "made": made}
    folder.joinpath(FOLDER).mkdir(parents=True, exist_ok=True)
    write_atomically(
        path_of(cell.name, folder),
        (json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode(),
    )
    return Stored(cell.name, dict(cell.settings), json.loads(json.dumps(result)), made)


def load_cell(cell: Cell, folder: Path) -> Stored | None:
    """The stored result of `cell`, or None if there is none with these settings."""
    file = path_of(cell.name, folder)
    if not file.is_file():
        return None
    try:
        body = json.loads(file.read_text())
        stored = Stored(body["name"], body["settings"], body["result"], body["made"])
    except (ValueError, KeyError, TypeError):
        raise Corrupt(
            f"{FOLDER}/{file.name}", "is not a stored cell; remove it to compute it again"
        ) from None
    return (
        stored
        if digest(stored.settings) == digest(json.loads(json.dumps(dict(cell.settings))))
        else None
    )


def path_of(name: str, folder: Path) -> Path:
    """Where the cell called `name` is stored."""
    return folder / FOLDER / f"{name}.json"


def stored(study: Study, options: Options, folder: Path) -> Results:
    """The cells of `study` that are stored in `folder`; nothing is computed."""
    found = [load_cell(cell, folder) for cell in study.cells(options)]
    return Results([cell for cell in found if cell is not None], options)


def run(
    study: Study,
    options: Options,
    folder: Path,
    show: Callable[[int, int, str], None] | None = None,
) -> Path:
    """Compute what is missing, cell by cell, then write the page. Returns the page.

    A run that is stopped at any moment and started again with the same options repeats no stored
    cell.
    """
    cells = study.cells(options)
    names = [cell.name for cell in cells]
    if len(set(names)) != len(names):
        raise DpfyError(f"study {study.name}: two cells share a name")
    done = []
    for position, cell in enumerate(cells):
        if show is not None:
            show(position, len(cells), cell.name)
        done.append(run_cell(cell, folder, options))
    if show is not None:
        show(len(cells), len(cells), "page")
    return write_page(study, Results(done, options), folder)


def write_page(study: Study, results: Results, folder: Path) -> Path:
    """index.html with its figures inside, one SVG a figure and one CSV a table beside it."""
    from dpfy_lab.studies.page import render

    folder.mkdir(parents=True, exist_ok=True)
    page = study.page(results)
    for name, content in page.files().items():
        write_atomically(folder / name, content.encode())
    target = folder / "index.html"
    write_atomically(target, render(study, page, results).encode())
    return target
