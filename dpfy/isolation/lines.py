"""Which lines of a user's code ran: a line that never ran before may do what no check has seen."""

from __future__ import annotations

import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

SHARE = 0.004
"""The part of the time that following lines may take; what is beyond is not followed."""

COST = 4e-7
"""Seconds that following one line takes, measured on the high side."""

LIBRARIES = tuple(
    {
        str(Path(place)) + "/"
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (place := sysconfig.get_paths().get(name))
    }
    | {str(Path(torch.__file__).parent) + "/", str(Path(__file__).parents[1]) + "/"}
)
"""Where code lies that is not the user's: its lines are not followed."""


class Lines:
    """Follows the lines of code outside of LIBRARIES. `new` says whether the last block ran one for
    the first time, and `where` what `at` was then.

    Guarantees: a debugger or a coverage tool that follows lines already is left alone; then nothing
    is new.
    """

    def __init__(self) -> None:
        self._seen: dict[CodeType, set[int] | None] = {}
        self._began = time.perf_counter()
        self._events = 0
        self._blocks = 0
        self.new = False
        self.at = self.where = 0

    @contextmanager
    def followed(self, wanted: bool = True) -> Iterator[None]:
        """Follow the lines of the block, if `wanted`, and unless that took too much time so far."""
        self.new = False
        if not wanted:
            yield
            return
        wanted = self._blocks < 2 or COST * self._events <= SHARE * (
            time.perf_counter() - self._began
        )
        if sys.gettrace() is not None or not wanted:
            yield
            return
        first, self._blocks = self._blocks == 0, self._blocks + 1
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(None)
            self.new = self.new and not first

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        self._events += 1
        if code not in self._seen:
            theirs = not code.co_filename.startswith(LIBRARIES) and not code.co_filename.startswith(
                "<frozen"
            )
            self._seen[code] = (
                {line for *_, line in code.co_lines() if line is not None} if theirs else None
            )
            if theirs:
                self._found()
        missing = self._seen[code]
        if not missing:  # a library's, or every line ran
            return None

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            self._events += 1
            if frame.f_lineno in missing:
                missing.discard(frame.f_lineno)
                self._found()
            return line

        return line

    def _found(self) -> None:
        if not self.new:
            self.new, self.where = True, self.at
