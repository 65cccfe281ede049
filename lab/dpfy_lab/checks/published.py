"""What a finished run shows to everybody."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dpfy.runs.run import Run

OF_A_RUN = ("digest", "files", "ledger", "provenance", "timeline")
"""Parts of the privacy report that name its run: times, random names, hashes."""
MEMORY = "/dev/shm"
REPORTS = ("privacy.json", "report.html", "report.md", "ledger.jsonl", "ledger.jsonl.head")


def published(run: Path) -> dict[str, bytes]:
    """The files of a run folder by name, and the privacy report without what names the run."""
    found = {
        path.name: path.read_bytes()
        for path in sorted(run.iterdir())
        if path.is_file() and path.name not in REPORTS
    }
    card = json.loads((run / "privacy.json").read_text())
    kept = {name: part for name, part in card.items() if name not in OF_A_RUN}
    return found | {"privacy.json": json.dumps(kept, sort_keys=True).encode()}


@contextmanager
def temporary() -> Iterator[Path]:
    """A path for a run, in memory where there is such a disk: a run waits for its disk often."""
    memory = MEMORY if Path(MEMORY).is_dir() else None
    with tempfile.TemporaryDirectory(prefix="dpfy-selftest-", dir=memory) as folder:
        yield Path(folder) / "run"


def in_folder(make: Callable[[Run], object], seed: int) -> dict[str, bytes]:
    """What a run publishes that `make` makes in a folder of its own, with a fixed seed."""
    with temporary() as folder:
        make(Run(folder, seed=seed))
        return published(folder)
