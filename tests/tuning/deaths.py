"""A server that makes searches in children that die at a chosen call to the operating system. It
has imported and computed everything once.

One JSON object a line comes in: path, options of the search, death (the number of the call) or
null, tally (a file) or null. The exit status of the child goes out.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import toy

from dpfy.tuning.run import Execution

CALLS = ("fsync", "fdatasync", "replace", "unlink", "mkdir", "rmdir", "write")
"""What is counted: everything durable goes through these."""


def search(path: str, options: dict[str, Any], death: int | None, tally: str | None) -> None:
    """A search, resumed if there is something to resume; killed before the call of this number."""
    count = itertools.count(1)
    real = {name: getattr(os, name) for name in CALLS}

    def counted(name: str) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            if next(count) == death:
                os._exit(137)
            return None if "sync" in name else real[name](*arguments, **more)  # no power fails here

        return call

    for name in CALLS:
        setattr(os, name, counted(name))
    resume = Path(path).exists() and any(Path(path).iterdir())
    toy.search(
        Path(path),
        resume=resume,
        work=Execution(scaled=toy.scaled, checkpoint_every=0.0),
        **options,
    )
    if tally is not None:
        Path(tally).write_text(json.dumps(next(count) - 1))


def main() -> None:
    """Serve until the input ends."""
    with tempfile.TemporaryDirectory() as place:
        toy.search(Path(place) / "run")
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                search(**asked)
            except BaseException as problem:
                print(f"{type(problem).__name__}: {problem}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
