"""A search under way: trials are made, scored and compared; only the best is kept, and a search
that was killed goes on to the same one.

    checkpoint/scores.jsonl (0600)   {"trial": 4, "score": 0.91, "settings": {...}, ...}    one line
    a trial checkpoint/trials/000004/ (0700) the best so far, and those under way

Nothing of this leaves checkpoint/, which is erased when the run ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from dpfy.core import storage
from dpfy.core.errors import Corrupt
from dpfy.core.storage import PRIVATE_MODE
from dpfy.runs.mark import SEARCH_LOG as LOG
from dpfy.runs.mark import SEARCH_TRIALS as FOLDER
from dpfy.runs.mark import erase_folder
from dpfy.tuning.pool import TrialPool
from dpfy.tuning.trial import TrialResult, TrialTask

Tell = Callable[[TrialTask, TrialResult], None]
"""Told of every trial that has just ended."""


@dataclass
class Search:
    """Trials of one search, in the secret folder `secrets`. `rows` are those made so far, by
    number, in the order in which they ended.

    With `keep` all trials are kept until the run ends: where the best is chosen among them
    afterwards.
    """

    secrets: Path
    pool: TrialPool
    keep: bool = False
    rows: dict[int, TrialResult] = field(default_factory=dict)
    best: int | None = None

    def __post_init__(self) -> None:
        self.rows = _read(self.secrets / LOG)
        self.best = min(self.rows, key=self._rank, default=None)
        for number in self.rows:
            if number != self.best and not self.keep:
                erase_folder(self.place(number))

    def place(self, number: int) -> Path:
        """The folder of a trial."""
        return self.secrets / FOLDER / f"{number:06d}"

    def made(self, tasks: Iterable[TrialTask], tell: Tell = lambda task, row: None) -> int | None:
        """Make all trials that are not made yet. The number of the best one, the first of equals;
        None if there is none.

        Guarantees: which one that is does not depend on how many processes make them, in which
        order they end, or how often the search was killed and resumed. When it returns, nothing is
        left of the others. A trial's row is on the disk before its folder is erased, which is done
        while the next one runs: no more than one waits for it.
        """
        (self.secrets / FOLDER).mkdir(mode=0o700, exist_ok=True)
        handle = os.open(
            self.secrets / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, PRIVATE_MODE
        )
        erased = Future[None]()
        erased.set_result(None)
        try:
            with ThreadPoolExecutor(1) as beside:
                for task, row in self.pool.rows(self._left(tasks)):
                    lost = self._note(handle, task.number, row)
                    erased.result()
                    if lost is not None:
                        erased = beside.submit(erase_folder, self.place(lost), durable=False)
                    tell(task, self.rows[task.number])
                erased.result()
        finally:
            os.close(handle)
        return self.best

    def _left(self, tasks: Iterable[TrialTask]) -> Iterator[TrialTask]:
        return (task for task in tasks if task.number not in self.rows)

    def _note(self, handle: int, number: int, made: TrialResult) -> int | None:
        """Write the row down. Which trial is to be forgotten: the worse of this one and the best so
        far.
        """
        line = json.dumps({"trial": number} | made.to_json())
        os.write(handle, (line + "\n").encode())
        os.fsync(handle)
        self.rows[number] = TrialResult.from_json(
            json.loads(line)
        )  # as a search that is resumed reads it
        lost: int | None = number
        if self.best is None or self._rank(number) < self._rank(self.best):
            lost, self.best = self.best, number
        return None if self.keep else lost

    def _rank(self, number: int) -> tuple[float, int]:
        """Higher scores first, then smaller numbers."""
        return -self.rows[number].score, number


def _read(log: Path) -> dict[int, TrialResult]:
    """The rows of a log; a last line that a crash cut short does not count, and is cut off."""
    if not log.is_file():
        return {}
    raw = log.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        os.truncate(log, len(whole))
    found = {}
    for line in whole.splitlines():
        row = storage.parsed_json(LOG, line)
        try:
            found[int(row["trial"])] = TrialResult.from_json(row)
        except (KeyError, TypeError, ValueError):
            rule = "holds a line that is no score: the search cannot be resumed; start a new one"
            raise Corrupt(f"checkpoint/{LOG}", rule) from None
    return found
