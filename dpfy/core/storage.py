"""Durable files: whole or not at all, and never through a link.

Every write is to a new temporary file with a random name, synced, renamed, and the folder synced. A
link that somebody planted where a file of ours is to be is replaced or removed itself; what it
points to is never written, cut or overwritten with zeros.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from dpfy.core import inode
from dpfy.core.errors import Corrupt

PRIVATE_MODE = 0o600
PUBLIC_MODE = 0o644
TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.part")
"""The name of a temporary file. A crash may leave one behind."""


def sync_folder(folder: Path) -> None:
    """Make a rename or a creation inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(
    path: Path, content: bytes | Callable[[str], bytes], *, mode: int = PUBLIC_MODE
) -> None:
    """Replace `path` by `content`, which may be a function of the identity that the new file has
    for life (:mod:`dpfy.core.inode`).

    Guarantees: after a crash at any moment `path` holds the old content or the new one, never a
    mixture; the temporary file never has a wider mode than `mode`, is new, and is gone after an
    error; a link at `path` is replaced, not followed.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        _write_new(temporary, content, mode)
        os.replace(temporary, path)
    except Exception:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def append(path: Path, content: bytes) -> None:
    """Add `content` to the end of `path`, which is made if it is not there. A link or anything else
    but a file is refused.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, PUBLIC_MODE)
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.ENXIO):
            raise Corrupt(
                path.name, "is a link or a pipe: a run folder holds plain files only"
            ) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise Corrupt(path.name, "is not a plain file")
        _write_all(handle, content)
    finally:
        os.close(handle)


def create(path: Path, content: bytes = b"", *, mode: int = PUBLIC_MODE) -> None:
    """Make the file `path`, which must not be there (FileExistsError), and make its name and
    content durable.
    """
    _write_new(path, content, mode)
    sync_folder(path.parent)


def erase(path: Path) -> None:
    """Overwrite a secret file with zeros, sync, unlink. (Journals and flash storage may keep
    copies: see docs/decisions.md.)

    Guarantees: only a plain file with this one name is overwritten; a link, and one of several
    names of a file, is only removed. A folder is left alone.
    """
    if overwrite(path):
        path.unlink()
        sync_folder(path.parent)


def overwrite(path: Path | str) -> bool:
    """Overwrite a secret file with zeros, and sync, as :func:`erase` does before it unlinks.
    Whether there is anything to unlink.
    """
    try:
        held = os.lstat(path)
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(held.st_mode):
        return False
    if stat.S_ISREG(held.st_mode) and held.st_nlink == 1 and held.st_size > 0:
        _zero(path)
    return True


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as hex. What is no regular file (a pipe would be waited for) is an
    OSError.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_new(path: Path, content: bytes | Callable[[str], bytes], mode: int) -> None:
    handle = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode
    )
    try:
        os.fchmod(handle, mode)
        _write_all(handle, content(inode.identity(handle)) if callable(content) else content)
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_all(handle: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]


def _zero(path: Path | str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        held = os.fstat(handle)
        left = held.st_size if stat.S_ISREG(held.st_mode) and held.st_nlink == 1 else 0
        while left > 0:
            left -= os.write(handle, bytes(min(left, 1 << 20)))
        getattr(os, "fdatasync", os.fsync)(handle)  # its length is what it was
    finally:
        os.close(handle)
