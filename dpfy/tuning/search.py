"""A search under way: trials are made, scored and compared; only the best is kept, and a search
that was killed goes on to the same one.

    checkpoint/scores.jsonl (0600)   {"trial": 4, "score": 0.91, "settings": {...}, ...}    one line
    a trial checkpoint/trials/000004/ (0700) the best so far, and those under way

Nothing of this leaves checkpoint/, which is erased when the run ends.

An engine proposes settings: a search at random is built in, others are told how trials did. A pool
makes the trials: in this process one after the other, or in several processes side by side.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from dpfy.core import check, storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.storage import PRIVATE_MODE
from dpfy.runs.mark import SEARCH_LOG as LOG
from dpfy.runs.mark import SEARCH_TRIALS as FOLDER
from dpfy.runs.mark import erase_folder
from dpfy.tuning.sealed import TrialResult
from dpfy.tuning.space import Settings, Space
from dpfy.tuning.trial import TrialFailed, TrialTask

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


RANDOM_SEARCH = "random"


class SearchEngine(Protocol):
    """Proposes settings. `adaptive` says whether what it proposes depends on earlier scores."""

    @property
    def name(self) -> str:
        """What the report calls it."""

    @property
    def adaptive(self) -> bool:
        """Whether proposals depend on scores."""

    def ask(self, number: int, rng: np.random.Generator, begun: Settings | None = None) -> Settings:
        """The settings of a trial; `begun` are those of a trial that was under way when the search
        was stopped.
        """

    def tell(self, number: int, row: TrialResult) -> None:
        """How a trial did."""

    def prune(self, number: int, score: float) -> bool:
        """Whether a trial should end, by what it tells before its end."""


@dataclass(frozen=True)
class RandomSearch:
    """Every trial draws from the space, independently of all others."""

    space: Space
    name: str = RANDOM_SEARCH
    adaptive: bool = False

    def ask(self, number: int, rng: np.random.Generator, begun: Settings | None = None) -> Settings:
        """A draw."""
        return self.space.draw(rng) if begun is None else begun

    def tell(self, number: int, row: TrialResult) -> None:
        """It does not matter."""

    def prune(self, number: int, score: float) -> bool:
        """Never."""
        return False


MOST_WORKERS = 256
PROCESS = 1 << 28
"""Bytes that a process takes, at the least, before its trial reads anything."""
LOOK = 0.5
"""Seconds between two looks of a process at whether the one that started it is still there."""


class TrialPool(Protocol):
    """Makes trials; their rows, in whatever order they end."""

    def rows(self, tasks: Iterable[TrialTask]) -> Iterator[tuple[TrialTask, TrialResult]]:
        """Each task with its row."""


@dataclass(frozen=True)
class InProcess:
    """One after the other, in this process."""

    def rows(self, tasks: Iterable[TrialTask]) -> Iterator[tuple[TrialTask, TrialResult]]:
        """In their order."""
        for task in tasks:
            yield task, task()


@dataclass(frozen=True)
class Processes:
    """Side by side, in `workers` processes of their own, which end with this one.

    Objectives must be importable there: functions of a module, not of a notebook or a closure.
    """

    workers: int

    def __post_init__(self) -> None:
        require_workers(self.workers)

    def rows(self, tasks: Iterable[TrialTask]) -> Iterator[tuple[TrialTask, TrialResult]]:
        """As they end; no more are started ahead than there are workers, but for one."""
        context = multiprocessing.get_context("spawn")
        executor = ProcessPoolExecutor(
            self.workers, context, _attend, (os.getpid(), _threads(self.workers))
        )
        waiting, source, under_way = True, iter(tasks), dict[Future[TrialResult], TrialTask]()
        try:
            while waiting or under_way:
                while waiting and len(under_way) <= self.workers:
                    task = next(source, None)
                    if task is None:
                        waiting = False
                    else:
                        under_way[executor.submit(task)] = task
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    yield under_way.pop(future), _result(future)
        finally:
            for process in list((getattr(executor, "_processes", None) or {}).values()):
                process.terminate()
            executor.shutdown(wait=True, cancel_futures=True)


def _result(future: Future[TrialResult]) -> TrialResult:
    try:
        return future.result()
    except BrokenProcessPool:
        raise TrialFailed(
            "a process that made a trial was killed (for want of memory?); resume the search, with "
            "fewer workers"
        ) from None
    except (AttributeError, TypeError, ImportError) as problem:
        if "pickle" in str(problem) or "attribute" in str(problem).lower():
            rule = (
                "cannot be taken to another process: define it at the top of a module that can be "
                "imported, or use one worker"
            )
            raise InvalidInput("objective", type(problem).__name__, rule) from None
        raise


def _threads(workers: int) -> int:
    return max(1, (os.cpu_count() or 1) // workers)


def _attend(parent: int, threads: int) -> None:
    """In a new process: end when the one that started it is gone, and share the processor with the
    others.
    """
    import torch

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", threads)))


def require_workers(workers: int) -> int:
    """Refuse more workers than may be, or than this machine has memory for."""
    check.integer("workers", workers, most=MOST_WORKERS)
    most = max(1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // PROCESS)
    if workers > most:
        rule = (
            f"must be at most {most}: each is a process of its own, and this machine has memory "
            f"for no more"
        )
        raise InvalidInput("workers", workers, rule)
    return workers


def pool_of(workers: int) -> TrialPool:
    """The pool of so many workers."""
    return InProcess() if require_workers(workers) == 1 else Processes(workers)
