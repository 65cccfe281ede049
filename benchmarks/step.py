"""Time and peak memory of one private step against the plain step of the same model, batch and
dtype.

    python benchmarks/step.py                       # the CPU set, CPU seconds at one thread python
    benchmarks/step.py --device cuda         # the GPU set, float32 (TF32) and bfloat16, CUDA events
    python benchmarks/step.py --cases gpt-16 --profile python benchmarks/step.py --device cuda
    --cases gpt2-t256-32+autocast    # float32 weights under autocast to bfloat16

Every implementation takes turns with the plain step, round by round, in one process; a ratio is
formed inside each round and the median is reported with its spread. Before anything is timed, the
private update without noise is compared with the plain gradient. The private step is the training
loop's: engine, noise stream, gradients handed to the optimizer. Peers: vmap(grad) of torch, and
opacus when it is installed. On a CPU the peak of memory is that of a process of its own. Writes
step.md and step.json into --out.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from cases import AUTOCAST, CPU, GPU, Batch, Case, classes, images, perceptron
from peers import CLIP, NOISE, RATE, Step, opacus_step, vmap_step
from torch import Tensor, nn

from dpfy.core.randomness import Randomness
from dpfy.core.values import mock_permit
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.cuda_graphs.captured import WARM, CapturedSum
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.noise.strategy import Identity
from dpfy.noise.stream import NoiseStream
from dpfy.training.step import hand_over, rounded

SLOW = 8
"""Implementations that take this many times the plain step are timed in three rounds, one step
each.
"""

SHORT = 3e-3
"""Plain steps of fewer seconds are timed in five times as many rounds: other work of the host shows
in them.
"""


def plain(model: nn.Module, case: Case) -> Step:
    """Forward, backward, SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        case.losses(model(x), y).mean().backward()
        optimizer.step()

    return step


def plain_graph(model: nn.Module, case: Case) -> Step:
    """The plain step with forward and backward captured as a CUDA graph."""
    optimizer, usual, taken = torch.optim.SGD(model.parameters(), lr=RATE), plain(model, case), []
    graph, mine = torch.cuda.CUDAGraph(), []

    def step(x: Tensor, y: Tensor) -> None:
        if len(taken) < WARM:
            usual(x, y)
            taken.append(True)
            return
        if not mine:
            mine.extend([x.clone(), y.clone()])
            for p in model.parameters():
                p.grad = None
            with torch.cuda.graph(graph):
                case.losses(model(mine[0]), mine[1]).mean().backward()
        mine[0].copy_(x)
        mine[1].copy_(y)
        graph.replay()
        optimizer.step()

    return step


def private_graph(model: nn.Module, case: Case) -> Step:
    """The private step as ``Runtime(graph=True)`` runs it."""
    return private(model, case, graph=True)


def private(model: nn.Module, case: Case, noise: float = NOISE, graph: bool = False) -> Step:
    """What the training loop does: forward, bounded sum, noise by address, division by the batch
    size, SGD.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine, count = BookkeepingEngine(sparse=True), iter(range(10**9))
    stream = NoiseStream(
        Identity(), noise, Randomness.for_tests(0), divisor=len(case.batch()[1]), in_place=True
    )
    assert stream.event is not None
    permit = mock_permit(stream.event, 10**9)
    engine.attach(model)
    parameters, clip = trained(model), FlatClip(CLIP)
    captured = CapturedSum(engine, lambda x, y: case.losses(model(x), y))

    def step(x: Tensor, y: Tensor) -> None:
        total = (
            captured((x, y), clip, None)
            if graph
            else engine.bounded_sum(case.losses(model(x), y), clip)
        )
        released, _ = stream.release(
            total, next(count), {}, permit, rounded(total.value, parameters)
        )
        hand_over(released, parameters)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def silent(model: nn.Module, case: Case) -> Step:
    """The private step without noise: what the engine itself costs."""
    return private(model, case, noise=0.0)


STEPS: dict[str, Callable[[nn.Module, Case], Step]] = {
    "plain": plain,
    "dpfy": private,
    "dpfy without noise": silent,
    "plain graph": plain_graph,
    "dpfy graph": private_graph,
    "opacus hooks": opacus_step(ghost=False),
    "opacus ghost": opacus_step(ghost=True),
    "vmap": vmap_step,
}


class Clock:
    """Seconds of one step: CPU seconds of this process, or device time between two events."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def time(self, step: Step, batch: Batch) -> float:
        """One timed step."""
        if not self.cuda:
            start = time.process_time()
            step(*batch)
            return time.process_time() - start
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step(*batch)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3


def fresh(case: Case, device: str, dtype: torch.dtype) -> tuple[nn.Module, Batch]:
    """The same model and batch every time."""
    torch.manual_seed(0)
    with torch.device(device):  # large models are slow to make elsewhere
        model = case.model().to(device, dtype)
    x, y = case.batch()
    return model, ((x.to(dtype) if x.is_floating_point() else x).to(device), y.to(device))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def disagreement(case: Case, device: str, dtype: torch.dtype) -> float:
    """Relative distance of the unclipped sum of gradients from the plain gradient."""
    model, (x, y) = fresh(case, device, dtype)
    losses = case.losses(model(x), y)
    expected = [
        g.double() for g in torch.autograd.grad(losses.sum(), list(trained(model).values()))
    ]
    engine = BookkeepingEngine()
    engine.attach(model)
    found = engine.bounded_sum(case.losses(model(x), y), FlatClip(math.inf)).value.values()
    engine.detach()
    gap = math.sqrt(
        sum(float((a.double() - b).square().sum()) for a, b in zip(found, expected, strict=True))
    )
    return gap / math.sqrt(sum(float(b.square().sum()) for b in expected))


def peak(case: Case, kind: str, dtype: torch.dtype) -> float:
    """MiB of all tensors on the GPU at the highest point of one step, and what graphs hold besides;
    of a captured step, all that the process holds for it.
    """
    gc.collect()
    torch.cuda.empty_cache()
    captured = "graph" in kind
    before = (
        torch.cuda.memory_reserved()
        if captured
        else torch.cuda.memory_allocated() + _idle_in_pools()
    )
    step, batch = _warm(case, kind, "cuda", dtype)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for _ in range(WARM + 3):  # memory has moved: steps are recorded again
        step(*batch)
    torch.cuda.reset_peak_memory_stats()
    step(*batch)
    torch.cuda.synchronize()
    if captured:
        return (torch.cuda.memory_reserved() - before) / 2**20
    return (torch.cuda.max_memory_allocated() + _idle_in_pools() - before) / 2**20


def _idle_in_pools() -> int:
    """Bytes that pools of graphs hold and no tensor: nothing else can use them."""
    pools = [
        segment
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0)
    ]
    return sum(int(segment["total_size"]) - int(segment["allocated_size"]) for segment in pools)


@lru_cache
def peak_apart(name: str, kind: str, dtype: str) -> float | None:
    """MiB that a process of its own grows by at most, from before the model was made, in a step
    after two others. None if it failed.
    """
    command = [
        sys.executable,
        __file__,
        "--cases",
        name,
        "--steps",
        kind,
        "--dtypes",
        dtype,
        "--peak",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def peak_here(case: Case, kind: str, dtype: torch.dtype) -> float:
    """What `peak_apart` asks of its process. A tiny model first, so that libraries are loaded
    before the count begins.

    The first steps are left out, as on a GPU: there dpfy measures where the examples lie and holds
    all gradients once.
    """
    tiny = Case(lambda: perceptron(4, 4), images(4, 4, kinds=4), classes)
    _warm(tiny, kind, "cpu", dtype)
    before = _status("VmRSS")
    model, batch = fresh(case, "cpu", dtype)
    step = STEPS[kind](model, case)
    for turn in range(4):
        if turn == 2:
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        step(*batch)
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def measure(
    name: str, case: Case, device: str, dtype: torch.dtype, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Every implementation of one case in turns with the plain step, and with it alone: none moves
    the memory of another.
    """
    made: dict[str, dict[str, Any]] = {}
    for kind in [
        kind
        for kind in options.steps
        if kind != "plain" and (device == "cuda" or "graph" not in kind)
    ] or ["plain"]:
        pair = _interleaved(
            name, case, device, dtype, options, list(dict.fromkeys(["plain", kind]))
        )
        made |= {each: row for each, row in pair.items() if each not in made}
        gc.collect()
    if "milliseconds" in (other := made.get("plain graph", {})) and "milliseconds" in (
        mine := made.get("dpfy graph", {})
    ):
        mine["ratio_to_plain_graph"] = mine["milliseconds"] / other["milliseconds"]
    return list(made.values())


def _interleaved(
    name: str,
    case: Case,
    device: str,
    dtype: torch.dtype,
    options: argparse.Namespace,
    kinds: list[str],
) -> dict[str, dict[str, Any]]:
    """A row for each of `kinds`, which take turns."""
    clock, steps, rows = Clock(device), {}, {}
    text = str(dtype).removeprefix("torch.")
    for kind in kinds:
        base = {"case": name, "dtype": text, "step": kind, "seconds": []}
        try:
            # On a GPU only one implementation at a time may hold memory while peaks are read.
            rows[kind] = base | {"peak_mib": peak(case, kind, dtype) if device == "cuda" else None}
            if device == "cpu":
                steps[kind] = _warm(case, kind, device, dtype)
        except ImportError:
            continue
        except Exception as error:
            rows[kind] = base | {"error": _told(error)}
    if device == "cuda":  # what the peaks were measured with must not lie beside what is timed
        gc.collect()
        torch.cuda.empty_cache()
    for kind, row in rows.items() if device == "cuda" else ():
        try:
            if "error" not in row:
                steps[kind] = _warm(case, kind, device, dtype)
        except Exception as error:  # fits alone, but not beside the others
            row["error"] = _told(error)
    first = {kind: clock.time(step, batch) for kind, (step, batch) in steps.items()}
    for turn in range(options.rounds * (5 if first["plain"] < SHORT else 1)):
        for kind, (step, batch) in steps.items():
            slow = first[kind] > SLOW * first["plain"]
            if turn < 3 or not slow:
                rows[kind]["seconds"].append(
                    min(clock.time(step, batch) for _ in range(1 if slow else options.burst))
                )
    steps.clear()
    if device == "cpu" and not options.no_memory:
        for kind, row in rows.items():
            row["peak_mib"] = peak_apart(name, kind, text)
    return {kind: _summary(row, rows["plain"]) for kind, row in rows.items()}


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"


def _warm(case: Case, kind: str, device: str, dtype: torch.dtype) -> tuple[Step, Batch]:
    """An implementation that has made its first steps."""
    model, batch = fresh(case, device, dtype)
    step = STEPS[kind](model, case)
    for _ in range(WARM + 3 if device == "cuda" else 3):
        step(*batch)
    return step, batch


def _summary(row: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    seconds = row.pop("seconds")
    if "error" in row:
        return row
    ratios = sorted(a / b for a, b in zip(seconds, base.setdefault("kept", seconds), strict=False))
    known = row["peak_mib"] is not None and base["peak_mib"]
    return {k: v for k, v in row.items() if k != "kept"} | {
        "milliseconds": 1e3 * statistics.median(seconds),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[0],
        "ratio_high": ratios[-1],
        "memory_ratio": row["peak_mib"] / base["peak_mib"] if known else None,
    }


def machine(device: str) -> dict[str, str]:
    """What the figures were measured on."""
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or platform.machine()
    )
    if device == "cpu" and Path("/proc/cpuinfo").exists():
        text = Path("/proc/cpuinfo").read_text()
        name = next(
            (
                line.split(":")[1].strip()
                for line in text.splitlines()
                if line.startswith("model name")
            ),
            name,
        )
    return {
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }


def table(rows: list[dict[str, Any]], where: dict[str, str]) -> str:
    """The results as Markdown."""
    lines = [
        "# One private step against one plain step",
        "",
        ", ".join(f"{k} {v}" for k, v in where.items()),
        "",
    ]
    lines += [
        "| case | dtype | step | ms | ratio (spread) | peak MiB (ratio) |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        start = f"| {r['case']} | {r['dtype']} | {r['step']} | "
        if "error" in r:
            lines.append(f"{start}{r['error']} | | |")
            continue
        spread = f"{r['ratio']:.2f} ({r['ratio_low']:.2f}-{r['ratio_high']:.2f})"
        spread += (
            f"; {r['ratio_to_plain_graph']:.2f} of plain graph"
            if "ratio_to_plain_graph" in r
            else ""
        )
        memory = (
            f"{r['peak_mib']:.0f} ({r['memory_ratio']:.2f})"
            if r["memory_ratio"] is not None
            else ""
        )
        lines.append(f"{start}{r['milliseconds']:.2f} | {spread} | {memory} |")
    return "\n".join(lines) + "\n"


def save(folder: Path | None, name: str, text: str, facts: dict[str, Any]) -> None:
    """NAME.md and NAME.json in `folder`, if there is one."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(text)
        (folder / f"{name}.json").write_text(json.dumps(facts, indent=1))


def profile(case: Case, kind: str, device: str, dtype: torch.dtype) -> str:
    """Where the time of a step goes."""
    step, batch = _warm(case, kind, device, dtype)
    kinds = [torch.profiler.ProfilerActivity.CPU] + (
        [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
    )
    with torch.profiler.profile(activities=kinds) as watched:
        for _ in range(3):
            step(*batch)
        if device == "cuda":
            torch.cuda.synchronize()
    order = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    return f"{kind}\n{watched.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=60)}"


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--cases", help="comma separated; default all of the device's set")
    parser.add_argument(
        "--dtypes", default="", help="float32,bfloat16 (default: float32 on a CPU, both on a GPU)"
    )
    parser.add_argument("--steps", default=",".join(STEPS), type=lambda s: s.split(","))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--burst", type=int, default=3, help="steps in a row in each round; the fastest counts"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--no-memory", action="store_true", help="leave the peak of memory out (CPU)"
    )
    parser.add_argument(
        "--peak",
        action="store_true",
        help="print the peak of memory of one case and step, and nothing else",
    )
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def main() -> int:
    """Run the cases, print and write the table."""
    options = parse()
    torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    known = GPU if options.device == "cuda" else CPU
    names = options.cases.split(",") if options.cases else list(known)
    dtypes = (
        options.dtypes.split(",")
        if options.dtypes
        else ["float32"] + (["bfloat16"] if options.device == "cuda" else [])
    )
    if options.peak:
        print(peak_here(known[names[0]], options.steps[0], getattr(torch, dtypes[0])))
        return 0
    rows: list[dict[str, Any]] = []
    for text in dtypes:
        dtype = getattr(torch, text)
        for name in names:
            if name.endswith(AUTOCAST) and dtype != torch.float32:
                continue
            gap = disagreement(known[name], options.device, dtype)
            if gap > (5e-2 if dtype == torch.bfloat16 or name.endswith(AUTOCAST) else 2e-3):
                print(
                    f"{name} {text}: update differs from the plain one by {gap:.1e}",
                    file=sys.stderr,
                )
                return 1
            rows += measure(name, known[name], options.device, dtype, options)
            for row in rows[-len(options.steps) :]:
                if row["case"] == name:
                    print(json.dumps(row | {"update_gap": gap}), file=sys.stderr, flush=True)
            for kind in options.steps if options.profile else ():
                print(name, text, profile(known[name], kind, options.device, dtype), flush=True)
            gc.collect()
    where = machine(options.device)
    print(table(rows, where))
    save(options.out, "step", table(rows, where), {"machine": where, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
