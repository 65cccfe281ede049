"""Runs cases in a worker and judges each: status, one line, one JSON object, no file touched, no
hang, little memory.
"""

from __future__ import annotations

import json
import os
import re
import select
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import worker

STATUSES = (0, 1, 2, 130)
SECONDS = 20.0
"""Processor time of a case."""
PATIENCE = 300.0
"""Seconds without any use of the processor after which a case hangs: it waits for a pipe, say. A
busy machine is only slower.
"""
MEMORY = 4 << 30
PROGRESS = "training "
"""How a line of progress begins."""
BUGS = re.compile(
    r"Traceback|internal error|internal check failed|not enough memory|Exception ignored|File "
    r"\"[^\"]+\", line \d+"
)

Snapshot = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """A command line, run in `folder` of the sandbox. `owns` are the places (by prefix) that a run
    that is not refused may write.
    """

    arguments: list[str]
    folder: str
    owns: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    """Places that a refused run may write too: the ledger of a data set keeps what was reserved and
    given back.
    """
    note: str = ""
    prepare: Callable[[Path], None] | None = None
    """Changes files of the folder before the command line is run."""

    def line(self) -> str:
        return " ".join(
            repr(a) if re.search(r"[^\w./=,:+-]", a) or not a else a for a in self.arguments
        )[:900]


@dataclass
class Findings:
    """What was run and what was wrong."""

    cases: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    largest: tuple[int, str] = (0, "")


def snapshot(home: Path) -> Snapshot:
    """Every name below `home` with what tells a change: kind, mode, inode, size and times (a change
    of content changes them).
    """
    found: Snapshot = {}
    for folder, names, files in os.walk(home):
        for name in [*names, *files]:
            path = os.path.join(folder, name)
            held = os.lstat(path)
            key = (held.st_mode, held.st_ino)
            if not stat.S_ISDIR(held.st_mode):
                key += (held.st_size, held.st_mtime_ns, held.st_ctime_ns)
            found[os.path.relpath(path, home)] = key
    return found


def changed(before: Snapshot, after: Snapshot) -> list[str]:
    """Names that came, went or changed."""
    return sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )


class Worker:
    """The process that runs cases; a new one takes its place when it dies or hangs."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        asked, answered = os.pipe(), os.pipe()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                worker.__file__,
                str(self.home),
                str(asked[0]),
                str(answered[1]),
            ],
            pass_fds=(asked[0], answered[1]),
            env=os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "svg"},
            stdin=subprocess.DEVNULL,
        )
        os.close(asked[0])
        os.close(answered[1])
        self.to, self.back = os.fdopen(asked[1], "w"), os.fdopen(answered[0], "rb", buffering=0)
        self.held = b""
        assert self.answer(300) == {"ready": True}

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.to.close()
            self.back.close()
            self.process = None

    def ask(self, case: Case) -> dict[str, Any]:
        """How the case ended; {"lost": why} where the worker died or had to be stopped."""
        if self.process is None:
            self.start()
        assert self.process is not None
        print(
            json.dumps({"arguments": case.arguments, "folder": case.folder}),
            file=self.to,
            flush=True,
        )
        last = used = self.processor()
        idle = time.monotonic()
        while True:
            if (found := self.answer(1.0)) is not None:
                return found
            if (now := self.processor()) != last:
                last, idle = now, time.monotonic()
            if self.process.poll() is not None:
                lost = f"the process died ({self.process.returncode})"
            elif now - used > SECONDS:
                lost = f"more than {SECONDS:g} s of processor time"
            elif time.monotonic() - idle > PATIENCE:
                lost = f"hung: idle for {PATIENCE:g} s after {now - used:.1f} s at work"
            else:
                continue
            self.stop()
            return {"lost": lost}

    def answer(self, wait: float) -> dict[str, Any] | None:
        until = time.monotonic() + wait
        while b"\n" not in self.held:
            if not select.select([self.back], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            part = self.back.read(1 << 16)
            if not part:
                return None
            self.held += part
        line, self.held = self.held.split(b"\n", 1)
        return dict(json.loads(line))

    def processor(self) -> float:
        """Processor seconds of the process so far."""
        assert self.process is not None
        try:
            parts = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            return 0.0
        return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def judged(case: Case, found: dict[str, Any], touched: list[str]) -> Iterator[str]:
    """What is wrong with how a case ended."""
    if "lost" in found:
        yield found["lost"]
        return
    status, out, err = found["status"], found["out"], found["err"]
    if found["escaped"]:
        yield f"an exception left main: {found['escaped']}"
    if status not in STATUSES:
        yield f"exit status {status}"
    if BUGS.search(err) or BUGS.search(out):
        yield f"says: {(err or out)[-300:]!r}"
    if found["seconds"] > SECONDS:
        yield f"took {found['seconds']:.1f} s"
    if found["peak"] > MEMORY:
        yield f"took {found['peak'] >> 20} MiB"
    for escape in found["escapes"]:
        yield f"wrote outside the sandbox: {escape}"
    helped = any(a in ("--help", "--version") for a in case.arguments)
    asked = "--json" in case.arguments and not helped
    if asked and (problem := not_one_object(out)):
        yield f"--json: {problem}: {out[:200]!r}"
    if status == 2 and not helped and not asked_for_help(out):
        lines = [
            line for line in err.splitlines() if line.strip() and not line.startswith(PROGRESS)
        ]
        if len(lines) != 1 and not (
            lines and lines[0] == f"dpfy: {len(lines) - 1} problems:" and len(lines) > 2
        ):
            yield f"a refusal is one line, or one for each problem: {err[:300]!r}"
        if out and not asked:
            yield f"a refusal says nothing on standard output: {out[:200]!r}"
    owns = case.keeps if status == 2 else case.owns + case.keeps
    foreign = [
        name
        for name in touched
        if not any(_within(name, own) or _within(own, name) for own in owns)
    ]
    if foreign:
        yield f"{'left behind' if status == 2 else 'touched'}: {foreign[:4]}"
    if partial := [name for name in touched if name.endswith(".part")]:
        yield f"half-written: {partial[:3]}"


def _within(name: str, place: str) -> bool:
    return name == place or name.startswith(place + "/")


def asked_for_help(out: str) -> bool:
    """A group without a verb shows its help."""
    return out.lstrip().startswith("Usage:")


def not_one_object(out: str) -> str | None:
    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        if not isinstance(json.loads(out, parse_constant=refuse), dict):
            return "no object"
    except ValueError as problem:
        return f"not one strict object ({problem})"
    return None
