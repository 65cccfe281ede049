"""Time per example and peak memory as the logical batch grows from 64 to 65,536 at a fixed physical
batch: both should be flat.

    python benchmarks/growth.py                                   # CPU seconds at one thread
    python benchmarks/growth.py --device cuda --physical 1024 --width 2048

Every point is a run of dpfy.PrivateTraining (ledger, sampler, engine, noise, optimizer) in a fresh
process, so that its peak is its own. The first logical batch is not timed. Points are visited in
turn, round by round, and medians are reported. What a step costs once (noise and update) is shared
by the examples of its logical batch, so the time per example may fall at first; it must not rise.
Writes growth.md and growth.json into --out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from cases import perceptron
from step import machine
from torch.nn import functional

import dpfy

LOGICAL = (64, 256, 1024, 4096, 16_384, 65_536)
RECORDS = 2 * LOGICAL[-1]
CLASSES = 10


def status(field: str) -> float:
    """MiB of this process, by the kernel."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) / 1024


class Meter:
    """Seconds and peak memory since it was made."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the highest point so far is forgotten
        self.start = time.perf_counter() if self.cuda else time.process_time()

    def read(self) -> tuple[float, float]:
        """(seconds: wall clock on a GPU, CPU seconds otherwise; peak MiB: tensors on a GPU, the
        whole process otherwise).
        """
        if self.cuda:
            torch.cuda.synchronize()
            return time.perf_counter() - self.start, torch.cuda.max_memory_allocated() / 2**20
        return time.process_time() - self.start, status("VmHWM")


def point(logical: int, options: argparse.Namespace) -> dict[str, float]:
    """One run: about `examples` examples after the first logical batch."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    train = torch.randn(RECORDS, options.features), torch.randint(0, CLASSES, (RECORDS,))
    model = perceptron(options.features, options.width, options.width, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 1 + max(2, round(options.examples / logical))
    plan = dpfy.dpsgd(RECORDS, logical, steps=steps).with_noise(1.0)
    runtime = dpfy.Runtime(max_physical_batch=options.physical, device=options.device)
    with tempfile.TemporaryDirectory() as folder:
        training = dpfy.PrivateTraining(
            model, optimizer, train, plan, dpfy.Run(f"{folder}/run", seed=0), runtime=runtime
        )
        with training:
            meter, seen = None, 0
            for x, y in training.batches():
                if meter is None and training.steps_done:
                    meter = Meter(options.device)
                training.step(functional.cross_entropy(model(x), y, reduction="none"))
                seen += len(x) if meter else 0
            assert meter is not None
            seconds, peak = meter.read()
    return {
        "logical": logical,
        "steps": steps - 1,
        "microseconds": 1e6 * seconds / seen,
        "peak_mib": peak,
    }


def fresh(logical: int, options: argparse.Namespace) -> dict[str, float]:
    """`point` in a process of its own."""
    flags = {
        k: v
        for k, v in vars(options).items()
        if k in ("device", "physical", "features", "width", "examples", "threads")
    }
    command = [
        sys.executable,
        __file__,
        "--point",
        str(logical),
        *[part for k, v in flags.items() for part in (f"--{k}", str(v))],
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def measured(options: argparse.Namespace) -> list[dict[str, float]]:
    """The points, medians over the rounds, with ratios to the smallest batch (inside each round, so
    that a busy machine cancels).
    """
    rounds = [
        [fresh(logical, options) for logical in options.logical] for _ in range(options.rounds)
    ]
    rows = []
    for i, logical in enumerate(options.logical):
        column = [each[i] for each in rounds]
        row = {"logical": logical, "steps": column[0]["steps"]}
        for what in ("microseconds", "peak_mib"):
            row[what] = statistics.median(each[what] for each in column)
            row[f"{what}_ratio"] = statistics.median(
                each[what] / first[0][what] for each, first in zip(column, rounds, strict=True)
            )
        rows.append(row)
    return rows


def table(rows: list[dict[str, float]], options: argparse.Namespace, where: dict[str, str]) -> str:
    """The results as Markdown."""
    what = (
        f"MLP {options.features}-{options.width}-{options.width}-{CLASSES}, physical batch "
        f"{options.physical}, noise included"
    )
    lines = [
        "# Growth of the logical batch",
        "",
        what,
        "",
        ", ".join(f"{k} {v}" for k, v in where.items()),
        "",
    ]
    lines += [
        "| logical batch | microseconds per example (ratio) | peak MiB (ratio) |",
        "|---|---|---|",
    ]
    for r in rows:
        seconds, peak = (
            f"{r['microseconds']:.1f} ({r['microseconds_ratio']:.2f})",
            f"{r['peak_mib']:.1f} ({r['peak_mib_ratio']:.3f})",
        )
        lines.append(f"| {r['logical']:,} | {seconds} | {peak} |")
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--logical", type=lambda s: [int(n) for n in s.split(",")], default=list(LOGICAL)
    )
    parser.add_argument("--physical", type=int, default=64)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument(
        "--examples",
        type=int,
        default=RECORDS,
        help="examples of a point, at least two logical batches",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--point", type=int, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Run the points, print and write the table."""
    options = parse()
    if options.point is not None:
        print(json.dumps(point(options.point, options)))
        return 0
    rows = measured(options)
    torch.set_num_threads(options.threads)
    where: dict[str, Any] = machine(options.device)
    print(table(rows, options, where))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "growth.md").write_text(table(rows, options, where))
        (options.out / "growth.json").write_text(
            json.dumps({"machine": where, "physical": options.physical, "rows": rows}, indent=1)
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
