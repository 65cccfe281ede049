"""Hostile command lines and mutated files: an exit status, one line, one JSON object, nothing
touched, no hang, little memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import commands
import files
import fuzzer
import sandbox
import worker
from harness import Case, changed, judged, not_one_object, snapshot


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The pristine sandbox, made once."""
    place = tmp_path_factory.mktemp("fuzz")
    sandbox.build(place / "pristine")
    return place


def report(found) -> str:
    return "\n".join([f"{found.cases} cases, {len(found.wrong)} wrong", *found.wrong[:20]])


FEW = {"commands": 150, "files": 80}


@pytest.fixture(scope="module")
def few(home):
    """Both kinds, each with its own worker and sandbox, at the same time."""
    with ThreadPoolExecutor(len(FEW)) as pool:
        yield {
            kind: pool.submit(fuzzer.fuzz, kind, 0, 0, count, home) for kind, count in FEW.items()
        }


@pytest.mark.parametrize("kind", FEW)
def test_a_few_hundred(few, kind):
    found = few[kind].result()
    assert found.cases == FEW[kind]
    assert not found.wrong, report(found)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("commands", 10_000), ("files", 5_000)])
def test_thousands(home, kind, count):
    """`make fuzz`; `python tests/fuzz/fuzzer.py commands --start N` goes on from a case."""
    found = fuzzer.fuzz(kind, 1, 0, count, home)
    assert not found.wrong, report(found)


def test_the_same_seed_gives_the_same_cases():
    for kind in (commands.cases, files.cases):
        first, again = ([case.arguments for case in islice(kind(7), 50)] for _ in range(2))
        assert first == again
        assert first != [case.arguments for case in islice(kind(8), 50)]


def test_every_verb_is_attacked():
    lines = [tuple(case.arguments) for case in islice(commands.cases(1), 600)]
    for path in commands.verbs():
        assert any(line[: len(path)] == path for line in lines), path


GOOD = {
    "status": 2,
    "escaped": None,
    "seconds": 0.1,
    "peak": 1 << 20,
    "out": "",
    "err": "dpfy: x: got 1; must be 2\n",
    "escapes": [],
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"err": "Traceback (most recent call last):\n"}, "says"),
        ({"err": "dpfy: internal error: KeyError: 1\n"}, "says"),
        ({"err": "dpfy: not enough memory for this\n"}, "says"),
        ({"err": "one\ntwo\n"}, "one line"),
        ({"err": ""}, "one line"),
        ({"out": "half an answer"}, "standard output"),
        ({"status": -11}, "exit status"),
        ({"status": None, "escaped": "ValueError()"}, "left main"),
        ({"seconds": 21.0}, "took"),
        ({"peak": 5 << 30}, "took"),
        ({"escapes": ["open '/etc/passwd'"]}, "outside"),
        ({"touched": ["work/new"]}, "left behind"),
        ({"touched": ["work/mine/notes.txt"], "status": 0}, "touched"),
        ({"touched": ["work/new/.x.part"], "status": 0}, "half-written"),
        ({"json": True, "out": ""}, "--json"),
        ({"json": True, "out": "[]"}, "--json"),
        ({"json": True, "out": "{}{}"}, "--json"),
        ({"json": True, "out": '{"a": NaN}'}, "--json"),
        ({"lost": "more than 20 s of processor time"}, "20 s"),
    ],
)
def test_the_judge_finds_each_fault(change, words):
    """A fuzzer that finds nothing must be able to find something."""
    touched, as_json = change.pop("touched", []), change.pop("json", False)
    case = Case(["account", *(["--json"] if as_json else [])], "work", owns=("work/new",))
    found = list(judged(case, GOOD | {"out": '{"error": {}}' if as_json else ""} | change, touched))
    assert any(words in problem for problem in found), found


def test_the_judge_accepts_what_is_right():
    case = Case(["account"], "work", owns=("work/new",))
    assert list(judged(case, GOOD, [])) == []
    assert list(judged(case, GOOD | {"status": 0, "err": ""}, ["work/new", "work/new/card"])) == []
    assert not_one_object('{"a": null}') is None


def test_a_snapshot_tells_every_change(tmp_path):
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").mkdir()
    (tmp_path / "c").symlink_to("a")
    before = snapshot(tmp_path)
    assert changed(before, snapshot(tmp_path)) == []
    (tmp_path / "a").write_text("2")
    (tmp_path / "b" / "new").write_text("")
    os.unlink(tmp_path / "c")
    assert changed(before, snapshot(tmp_path)) == ["a", "b/new", "c"]


def test_the_guard_blocks_what_is_outside(tmp_path):
    guard = worker.Guard(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path.parent)
    guard("open", (str(tmp_path / "new"), "w", os.O_WRONLY))
    guard("open", ("/etc/passwd", "r", os.O_RDONLY))
    for event, arguments in (
        ("open", (str(tmp_path.parent / "x"), "w", os.O_WRONLY | os.O_CREAT)),
        ("open", (str(tmp_path / "link" / "x"), "w", os.O_WRONLY | os.O_CREAT)),
        ("os.rename", (str(tmp_path / "a"), "/dev/full", -1, -1)),
        ("os.remove", ("/dev/null", -1)),
    ):
        with pytest.raises(PermissionError):
            guard(event, arguments)
    assert len(guard.escapes) == 4


HARD = [
    ["account", "--noise-multiplier", "1e308", "--delta", "1e-5"],
    ["account", "--phases", "pipe", "--delta", "1e-5"],
    ["audit", "mechanism", "--bands", "4294967296"],
    ["inspect", "--shape", "1x99999999x99999999"],
    ["train", "--batch-size", "1e-320", "--out", "new"],
    ["verify", "pipe"],
    ["report", "loop"],
    ["train", "--out", "mine"],
]


def test_as_processes_of_their_own(home):
    """Without the worker: a real process, its memory bounded by the system, what it says at its
    very end included.
    """
    place = sandbox.copy(home / "pristine", home / "own")
    before = snapshot(place)
    for arguments in HARD:
        shell = f'ulimit -v {8 << 20}; exec "$0" -m dpfy "$@"'
        found = subprocess.run(
            ["sh", "-c", shell, sys.executable, *arguments, "--json"],
            capture_output=True, text=True, cwd=place, timeout=1200, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert found.returncode == 2, (arguments, found.stderr)
        assert found.stderr.count("\n") == 1, found.stderr
        assert set(json.loads(found.stdout)) == {"error"}
        assert "internal" not in found.stderr
        assert changed(before, snapshot(place)) == [], arguments
