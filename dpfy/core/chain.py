"""Lines chained by hash, and how much of them is durable.

One line is ``{"body": {...}, "hash": h, "previous": p}`` in canonical JSON, where h is the SHA-256
of p and the body; h of the last line is the head. Beside a chain lies its mark, ``NAME.head``:
length, number of lines and head of what is durable, written before the first line and after every
append. A line that a crash cut short lies beyond the mark and was never promised to anybody; bytes
missing before the mark were lost. A chain without its mark may have lost lines, and takes no more.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpfy.core import reading
from dpfy.core.codec import canonical
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.storage import write_atomically

ORIGIN = "0" * 64
MOST = 256 << 20
"""No chain is longer than this, in bytes."""
BEGINS = b'{"body":'
"""How every line begins."""


@dataclass
class Chain:
    """The bodies of a chain's lines, and the head after each of them."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)

    @property
    def head(self) -> str:
        """The hash of the last line, and through it of all lines."""
        return self.heads[-1] if self.heads else ORIGIN

    def add(self, body: dict[str, Any]) -> bytes:
        """Take one more body; its line."""
        line, head = _line(self.head, body)
        self.bodies.append(body)
        self.heads.append(head)
        return line


def read(path: Path) -> Chain:
    """The chain in a file that nobody writes to; `Corrupt` where a byte was changed, cut off or
    lost.
    """
    if not path.is_file():
        raise Corrupt(path.name, "the ledger is missing")
    mark = _mark(path)  # first, for a chain only grows
    try:
        text = reading.content("ledger", path, most=MOST)
    except InvalidInput as problem:
        raise Corrupt(path.name, problem.rule) from None
    chain = parse(path.name, text)
    _within(path.name, text, chain, mark)
    return chain


def recognise(path: Path) -> None:
    """Refuse, before anybody opens it for writing, a file that holds something else and one that is
    not there any more.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if (
            path.is_symlink()
        ):  # as when a disk is missing: an empty ledger in its place would forget what was spent
            raise InvalidInput(
                "ledger",
                str(path),
                "is a link to a file that is not there; bring it back or remove the link",
            ) from None
        if (mark := _mark(path)) is not None and mark["entries"] > 0:
            raise Corrupt(path.name, _lost(0, mark)) from None
        return
    except (OSError, ValueError):
        return  # nothing that can be read: opening it for writing says why
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise InvalidInput("ledger", str(path), f"must be a file, and is {reading.kind(mode)}")
        first = os.read(handle, len(BEGINS))
    except OSError as problem:  # as memory that looks like a file does
        raise InvalidInput("ledger", str(path), reading.why(problem, "cannot be read")) from None
    finally:
        os.close(handle)
    if not BEGINS.startswith(first):
        raise Corrupt(path.name, "line 1 is not a ledger entry")


def load(path: Path, handle: int) -> Chain:
    """The chain in a locked file. A last line that a crash cut short before it was durable is
    removed.

    Guarantees: nothing that was ever durable is dropped: where the mark does not prove that a torn
    line was not, it is `Corrupt`. So is a chain whose mark is missing: lines at its end may have
    been removed, and what they reserved would be free again (:func:`recover`).
    """
    text = _read_all(path.name, handle)
    mark = _mark(path)
    if mark is None:
        if text:
            raise Corrupt(path.name, _unmarked(path.name))
        return Chain()
    if text and not text.endswith(b"\n"):
        text = _mended(path.name, handle, text, mark)
    chain = parse(path.name, text)
    _within(path.name, text, chain, mark)
    if mark["length"] < len(text):  # a crash came between line and mark
        os.fsync(handle)
        _write_mark(path, chain, len(text))
    return chain


def append(path: Path, handle: int, chain: Chain, body: dict[str, Any]) -> None:
    """Write one more line to a locked file.

    Guarantees: on return line and mark are on disk; a full disk leaves the chain as it was.
    """
    line, _ = _line(chain.head, body)
    start = os.lseek(handle, 0, os.SEEK_END)
    if start + len(line) > MOST:
        raise InvalidInput("ledger", path.name, f"would grow beyond {MOST} bytes; begin a new one")
    if not chain.bodies:
        _write_mark(
            path, chain, 0
        )  # before the first line: so a chain without a mark has always lost it
    try:
        view = memoryview(line)
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
    except OSError:
        os.ftruncate(handle, start)
        raise
    chain.add(body)
    _write_mark(path, chain, start + len(line))


def recover(path: Path, handle: int, head: str) -> Chain:
    """The whole chain in a locked file whose mark is lost, with a new mark, if its last line is the
    one whose hash is `head`.

    The caller states the head, and so that no line after it was removed. A mark that is there is
    never replaced.
    """
    chain = parse(path.name, text := _read_all(path.name, handle))
    if _mark(path) is not None:
        raise InvalidInput(
            "ledger", path.name, f"has its {mark_of(path).name}: there is nothing to recover"
        )
    if not text or head != chain.head:
        raise InvalidInput(
            "--head",
            head,
            f"is not the hash of the last line of {path.name}: lines are missing; bring back a "
            f"copy",
        )
    _write_mark(path, chain, len(text))
    return chain


def marked(path: Path) -> bool:
    """Whether the mark of the chain at `path` is there."""
    return os.path.lexists(mark_of(path))


def mark_of(path: Path) -> Path:
    """Where the mark of the chain at `path` lies."""
    return path.with_name(path.name + ".head")


def parse(name: str, text: bytes) -> Chain:
    """Check every line and every hash."""
    if text and not text.endswith(b"\n"):
        raise Corrupt(name, "the last line is cut short")
    chain = Chain()
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):
        try:
            body = reading.parsed_json(name, line)["body"]
            if not isinstance(body, dict):
                raise TypeError
            expected = chain.add(body)
        except (Corrupt, ValueError, KeyError, TypeError, RecursionError):
            raise Corrupt(name, f"line {number} is not a ledger entry") from None
        if expected != line + b"\n":
            raise Corrupt(
                name,
                f"line {number} does not match its hash: it was changed, or a line before it was "
                f"removed",
            )
    return chain


def _line(previous: str, body: dict[str, Any]) -> tuple[bytes, str]:
    head = hashlib.sha256((previous + canonical(body)).encode()).hexdigest()
    return (canonical({"body": body, "hash": head, "previous": previous}) + "\n").encode(), head


def _mark(path: Path) -> dict[str, Any] | None:
    file = mark_of(path)
    if not os.path.lexists(file):
        return None
    try:
        mark = reading.parsed_json(file.name, reading.content("ledger", file, most=1 << 12))
        if (
            type(mark["length"]) is not int
            or type(mark["entries"]) is not int
            or not isinstance(mark["head"], str)
        ):
            raise TypeError
    except InvalidInput as problem:
        raise Corrupt(file.name, problem.rule) from None
    except (Corrupt, KeyError, TypeError):
        raise Corrupt(
            file.name, "is damaged: it holds length, entries and head of the ledger beside it"
        ) from None
    return dict(mark)


def _write_mark(path: Path, chain: Chain, length: int) -> None:
    stated = {"entries": len(chain.bodies), "head": chain.head, "length": length}
    write_atomically(mark_of(path), (canonical(stated) + "\n").encode())


def _within(name: str, text: bytes, chain: Chain, mark: dict[str, Any] | None) -> None:
    """What the mark says is durable is there."""
    if mark is None:
        return
    entries = mark["entries"]
    if len(text) < mark["length"] or len(chain.heads) < entries:
        raise Corrupt(name, _lost(len(text), mark))
    if entries < 0 or mark["head"] != (chain.heads[entries - 1] if entries else ORIGIN):
        raise Corrupt(
            name,
            f"is not the ledger that {name}.head was written for; bring back the two files that "
            f"belong together",
        )


def _unmarked(name: str) -> str:
    return (
        f"has lost {name}.head: lines at its end may have been removed, and their budget must not "
        f"come back; bring back both files, "
        "or state its head (dpfy ledger recover)"
    )


def _lost(length: int, mark: dict[str, Any]) -> str:
    return (
        f"has {length} bytes where {mark['length']} in {mark['entries']} lines were durable: lines "
        f"that were reserved are lost; "
        "bring the file back from a copy"
    )


def _read_all(name: str, handle: int) -> bytes:
    os.lseek(handle, 0, os.SEEK_SET)
    parts, left = [], MOST + 1
    while left > 0 and (part := os.read(handle, min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    if left <= 0:
        raise Corrupt(name, f"holds more than {MOST} bytes")
    return b"".join(parts)


def _mended(name: str, handle: int, text: bytes, mark: dict[str, Any]) -> bytes:
    """Deal with a last line without its end: keep it if it is whole, drop it if the mark proves
    that it was never durable.
    """
    whole, _, tail = text.rpartition(b"\n")
    whole = whole + b"\n" if whole else b""
    try:
        parse(name, whole + tail + b"\n")
    except Corrupt:
        if len(whole) < mark["length"]:
            raise Corrupt(name, _lost(len(text), mark)) from None
        os.ftruncate(handle, len(whole))
    else:
        whole = whole + tail + b"\n"
        os.lseek(handle, 0, os.SEEK_END)
        os.write(handle, b"\n")
    os.fsync(handle)
    return whole
