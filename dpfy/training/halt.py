"""Whether a run may go on in this process. What stops it, stops it for good: who catches the error cannot make another step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dpfy.core.errors import Unsupported

RESUME = "resume it with Run(path, resume=True) (dpfy train --resume), the same code and the same arguments"


class Halt:
    """Why a run goes no further here; `reason` is None while it may."""

    def __init__(self) -> None:
        self.reason: str | None = None

    @contextmanager
    def final(self) -> Iterator[None]:
        """Whatever is refused inside stops the run."""
        try:
            yield
        except BaseException as error:
            self.reason = str(error) or type(error).__name__
            raise

    def require_live(self) -> None:
        """Refuse to go on with a run that stopped."""
        if self.reason is not None:
            raise Unsupported(f"going on with a run that stopped ({self.reason})", f"leave the block; {RESUME}")


def unfinished(path: object, done: int, steps: int, unsaved: str | None) -> str:
    """What is said of a run that is left before its end: where it stands, what it keeps and how it goes on."""
    words = f"run {path}: unfinished, {done} of {steps} steps made; its secrets are kept in its checkpoint folder; {RESUME}"
    return words + (f" (from its last checkpoint: {unsaved})" if unsaved else "")
