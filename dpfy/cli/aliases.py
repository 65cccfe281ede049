"""The commands and flags of earlier versions: each becomes its new form, which is printed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

COMMANDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("compare", "runs"): ("report", "compare"),
    ("compare",): ("plan", "compare"),
    ("account",): ("plan", "account"),
    ("calibrate",): ("plan", "calibrate"),
    ("explore",): ("plan", "explore"),
    ("derive",): ("report", "derive"),
    ("tune", "plan"): ("plan", "tune"),
    ("ledger", "budget"): ("ledger", "create"),
    ("predict", "released"): ("predict",),
    ("predict", "teach"): ("serve", "teach"),
    ("predict", "serve"): ("serve", "start"),
    ("predict", "student"): ("serve", "student"),
}
"""First words, longer ones first where they begin alike."""

DATA = ("init", "train", "fit", "query", "synthesize", "tune", "serve")
"""Commands that read a private table: their common flags had other names."""
FLAGS = {
    "--user": "--person",
    "--most-records": "--at-most",
    "--budget-epsilon": "--budget",
}
SERVE = {"--run": "--out"}
FIRST = {"train": ("--path", "--data"), "tune": ("--data",)}
"""Flags that named the data, which is the first argument now. An earlier one of these wins."""


def renewed(arguments: Sequence[str]) -> list[str]:
    """The arguments in their new form."""
    words = _command(list(arguments))
    if words[:2] == ["audit", "train"]:
        return ["audit", *_audited(_flags(words[1:]))]
    return _flags(words) if words and words[0] in DATA else words


def note(words: Sequence[str]) -> str:
    """What tells a user of an earlier form about the new one."""
    return f"dpfy: the command is now: {shlex.join(['dpfy', *words])}"


def _command(words: list[str]) -> list[str]:
    if words[:2] == ["ledger", "budget"] and not any(w.startswith("--epsilon") for w in words):
        return ["ledger", "show", *words[2:]]
    for old, new in COMMANDS.items():
        if tuple(words[: len(old)]) == old:
            return [*new, *words[len(old) :]]
    return words


def _audited(words: list[str]) -> list[str]:
    """The words from "train" on. Of two arguments the second was the configuration."""
    if len(words) > 2 and not words[1].startswith("-") and words[2].endswith(".toml"):
        return [*words[:2], "--config", *words[2:]]
    return words


def _flags(words: list[str]) -> list[str]:
    """The common flags by their new names, and the data in front."""
    found: list[str] = []
    data: dict[str, str] = {}
    first = FIRST.get(words[0], ())
    renamed = FLAGS | SERVE if words[0] == "serve" else FLAGS
    given = iter(words)
    for word in given:
        name, equals, value = word.partition("=")
        if name in first and (equals or (value := next(given, "")) != ""):
            data[name] = value
        elif name in renamed:
            found.append(renamed[name] + equals + value)
        else:
            found.append(word)
    named = next((data[name] for name in first if name in data), None)
    return found if named is None else [found[0], named, *found[1:]]
