"""What a verb says and the files it writes: one JSON object or lines of text on standard output,
safe for a terminal; a file is refused before the work where it could not be written after it.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dpfy.core import storage
from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.core.storage import write_atomically

MOST_LINE = 600
"""Characters of a message."""
PICTURE = {".svg": (b"<?xml", b"<svg"), ".png": (b"\x89PNG",)}
PAGE = {".html": (b"<!doctype html",), ".htm": (b"<!doctype html",)}
ROOM = len(".") + len(".part")
"""What the temporary name is longer by."""


class Unwritable(DpfyError):
    """Standard output takes no more: a full disk, a closed pipe."""


class OutputState:
    """Whether the verb under way has given its JSON object already: an error after it must not
    print a second one.
    """

    once = False


def tell(answer: Mapping[str, Any], text: str | Iterable[str], *, as_json: bool) -> None:
    """Print the answer of a verb: one strict JSON object, or its text.

    Guarantees: with `as_json` exactly one object, without NaN and Infinity; no control character of
    a text reaches the terminal.
    """
    if as_json:
        OutputState.once = True
        out(json.dumps(finite(answer), allow_nan=False))
        return
    for line in [text] if isinstance(text, str) else text:
        out(printable(line))


def out(line: str) -> None:
    """One line on standard output, and that it arrived."""
    try:
        print(line, flush=True)
    except UnicodeEncodeError:  # a terminal of few letters
        out(line.encode("ascii", "backslashreplace").decode())
    except OSError as problem:
        raise Unwritable(
            f"standard output: cannot be written ({problem.strerror or type(problem).__name__})"
        ) from None


def finite(value: Any) -> Any:
    """A value as JSON can hold it: infinities as words, what is not a number as null, paths as
    text.
    """
    if isinstance(value, float):
        return (
            None
            if math.isnan(value)
            else value
            if math.isfinite(value)
            else ("infinity" if value > 0 else "-infinity")
        )
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def printable(text: str) -> str:
    """Text without control characters (a name in a report must not move the cursor) and without
    broken letters.
    """
    return "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text)


def one_line(text: str, most: int = MOST_LINE) -> str:
    """A message as one line of at most `most` characters."""
    line = printable(" ".join(text.split("\n"))).strip()
    return line if len(line) <= most else line[: most - 3] + "..."


def _escaped(character: str) -> str:
    return "    " if character == "\t" else character.encode("unicode_escape").decode()


def require_writable(flag: str, path: Path, kinds: Mapping[str, tuple[bytes, ...]]) -> Path:
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


def charged(epsilon: float | str, ledger: str | Path | None) -> list[str]:
    """For the end of a run: what is left of the budget of its data set, if it has one."""
    if ledger is None:
        return []
    from dpfy.core.ledger import Ledger
    from dpfy.report import spending, spending_page

    held = Ledger.read(Path(ledger))
    runs = len(set(held.book.runs.values()))
    return spending_page.charged(spending.allowance(held), float(epsilon), runs)


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
