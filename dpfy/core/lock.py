"""One process at a time: advisory locks that are tried before they are trusted."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpfy.core import reading
from dpfy.core.errors import Busy, InvalidInput, Unsupported

_held: dict[object, int] = {}
"""Handles of the locks that this process holds, each under a mark of its own block: numbers of
handles are used again.
"""

LOCAL = "keep it on a local file system, where a lock keeps others out"


@contextmanager
def hold(path: Path, what: str) -> Iterator[None]:
    """Hold the file at `path`, which is there, for this process alone, or raise `Busy`: two
    processes must not work in one run folder.
    """
    with locked(path, wait=False, what=what, create=False):
        yield


@contextmanager
def locked(path: Path, *, wait: bool, what: str = "", create: bool = True) -> Iterator[int]:
    """The file at `path`, created if need be and if `create`, opened for reading and writing and
    locked until the block is left.

    Guarantees: nobody else is inside such a block for the same file; a file system whose locks keep
    nobody out is refused. A process that is forked inside of the block (one that reads data ahead,
    say) does not hold the lock, and so does not keep it when this one dies.
    """
    handle, mine = _opened(path, create), object()
    _held[mine] = handle
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise Busy(
                f"{what}: another process is using it; wait for it to end or choose another folder"
            ) from None
        except OSError as problem:
            raise Unsupported(f"locking {path.name} ({problem.strerror})", LOCAL) from None
        _try(path, handle, create)
        yield handle
    finally:
        if _held.pop(mine, None) is not None:
            os.close(handle)


def _let_go() -> None:
    """In a process that was just forked: what the other one holds is not held here."""
    while _held:
        os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=_let_go)


def _opened(path: Path, create: bool) -> int:
    try:
        handle = os.open(
            path,
            os.O_RDWR | (os.O_CREAT if create else os.O_NOFOLLOW) | os.O_NONBLOCK | os.O_CLOEXEC,
            0o644,
        )
    except OSError as problem:
        if isinstance(problem, FileNotFoundError) and not create:
            raise Busy(
                f"{path.parent.name}: another process has just ended it; try again"
            ) from None
        raise InvalidInput(
            "file", str(path), reading.why(problem, "cannot be opened for writing")
        ) from None
    except ValueError:
        raise InvalidInput("file", str(path), "is not the name of a file") from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise InvalidInput("file", str(path), f"must be a file, and is {reading.kind(mode)}")
    return handle


def _try(path: Path, handle: int, create: bool) -> None:
    """See that a lock just taken keeps a second opening of the same file out."""
    second = _opened(path, create)
    try:
        if not os.path.samestat(os.fstat(handle), os.fstat(second)):
            raise Busy(f"{path.name}: was exchanged while it was being opened; try again")
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        raise Unsupported(f"{path.name} on a file system whose locks keep nobody out", LOCAL)
    finally:
        os.close(second)
