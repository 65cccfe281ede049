"""Where trials are made: in this process, one after the other, or in several processes side by
side.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Protocol

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.tuning.trial import TrialFailed, TrialResult, TrialTask

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
        require(self.workers)

    def rows(self, tasks: Iterable[TrialTask]) -> Iterator[tuple[TrialTask, TrialResult]]:
        """As they end; no more are begun ahead than there are workers, but for one."""
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


def require(workers: int) -> int:
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


def of(workers: int) -> TrialPool:
    """The pool of so many workers."""
    return InProcess() if require(workers) == 1 else Processes(workers)
