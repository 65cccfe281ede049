"""A process that runs command lines in a sandbox, one after the other, and tells how each ended.

It reads one JSON object a line on the pipe named by its arguments, and answers with one. Starting
dpfy costs seconds, so cases share the process; what a case may do is watched here: files outside
the sandbox, memory, time.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import stat
import sys
import tempfile
import time
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

ROOM = 2 << 30
"""Memory that a case may ask for beyond what the process has: a case that needs more is told so,
and that is a finding.
"""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGES = (
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.truncate",
    "os.chmod",
    "os.link",
    "os.symlink",
    "shutil.rmtree",
)
LIBRARIES = ("matplotlib", "torchinductor")
"""Folders that libraries below make for themselves, once for all runs."""
OWN = "/proc/self/clear_refs"
"""Where a process sets its own high-water mark of memory back: no file."""
LONG = 12
"""Steps beyond which a case is not trained: it was accepted, and that is all that was asked."""


class Guard:
    """Blocks and remembers every write outside the sandbox."""

    def __init__(self, *homes: Path) -> None:
        self.homes, self.escapes = (
            tuple(os.path.realpath(home) + os.sep for home in homes),
            list[str](),
        )

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if (
                isinstance(path, str | bytes)
                and isinstance(flags, int)
                and flags & WRITES
                and not self.allowed(path)
            ):
                self.block(event, path)
        elif event in CHANGES:
            for path in arguments[: 2 if event in ("os.rename", "os.link") else 1]:
                if (
                    isinstance(path, str | bytes | os.PathLike)
                    and not self.inside(os.fsdecode(path))
                    and not any(word in str(path) for word in LIBRARIES)
                ):
                    self.block(event, path)

    def allowed(self, path: str | bytes) -> bool:
        name = os.fsdecode(path)
        try:
            device = stat.S_ISCHR(os.stat(name).st_mode) or stat.S_ISFIFO(os.stat(name).st_mode)
        except (OSError, ValueError):
            device = False
        return (
            device
            or name == OWN
            or "\0" in name
            or self.inside(name)
            or any(word in name for word in LIBRARIES)
        )

    def inside(self, name: str) -> bool:
        """By the real place of its folder: a link in the sandbox that leads outside is outside."""
        try:
            real = os.path.join(
                os.path.realpath(os.path.dirname(name) or "."), os.path.basename(name)
            )
        except (OSError, ValueError):
            return True
        return real.startswith(self.homes)

    def block(self, event: str, path: object) -> None:
        self.escapes.append(f"{event} {path!r}")
        raise PermissionError(
            13, "outside the sandbox", os.fspath(path) if isinstance(path, os.PathLike) else path
        )


def cheap() -> None:
    """Replace what would take long by a refusal: what is tested here is everything before it."""
    import webbrowser

    from dpfy.core.errors import InvalidInput
    from dpfy.report.server import Explorer
    from dpfy.training import job
    from dpfy_lab.selftest import examine
    from dpfy_lab.studies import progress

    webbrowser.open = lambda *_, **__: True  # type: ignore[assignment]
    Explorer.serve_forever = lambda self, poll_interval=0.5: None  # type: ignore[method-assign]
    planned = job.plan_of

    def plan_of(config: Any) -> Any:
        plan = planned(config)
        if plan.recipe.steps > LONG or config.data.kind in (
            "embedded",
            "mnist",
            "fashion-mnist",
            "adult",
            "shakespeare",
        ):
            raise InvalidInput("fuzz", plan.recipe.steps, "too long to train in a test")
        return plan

    def refuse(*_: Any, **__: Any) -> Any:
        raise InvalidInput("fuzz", None, "too long to run in a test")

    job.plan_of = plan_of
    progress.run_with_progress = refuse
    examine.run = refuse


def memory(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    return 0


def run(arguments: list[str], streams: tuple[Any, Any]) -> dict[str, Any]:
    """How a command line ends: status, output, processor seconds, peak of memory."""
    from dpfy.cli.app import main

    for stream in streams:
        stream.seek(0)
        stream.truncate()
    before, escaped = time.process_time(), None
    status: Any = None
    try:
        main(arguments)
    except SystemExit as ended:
        status = ended.code
    except BaseException as problem:
        escaped = repr(problem)
    sys.stdout.flush()
    sys.stderr.flush()
    found = {
        "status": status,
        "escaped": escaped,
        "seconds": time.process_time() - before,
        "peak": memory("VmHWM"),
    }
    for name, stream in zip(("out", "err"), streams, strict=True):
        stream.seek(0)
        found[name] = stream.read(1 << 20).decode("utf-8", "backslashreplace")
    return found


def serve(home: Path, asked: int, answered: int) -> None:
    """Answer cases until the pipe is closed."""
    sys.dont_write_bytecode = True
    cheap()
    streams = (TemporaryFile(buffering=0), TemporaryFile(buffering=0))  # noqa: SIM115
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
    peak = os.open("/proc/self/clear_refs", os.O_WRONLY)
    scratch = tempfile.TemporaryDirectory(prefix="dpfy-fuzz-scratch-")
    tempfile.tempdir = scratch.name
    guard = Guard(home, Path(scratch.name))
    sys.addaudithook(guard)
    limit = memory("VmSize") + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    environment = dict(os.environ)
    gc.freeze()
    with (
        os.fdopen(asked, "r", encoding="utf-8") as cases,
        os.fdopen(answered, "w", encoding="utf-8") as answers,
    ):
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in cases:
            case = json.loads(line)
            os.chdir(home / case["folder"])
            os.environ.clear()
            os.environ.update(environment)
            guard.escapes.clear()
            os.pwrite(peak, b"5", 0)
            found = run([str(a) for a in case["arguments"]], streams)
            left = [
                f"left in the temporary folder: {name}" for name in sorted(os.listdir(scratch.name))
            ]
            print(
                json.dumps(found | {"escapes": [*guard.escapes, *left][:3]}),
                file=answers,
                flush=True,
            )
            os.chdir(home)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
