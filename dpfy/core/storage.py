"""Which file this is: an identity that a file keeps for life and that no copy of it has.

It is the number of the inode and the time of its creation. Renaming a file or a folder above it,
changing its owner, its mode or its content and restarting the machine keep both. A copy, an
unpacked archive and a restored backup have others, and so has a file that is made after this one
was removed, even if it gets the same number. The device number is left out: it changes between
restarts, containers and mounts.

Where a file system keeps no time of creation (NFS and FUSE on older kernels) the inode number alone
counts. A copy of a whole disk, or a snapshot of one that is put back, has the same identities.

Durable files: whole or not at all, and never through a link.

Every write is to a new temporary file with a random name, synced, renamed, and the folder synced. A
link that somebody planted where a file of ours is to be is replaced or removed itself; what it
points to is never written, cut or overwritten with zeros.

Files of a user, read with care: only regular files, never more than a limit, and every fault is
one line with its field.

One process at a time: advisory locks that are tried before they are trusted.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import struct
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from dpfy.core.errors import Busy, Corrupt, InvalidInput, Unsupported

AT_EMPTY_PATH, STATX_BTIME, SIZE = 0x1000, 0x800, 256
MASK, BIRTH = (0, "<I"), (80, "<qI")
"""Of `struct statx`: where the mask of valid fields and the time of creation lie (the same on every
Linux).
"""


def identity(handle: int) -> str:
    """The identity of an open file, as text without meaning for others."""
    return f"{os.fstat(handle).st_ino} {_birth(handle)}"


def identity_of(path: Path) -> str:
    """The identity of the file at `path`; a link is not followed."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return identity(handle)
    finally:
        os.close(handle)


def _birth(handle: int) -> int:
    """When the file was made, in nanoseconds; 0 where the system does not say."""
    held = os.fstat(handle)
    if (made := getattr(held, "st_birthtime", None)) is not None:
        return int(getattr(held, "st_birthtime_ns", made * 1e9))
    if (statx := _statx()) is None:
        return 0
    buffer = ctypes.create_string_buffer(SIZE)
    if statx(handle, b"", AT_EMPTY_PATH, STATX_BTIME, buffer) != 0:
        return 0
    (mask,) = struct.unpack_from(MASK[1], buffer, MASK[0])
    seconds, nanoseconds = struct.unpack_from(BIRTH[1], buffer, BIRTH[0])
    return int(seconds) * 10**9 + int(nanoseconds) if mask & STATX_BTIME else 0


@cache
def _statx() -> Any:
    """The function of the C library; None where it has none."""
    try:
        return ctypes.CDLL(None).statx
    except (OSError, AttributeError):
        return None


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
    for life (:mod:`dpfy.core.storage`).

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
        _write_all(handle, content(identity(handle)) if callable(content) else content)
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


MOST_TEXT = 64 << 20
"""No configuration, report or list of metrics is longer than this."""
MOST_DATA = 2 << 30
"""Data of one file, unpacked: all of it is held in memory several times."""
MOST_BITS = 1024
"""No whole number of a configuration has more."""


class Readable(Protocol):
    """What bytes are read from: a file, or one that is unpacked on the way."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""


def content(field: str, path: Path, *, most: int = MOST_TEXT, name: str | None = None) -> bytes:
    """All bytes of a regular file.

    Guarantees: a pipe, a device, a folder and a file above `most` bytes are refused without being
    waited for or read.
    """
    shown = str(path) if name is None else name
    with opened(field, path, shown) as file:
        found = up_to(file, most + 1)
    if len(found) > most:
        raise InvalidInput(field, shown, f"holds more than {most} bytes")
    return found


@contextmanager
def opened(field: str, path: Path, shown: str) -> Iterator[BinaryIO]:
    """A regular file, open for reading; a fault of the system while it is read is one line too.

    Guarantees: a pipe, a device and a folder are refused without being waited for.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as problem:
        raise InvalidInput(field, shown, why(problem, "cannot be read")) from None
    except ValueError:
        raise InvalidInput(field, shown, "is not the name of a file") from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise InvalidInput(field, shown, f"must be a file, and is {kind(mode)}")
    try:
        with os.fdopen(handle, "rb") as file:
            yield file
    except OSError as problem:
        raise InvalidInput(field, shown, why(problem, "cannot be read")) from None


def up_to(file: Readable, most: int) -> bytes:
    """In pieces: asking for all at once would allocate `most` bytes before the first is read."""
    parts, left = [], most
    while left > 0 and (part := file.read(min(left, 1 << 24))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def text(field: str, path: Path, *, most: int = MOST_TEXT) -> str:
    """A regular file as UTF-8."""
    try:
        return content(field, path, most=most).decode("utf-8")
    except UnicodeDecodeError as problem:
        raise InvalidInput(field, str(path), f"is not UTF-8 text (byte {problem.start})") from None


def toml(field: str, path: Path) -> dict[str, Any]:
    """A regular file as TOML."""
    return parsed_toml(field, str(path), text(field, path))


def parsed_toml(field: str, name: str, written: str) -> dict[str, Any]:
    """Text as TOML; what is no TOML, holds a number that none can be, or is nested without end is
    refused.
    """
    try:
        found = tomllib.loads(written)
    except RecursionError:
        raise InvalidInput(field, name, "is nested too deeply") from None
    except ValueError as problem:
        raise InvalidInput(field, name, f"is not TOML ({problem})") from None
    if _holds_giant(found):  # hexadecimal ones pass the parser, and can be written nowhere
        raise InvalidInput(field, name, "holds a whole number of more than 300 digits")
    return found


def _holds_giant(tree: dict[str, Any]) -> bool:
    """Whether a whole number in `tree` is beyond every float."""
    held: list[Any] = [tree]
    while held:
        value = held.pop()
        if isinstance(value, dict | list):
            held += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and value.bit_length() > MOST_BITS:
            return True
    return False


def parsed_json(name: str, written: str | bytes) -> Any:
    """Text as JSON; what is none (NaN and Infinity are not) is :class:`Corrupt`."""
    try:
        return json.loads(written, parse_constant=_refused)
    except RecursionError:
        raise Corrupt(name, "is nested too deeply") from None
    except ValueError:
        raise Corrupt(name, "is not JSON") from None


def why(problem: OSError, otherwise: str) -> str:
    """The rule that an operating system's error stands for."""
    if problem.errno in (errno.ENOENT, errno.ENOTDIR):
        return "does not exist"
    return f"{otherwise} ({problem.strerror or type(problem).__name__})"


def kind(mode: int) -> str:
    """What something that is no regular file is, in words."""
    names = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return names.get(stat.S_IFMT(mode), "something else")


def _refused(constant: str) -> Any:
    raise ValueError(constant)


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
            "file", str(path), why(problem, "cannot be opened for writing")
        ) from None
    except ValueError:
        raise InvalidInput("file", str(path), "is not the name of a file") from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise InvalidInput("file", str(path), f"must be a file, and is {kind(mode)}")
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
