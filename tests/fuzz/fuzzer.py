"""The fuzzers. `python tests/fuzz/fuzzer.py commands --seed 1 --count 10000` (or `files`); --start
goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import commands
import files
import sandbox
from harness import Case, Findings, Worker, changed, judged, snapshot

FRESH = 500
"""Cases that share a process: memory that libraries keep must not be laid to a later case."""
SLOW = 3.0
"""Seconds worth a remark."""
KINDS = {"commands": commands.cases, "files": files.cases}


def fuzz(
    kind: str, seed: int, start: int, count: int, home: Path, *, show: bool = False
) -> Findings:
    """Run `count` cases of a seed from number `start` on, in a sandbox below `home`."""
    pristine, place = home / "pristine", home / f"box of {kind}"
    if not pristine.exists():
        sandbox.build(pristine)
    place.mkdir(exist_ok=True)
    worker, found = Worker(place), Findings()
    sandbox.copy(pristine, place / commands.FOLDER)
    before = snapshot(place)
    try:
        for number, case in enumerate(islice(KINDS[kind](seed), start, start + count), start=start):
            if case.prepare is not None:
                case.prepare(place / commands.FOLDER)
                before = snapshot(place)
            if number % FRESH == FRESH - 1:
                worker.stop()
            answer = worker.ask(case)
            after = snapshot(place)
            touched = changed(before, after)
            wrong = list(judged(case, answer, touched))
            _count(found, case, answer, number, wrong, show)
            if touched or case.prepare is not None:
                sandbox.copy(pristine, place / commands.FOLDER)
                before = snapshot(place)
    finally:
        worker.stop()
    return found


def _count(
    found: Findings, case: Case, answer: dict, number: int, wrong: list[str], show: bool
) -> None:
    found.cases += 1
    status = str(answer.get("status", "lost"))
    found.statuses[status] = found.statuses.get(status, 0) + 1
    found.slowest = max(found.slowest, (answer.get("seconds", 0.0), case.line()))
    found.largest = max(found.largest, (answer.get("peak", 0), case.line()))
    for problem in wrong:
        found.wrong.append(f"#{number} {case.note} dpfy {case.line()}\n    {problem}")
        if show:
            print(found.wrong[-1].encode("utf-8", "backslashreplace").decode(), flush=True)
    if show and answer.get("seconds", 0.0) > SLOW:
        print(f"# slow, {answer['seconds']:.1f} s: {case.line()[:200]!r}", flush=True)
    if show and found.cases % 100 == 0:
        print(
            f"# {number + 1}: {found.statuses}, {len(found.wrong)} wrong",
            file=sys.stderr,
            flush=True,
        )


def main() -> None:
    """The long form, for a person."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--home", type=Path, default=None)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dpfy-fuzz-") as folder:
        found = fuzz(
            asked.kind, asked.seed, asked.start, asked.count, asked.home or Path(folder), show=True
        )
    print(f"{found.cases} {asked.kind}: {found.statuses}; {len(found.wrong)} wrong")
    print(
        f"slowest {found.slowest[0]:.1f} s: {found.slowest[1][:200]!r}; largest "
        f"{found.largest[0] >> 20} MiB: {found.largest[1][:200]!r}"
    )
    sys.exit(1 if found.wrong else 0)


if __name__ == "__main__":
    main()
