"""The private step of two trees of the project against each other, in turns, in one run.

    git worktree add ../before v0.1.0 python benchmarks/before_after.py --before ../before
    # the CPU set, CPU seconds at one thread python benchmarks/before_after.py --before ../before
    --device cuda        # the GPU set

Each tree has a process of its own, in which benchmarks/step.py of that tree holds a warm step; the
two are asked for a burst of steps turn and turn about, so whatever else the machine does meets
both. The ratio after / before is formed inside of each turn.

Whether the allocator gives large pieces back to the system between two steps is chance, and can be
5% of a step (2 microseconds for each page that is asked for again).
MALLOC_TRIM_THRESHOLD_=2000000000 MALLOC_MMAP_THRESHOLD_=2000000000 in the environment take it out
of both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]


class Tree:
    """A process with one tree's step, warm, that times bursts of it when asked."""

    def __init__(self, tree: Path, case: str, dtype: str, options: argparse.Namespace) -> None:
        command = [
            sys.executable,
            "-P",
            __file__,
            "--serve",
            str(tree),
            "--cases",
            case,
            "--dtypes",
            dtype,
        ]
        command += [
            "--device",
            options.device,
            "--step",
            options.step,
            "--burst",
            str(options.burst),
        ]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("BENCH_PATH", "")])
        }
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )
        self.answer()

    def answer(self) -> Any:
        """The next line that the process prints, as JSON."""
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"a benchmark process ended with status {self.process.wait()}")
        return json.loads(line)

    def burst(self) -> float:
        """Seconds of the fastest of a few steps in a row."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.answer())

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve(options: argparse.Namespace) -> None:
    """Hold a warm step of the tree and time a burst for every line of input."""
    sys.path.insert(0, str(options.serve / "benchmarks"))
    import step
    import torch

    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    known = step.GPU if options.device == "cuda" else step.CPU
    ready, batch = step._warm(
        known[options.cases], options.step, options.device, getattr(torch, options.dtypes)
    )
    clock = step.Clock(options.device)
    print(json.dumps(str(Path(step.__file__).parent)), flush=True)
    for _ in sys.stdin:
        print(json.dumps(min(clock.time(ready, batch) for _ in range(options.burst))), flush=True)


def compare(case: str, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """One case: milliseconds of both, and the median of after / before with its quartiles."""
    before, after = (Tree(tree, case, dtype, options) for tree in (options.before.resolve(), HERE))
    try:
        pairs = []
        for turn in range(options.rounds):
            first, second = (before, after) if turn % 2 else (after, before)
            seconds = {id(tree): tree.burst() for tree in (first, second)}
            pairs.append((seconds[id(before)], seconds[id(after)]))
    finally:
        before.close()
        after.close()
    ratios = [new / old for old, new in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    old, new = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "case": case,
        "dtype": dtype,
        "before_ms": old,
        "after_ms": new,
        "ratio": middle,
        "low": low,
        "high": high,
    }


def main() -> int:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--before",
        type=Path,
        default=HERE,
        help="the other tree; this one itself shows what chance does",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--cases", default="", help="comma separated; default all of the device's set"
    )
    parser.add_argument("--dtypes", default="float32", help="float32,bfloat16")
    parser.add_argument("--step", default="dpfy", help="which implementation of benchmarks/step.py")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--burst", type=int, default=3)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return 0
    sys.path.insert(0, str(HERE / "benchmarks"))
    from cases import CPU, GPU

    names = (
        options.cases.split(",")
        if options.cases
        else list(GPU if options.device == "cuda" else CPU)
    )
    for dtype in options.dtypes.split(","):
        for name in names:
            print(
                json.dumps(
                    {
                        k: round(v, 4) if isinstance(v, float) else v
                        for k, v in compare(name, dtype, options).items()
                    }
                )
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
