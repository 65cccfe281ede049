"""Ctrl-C and SIGTERM during a run: one line that says how it goes on, and the exit status that the
shell expects.
"""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Interrupted(KeyboardInterrupt):
    """An interruption with its exit status (130 for Ctrl-C, 143 for SIGTERM) and what to do
    next.
    """

    def __init__(self, message: str, code: int) -> None:
        self.code = code
        super().__init__(message)


AGAIN = 3.0
"""Seconds after which an interruption is raised again: Python drops what is raised inside a
destructor or a callback.
"""


@contextmanager
def resumable(folder: Path, verb: str) -> Iterator[None]:
    """Inside the block Ctrl-C and SIGTERM end it, and say how the run in `folder` is resumed with
    `verb`.
    """
    if (
        threading.current_thread() is not threading.main_thread()
    ):  # signals are for the main thread alone
        yield
        return
    codes: list[int] = []

    def stop(number: int, frame: object) -> None:
        if number != signal.SIGALRM:
            codes.append(128 + number)
        signal.setitimer(signal.ITIMER_REAL, AGAIN)
        raise Interrupted("interrupted", codes[0] if codes else 128 + signal.SIGINT)

    before = {
        number: signal.signal(number, stop)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    }
    try:
        yield
    except KeyboardInterrupt as problem:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        raise Interrupted(
            _way_on(folder, verb), getattr(problem, "code", 128 + signal.SIGINT)
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _way_on(folder: Path, verb: str) -> str:
    from dpfy.training import job

    command = f"{verb} --resume --out {shlex.quote(str(folder))}"
    if job.is_finished(folder):
        return (
            f"interrupted when the run was finished; what is left to erase is erased by: {command}"
        )
    if job.can_resume(folder):
        return (
            f"interrupted; the run goes on, to the same bits and at no more cost, with: {command}"
        )
    return "interrupted before the run began; nothing was read, released or charged: start it again"
