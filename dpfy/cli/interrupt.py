"""Ctrl-C and SIGTERM during a run: one line that says how it goes on, and the exit status that the shell expects."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Interrupted(KeyboardInterrupt):
    """An interruption with its exit status (130 for Ctrl-C, 143 for SIGTERM) and what to do next."""

    def __init__(self, message: str, code: int) -> None:
        self.code = code
        super().__init__(message)


@contextmanager
def resumable(folder: Path, verb: str) -> Iterator[None]:
    """Inside the block SIGTERM is an interruption as Ctrl-C is; either says how the run in `folder` is resumed with `verb`."""

    def stop(number: int, frame: object) -> None:
        raise Interrupted("terminated", 128 + number)

    ours = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if ours else None
    try:
        yield
    except KeyboardInterrupt as problem:
        raise Interrupted(_way_on(folder, verb), getattr(problem, "code", 128 + signal.SIGINT)) from None
    finally:
        if ours:
            signal.signal(signal.SIGTERM, before)


def _way_on(folder: Path, verb: str) -> str:
    from dpfy.training import job

    command = f"{verb} --resume --out {shlex.quote(str(folder))}"
    if job.is_finished(folder):
        return f"interrupted when the run was finished; what is left to erase is erased by: {command}"
    if job.can_resume(folder):
        return f"interrupted; the run goes on, to the same bits and at no more cost, with: {command}"
    return "interrupted before the run began; nothing was read, released or billed: start it again"
