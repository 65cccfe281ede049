"""The help of every command fits on one screen and ends with an example, which runs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from calls import call, rows

from dpfy.cli.app import _command
from dpfy.cli.plugins import EXAMPLE

LINES, WIDTH = 50, 100
"""A screen."""


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command of dpfy itself, groups too, with the words that name it."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


COMMANDS = dict(commands(_command()))


def example(path: tuple[str, ...]) -> list[str]:
    """The words of a command's example, without dpfy itself."""
    epilog = COMMANDS[path].epilog or ""
    assert epilog.startswith(f"{EXAMPLE}dpfy "), path
    return shlex.split(epilog.removeprefix(EXAMPLE).replace("\\[", "["))[1:]


def test_help_fits_on_a_screen_and_ends_with_an_example_of_the_command(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("TERMINAL_WIDTH", str(WIDTH))
    assert len(COMMANDS) > 40
    for path in COMMANDS:
        status, shown, _ = call(capsys, *path, "--help")
        lines = shown.rstrip().splitlines()
        assert status == 0, path
        assert len(lines) <= LINES, (path, len(lines))
        end = " ".join(shown.rpartition(EXAMPLE)[2].split())
        words = example(path)
        assert shlex.split(end)[1:] == words, path
        default = [*path[:-1], *words[len(path) - 1 :]] == words  # dpfy report RUN is report page
        assert tuple(words[: len(path)]) == path or default, path
        status, own, _ = call(capsys, *words, "--help")  # its verbs and its flags are known
        assert status == 0, words
        assert EXAMPLE in own


FIRST = (
    ("query",), ("ledger", "create"), ("synthesize", "table"), ("serve", "teach"), ("audit", "train"),
    ("train",),
)  # fmt: skip
"""Commands whose runs others read."""
ENDLESS = {("plan", "explore"): [], ("serve", "start"): ["--finish"]}
"""Commands that go on until they are stopped, and the flag that ends them at once."""


@pytest.mark.slow
def test_the_examples_run(capsys, tmp_path: Path, monkeypatch) -> None:
    """All in one folder, with the files that they name."""
    monkeypatch.chdir(tmp_path)
    Path("people.csv").write_text(rows(25_000))
    number = 'kind = "number"\nrange = [0, 100]\n'
    Path("people.toml").write_text(
        f"[columns.id]\nignore = true\n[columns.age]\n{number}[columns.hours]\n{number}"
        '[columns.job]\nkind = "category"\ncategories = ["clerk", "nurse"]\n'
        '[columns.income]\nkind = "label"\nclasses = ["low", "high"]\n'
    )
    notes = [json.dumps({"text": f"the ward was quiet on day {k % 31}"}) for k in range(20_000)]
    Path("notes.jsonl").write_text("\n".join(notes) + "\n")
    Path("small.bin").write_bytes(b"small")
    due = [*FIRST, *(path for path in COMMANDS if path not in FIRST)]
    table = ["people.csv", "--schema", "people.toml", "--epsilon", "0.5"]
    for run in ("runs/x", "runs/y"):
        words = ["train", *table, "--records", "20000", "--model", "linear", "--steps", "5"]
        assert (
            call(capsys, *words, "--delta", "1e-6", "--ledger", "people.jsonl", "--out", run)[0]
            == 0
        )
    done = []
    for path in due:
        words = [*example(path), *ENDLESS.get(path, [])]
        if words in done:
            continue
        if path == ("plan", "explore"):
            with subprocess.Popen(
                [sys.executable, "-m", "dpfy", *words], stdout=subprocess.PIPE, text=True
            ) as page:
                assert page.stdout is not None
                assert page.stdout.readline().startswith("http://127.0.0.1:")
                page.terminate()
            continue
        status, _, err = call(capsys, *words)
        assert status == 0, (words, err)
        done.append(words)
    assert all(Path(name).exists() for name in ("me.pem", "voters", "spent.svg"))
