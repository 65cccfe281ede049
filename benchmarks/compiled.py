"""A private step on `torch.compile(model)` against the compiled plain step, and both against their
eager forms.

    python benchmarks/compiled.py                                    # mlp-256 and gpt-16, CPU
    seconds at one thread python benchmarks/compiled.py --device cuda                      #
    mlp-4096 and gpt2-t256-32, CUDA events python benchmarks/compiled.py --device cuda --cases
    vit-b16-64 --dtypes bfloat16

Before anything is timed, the private sum without clipping and noise on the compiled model is
compared with the plain gradient of the eager one. Implementations are interleaved round by round;
ratios are formed inside each round. Writes compiled.md and compiled.json into --out.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from cases import CPU, GPU, Case
from step import Clock, Step, fresh, machine, plain, private, save
from torch import nn

from dpfy.gradients.clip import FlatClip
from dpfy.gradients.cuda_graphs.captured import WARM
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine

CASES = {"cpu": ["mlp-256", "gpt-16"], "cuda": ["mlp-4096", "gpt2-t256-32"]}


def compiled(make: Callable[[nn.Module, Case], Step]) -> Callable[[nn.Module, Case], Step]:
    """The same step on the compiled model."""
    return lambda model, case: make(torch.compile(model), case)  # type: ignore[arg-type]


STEPS: dict[str, Callable[[nn.Module, Case], Step]] = {
    "plain": plain,
    "plain, compiled": compiled(plain),
    "dpfy": private,
    "dpfy, compiled": compiled(private),
}


def disagreement(case: Case, device: str, dtype: torch.dtype) -> float:
    """Relative distance of the unclipped sum on the compiled model from the plain gradient of the
    eager one.
    """
    torch._dynamo.reset()
    model, (x, y) = fresh(case, device, dtype)
    expected = [
        g.double()
        for g in torch.autograd.grad(case.losses(model(x), y).sum(), list(model.parameters()))
    ]
    engine = BookkeepingEngine()
    whole = torch.compile(model)
    engine.attach(whole)  # type: ignore[arg-type]
    for _ in range(2):
        found = engine.bounded_sum(case.losses(whole(x), y), FlatClip(math.inf)).value.values()
    engine.detach()
    gap = math.sqrt(
        sum(float((a.double() - b).square().sum()) for a, b in zip(found, expected, strict=True))
    )
    return gap / math.sqrt(sum(float(b.square().sum()) for b in expected))


def measure(
    name: str, case: Case, device: str, dtype: torch.dtype, rounds: int
) -> list[dict[str, Any]]:
    """All four steps of one case, interleaved, with the seconds that each took to be ready."""
    clock, steps, ready = Clock(device), {}, {}
    torch._dynamo.reset()
    for kind, make in STEPS.items():
        model, batch = fresh(case, device, dtype)
        start = time.perf_counter()
        step = make(model, case)
        for _ in range(WARM + 3):
            step(*batch)
        if device == "cuda":
            torch.cuda.synchronize()
        steps[kind], ready[kind] = (step, batch), time.perf_counter() - start
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(rounds):
        for kind, (step, batch) in steps.items():
            seconds[kind].append(min(clock.time(step, batch) for _ in range(3)))
    rows = []
    for kind, own in seconds.items():
        row = {
            "case": name,
            "dtype": str(dtype).removeprefix("torch."),
            "step": kind,
            "ready_seconds": ready[kind],
        }
        row["milliseconds"] = 1e3 * statistics.median(own)
        for base in ("plain", "plain, compiled"):
            row[f"over {base}"] = statistics.median(
                a / b for a, b in zip(own, seconds[base], strict=True)
            )
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]], where: dict[str, str]) -> str:
    """The results as Markdown."""
    lines = [
        "# The private step on a compiled model",
        "",
        ", ".join(f"{k} {v}" for k, v in where.items()),
        "",
    ]
    lines += [
        "| case | dtype | step | ms | over plain eager | over plain compiled | ready after s |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        ratios = f"{r['over plain']:.2f} | {r['over plain, compiled']:.2f}"
        lines.append(
            f"| {r['case']} | {r['dtype']} | {r['step']} | {r['milliseconds']:.2f} | {ratios} | "
            f"{r['ready_seconds']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--cases", default="", help="comma separated; default two of the device's set"
    )
    parser.add_argument("--dtypes", default="float32", type=lambda s: s.split(","))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def main() -> int:
    """Check, measure, print and write the table."""
    options = parse()
    torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    known = GPU if options.device == "cuda" else CPU
    rows: list[dict[str, Any]] = []
    for dtype in (getattr(torch, name) for name in options.dtypes):
        for name in options.cases.split(",") if options.cases else CASES[options.device]:
            gap = disagreement(known[name], options.device, dtype)
            if gap > (5e-2 if dtype == torch.bfloat16 else 2e-3):
                print(
                    f"{name} {dtype}: the update differs from the plain one by {gap:.1e}",
                    file=sys.stderr,
                )
                return 1
            rows += measure(name, known[name], options.device, dtype, options.rounds)
            for row in rows[-len(STEPS) :]:
                print(json.dumps(row | {"update_gap": gap}), file=sys.stderr, flush=True)
            gc.collect()
    where = machine(options.device)
    print(table(rows, where))
    save(options.out, "compiled", table(rows, where), {"machine": where, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
