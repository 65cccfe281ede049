"""Several cells of a study at a time, each in a process of its own: small networks leave most of a
processor or a GPU idle.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty
from typing import Any

from dpfy.core import check
from dpfy_lab import studies
from dpfy_lab.studies.study import Options, load_cell, path_of, run_cell

EVERY = 0.5
"""Seconds between two looks at what is stored."""


def missing(name: str, options: Options, folder: Path) -> list[str]:
    """The cells of the study `name` that `folder` does not hold."""
    return [
        cell.name for cell in studies.study(name).cells(options) if load_cell(cell, folder) is None
    ]


def compute(
    name: str,
    options: Options,
    folder: Path,
    cells: Sequence[str],
    *,
    jobs: int,
    seconds: float = math.inf,
    show: Callable[[int], None] | None = None,
) -> list[str]:
    """Compute these cells of the study `name`, `jobs` at a time, and store each when it is done.
    Returns those that are not stored.

    No cell is begun after `seconds`; `show` is told now and then how many are stored. A cell that
    fails is reported on standard error and left out; the others go on.
    """
    context = multiprocessing.get_context("spawn")
    waiting: Any = context.Queue()
    for cell in cells:
        waiting.put(cell)
    end = time.time() + min(seconds, 1e9)
    count = min(check.integer("jobs", jobs), max(1, len(cells)))
    workers = [
        context.Process(target=_work, args=(name, options, folder, waiting, count, end))
        for _ in range(count)
    ]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        time.sleep(EVERY)
        if show is not None:
            show(sum(path_of(cell, folder).is_file() for cell in cells))
    left = set(missing(name, options, folder))
    return [cell for cell in cells if cell in left]


def _work(
    name: str, options: Options, folder: Path, waiting: Any, at_once: int, end: float
) -> None:
    import torch

    torch.set_num_threads(1)
    found = {cell.name: cell for cell in studies.study(name).cells(options)}
    while time.time() < end:
        try:
            cell = found[waiting.get(timeout=1)]
        except Empty:
            return
        try:
            run_cell(cell, folder, options, at_once)
        except Exception:
            print(f"{cell.name} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
