"""Files of a user, read with care: only regular files, never more than a limit, and every fault is
one line with its field.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from dpfy.core.errors import Corrupt, InvalidInput

MOST_TEXT = 64 << 20
"""No configuration, card or list of metrics is longer than this."""
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
