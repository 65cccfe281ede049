"""What a verb says: one JSON object or lines of text on standard output, safe for a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dpfy.core.errors import DpfyError

MOST_LINE = 600
"""Characters of a message."""


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
    """Text without control characters (a name in a card must not move the cursor) and without
    broken letters.
    """
    return "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text)


def one_line(text: str, most: int = MOST_LINE) -> str:
    """A message as one line of at most `most` characters."""
    line = printable(" ".join(text.split("\n"))).strip()
    return line if len(line) <= most else line[: most - 3] + "..."


def _escaped(character: str) -> str:
    return "    " if character == "\t" else character.encode("unicode_escape").decode()
