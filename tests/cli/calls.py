"""What tests of the command line share: a call in this process, and a table of one's own with its
schema.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dpfy.cli.app import main

HEADER = "id,age,job,hours,income"


def call(capsys, *arguments):
    """(exit status, standard output, standard error) of the command line, in this process."""
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    shown = capsys.readouterr()
    return stop.value.code, shown.out, shown.err


def refused(capsys, *arguments):
    """What an exit with status 2 says: one line, or one for each of several problems."""
    status, out, err = call(capsys, *arguments)
    lines = [line for line in err.splitlines() if line.strip()]
    assert status == 2, (status, err)
    assert out == ""
    assert told_by_line(lines), err
    return " ".join(lines)


def told_by_line(lines):
    """Whether these lines are one problem, or a count of problems and a line for each."""
    return len(lines) == 1 or [line.split(".")[0].strip() for line in lines[1:]] == [
        str(k + 1) for k in range(int(lines[0].removeprefix("dpfy: ").split(" problems:")[0]))
    ]


def rows(count: int) -> str:
    coin = random.Random(1)
    lines = []
    for k in range(count):
        hours, job = coin.randint(10, 60), coin.choice(["clerk", "nurse"])
        lines.append(f"{k},{coin.randint(18, 80)},{job},{hours},{'high' if hours > 35 else 'low'}")
    return "\n".join([HEADER, *lines]) + "\n"


def fill(schema: Path) -> None:
    text = schema.read_text()
    for key, value in (
        ('classes = "?"', 'classes = ["low", "high"]'),
        ('categories = "?"', 'categories = ["clerk", "nurse"]'),
    ):
        text = text.replace(key, value)
    schema.write_text(text.replace('range = "?"', "range = [0, 100]"))
