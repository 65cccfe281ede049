"""A file that a verb will write: refused before the work where it could not, or should not, be
written after it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from dpfy.core import storage
from dpfy.core.errors import InvalidInput
from dpfy.core.storage import write_atomically

PICTURE = {".svg": (b"<?xml", b"<svg"), ".png": (b"\x89PNG",)}
PAGE = {".html": (b"<!doctype html",), ".htm": (b"<!doctype html",)}
ROOM = len(".") + len(".part")
"""What the temporary name is longer by."""


def target(flag: str, path: Path, kinds: Mapping[str, tuple[bytes, ...]]) -> Path:
    """The path, if a file of one of `kinds` (by suffix, with how such a file begins) can be written
    there.

    Guarantees: a folder, pipe, device or link is refused, and so is a file of a user's own: one is
    replaced only if it begins as what would be written does.
    """
    if path.suffix.lower() not in kinds:
        raise InvalidInput(flag, str(path), f"must end with {' or '.join(kinds)}")
    try:
        folder = os.stat(path.parent)
        longest = os.pathconf(path.parent, "PC_NAME_MAX")
        known = _existing(path)
    except OSError as problem:
        raise InvalidInput(flag, str(path), storage.why(problem, "cannot be written")) from None
    except ValueError:
        raise InvalidInput(flag, str(path), "is not the name of a file") from None
    if not stat.S_ISDIR(folder.st_mode):
        raise InvalidInput(flag, str(path), "must lie in a folder that exists")
    if len(os.fsencode(path.name)) + ROOM > longest:
        raise InvalidInput(flag, str(path), f"has a name longer than {longest - ROOM} bytes")
    if known is not None and not known.lower().startswith(
        tuple(b.lower() for b in kinds[path.suffix.lower()])
    ):
        raise InvalidInput(flag, str(path), "is there already and is no such file; name another")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InvalidInput(flag, str(path), "cannot be written (Permission denied)")
    return path


def save(flag: str, path: Path, content: bytes) -> None:
    """Write the file whole or not at all."""
    try:
        write_atomically(path, content)
    except OSError as problem:
        raise InvalidInput(flag, str(path), storage.why(problem, "cannot be written")) from None


def _existing(path: Path) -> bytes | None:
    """How the file at `path` begins; None where there is none. Anything but a regular file counts
    as foreign.
    """
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return b"\0"
        with open(path, "rb") as file:
            return file.read(16).lstrip()
    except FileNotFoundError:
        return None
