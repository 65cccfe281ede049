"""Cost of the noise stage: draw, correlate, add to the sum, divide. All strategies interleaved,
medians.

python benchmarks/noise.py --device cuda --parameters 124      # milliseconds on the device, ratios,
bytes a second python benchmarks/noise.py --device cuda --host                # microseconds of the
host for one call python benchmarks/noise.py --before FOLDER                     # against the dpfy
package of another checkout, in turns
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dpfy.core.events import Gaussian
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.noise.strategy import Grads, Identity, Recurrent
from dpfy.noise.stream import NoiseStream
from dpfy.noise.toeplitz import Blt, inverse_square_root_banded, square_root_banded
from dpfy.noise.workload import buffers

STEPS = 2048
WARM = 5
"""Steps before the first that counts: kernels are compiled, and band-inverse noise takes all of its
draws.
"""

STRATEGIES: dict[str, Recurrent] = {  # what the coefficients are does not change the cost
    "independent": Identity(),
    "blt 3": Blt((0.99, 0.9, 0.5), (0.156, 0.233, 0.141)),
    "16 bands": square_root_banded(16),
    "64 bands": square_root_banded(64),
    "inverse 4": inverse_square_root_banded(4),
}
UNFUSED = "independent, torch's generator"
SCALE, DIVISOR = 0.5, 64.0

Stage = Callable[[int], None]
"""The noise stage of one step."""


def gradients(millions: float, device: str) -> Grads:
    """Tensors shaped as in a GPT: 12 blocks of width w and an embedding, scaled to the number of
    parameters.
    """
    width = 768 if millions > 50 else 128
    shapes = {"embedding": (int((millions * 1e6 - 12 * 12 * width**2) // width), width)}
    for block in range(12):
        shapes |= {
            f"{block}.attention": (3 * width, width),
            f"{block}.attention.bias": (3 * width,),
            f"{block}.projection": (width, width),
            f"{block}.projection.bias": (width,),
            f"{block}.up": (4 * width, width),
            f"{block}.up.bias": (4 * width,),
            f"{block}.down": (width, 4 * width),
            f"{block}.down.bias": (width,),
            f"{block}.norm.1": (width,),
            f"{block}.norm.2": (width,),
        }
    return {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}


def shipped(strategy: Recurrent, total: Grads) -> Stage:
    """The stage as the training loop runs it, in the memory of the sum."""
    stream = NoiseStream(strategy, SCALE, Randomness.for_tests(0), divisor=DIVISOR, in_place=True)
    permit = mock_permit(Gaussian(SCALE), 10**9)
    bounded, held = Bounded(total, Bound(1.0)), [stream.init(total)]

    def stage(step: int) -> None:
        held[0] = stream.release(bounded, step, held[0], permit)[1]

    return stage


def unfused(total: Grads) -> Stage:
    """Independent noise with torch alone: its generator into one vector, added, divided. No
    cipher.
    """
    sums = list(total.values())
    flat = torch.empty(sum(t.numel() for t in sums), device=sums[0].device)
    noise = [
        part.view(t.shape)
        for t, part in zip(sums, flat.split([t.numel() for t in sums]), strict=True)
    ]

    def stage(step: int) -> None:
        flat.normal_()
        torch._foreach_add_(sums, noise, alpha=SCALE)
        torch._foreach_div_(sums, DIVISOR)

    return stage


def passes(name: str) -> int:
    """How often memory of the size of the model must be read or written. Torch alone: noise out,
    added (2 in, 1 out), divided (1, 1).
    """
    if name == UNFUSED:
        return 6
    step = STRATEGIES[name].recurrence(STEPS)
    return 2 + len(step.weights) + (len(step.decay) or bool(step.weights))


def seconds(stage: Stage, step: int, device: str) -> float:
    """Of the device, which is kept busy until the host has asked for everything, as it is in
    training; on a CPU, CPU seconds.
    """
    if device != "cuda":
        start = time.process_time()
        stage(step)
        return time.process_time() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(4_000_000)
    first.record()
    stage(step)
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def host_seconds(stage: Stage, step: int, device: str) -> float:
    """Of the host, which does not wait for the device."""
    start = time.perf_counter()
    stage(step)
    taken = time.perf_counter() - start
    if device == "cuda":
        torch.cuda.synchronize()
    return taken


def measure(stages: dict[str, Stage], rounds: int, device: str, host: bool) -> dict[str, float]:
    """Median seconds of each stage; every round runs all of them."""
    found: dict[str, list[float]] = {name: [] for name in stages}
    for step in range(WARM + rounds):
        for name, stage in stages.items():
            taken = (host_seconds if host else seconds)(stage, step, device)
            if step >= WARM:
                found[name].append(taken)
    return {name: statistics.median(times) for name, times in found.items()}


def report(medians: dict[str, float], parameters: int, device: str, host: bool) -> dict[str, Any]:
    """What is printed for each stage. The passes are those of the one launch; on a CPU there are
    more.
    """
    if host:
        return {
            "microseconds of the host": {name: round(1e6 * t, 1) for name, t in medians.items()}
        }
    found: dict[str, Any] = {
        "milliseconds": {name: round(1e3 * t, 3) for name, t in medians.items()},
        "ratio to independent": {
            n: round(t / medians.get("independent", t), 2) for n, t in medians.items()
        },
        f"ratio to {UNFUSED}": {
            name: round(t / medians[UNFUSED], 2) for name, t in medians.items()
        },
        "buffers": {name: buffers(s, STEPS) for name, s in STRATEGIES.items()},
    }
    if device == "cuda":
        found["passes over memory"] = {name: passes(name) for name in medians}
        found["GB/s"] = {
            name: round(4e-9 * parameters * passes(name) / t) for name, t in medians.items()
        }
    return found


def compared(before: str, turns: int, arguments: list[str]) -> dict[str, Any]:
    """This benchmark with the package of the folder `before` and with this one, in turns: medians
    over turns, and their ratio.
    """
    folders = {"before": before, "after": str(Path(__file__).resolve().parents[1])}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    for _ in range(turns):
        for name, folder in folders.items():
            told = subprocess.run(
                [sys.executable, __file__, *arguments],
                env=os.environ | {"PYTHONPATH": folder},
                check=True,
                capture_output=True,
                text=True,
            )
            answer = json.loads(told.stdout)
            found[name].append(answer.get("milliseconds") or answer["microseconds of the host"])
    medians = {
        k: {stage: statistics.median([f[stage] for f in many]) for stage in many[0]}
        for k, many in found.items()
    }
    ratios = {
        stage: round(medians["after"][stage] / medians["before"][stage], 3)
        for stage in medians["after"]
    }
    return medians | {"after over before": ratios}


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--parameters",
        type=float,
        default=124 if torch.cuda.is_available() else 10,
        help="millions",
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--host",
        action="store_true",
        help="the host's time for one call instead, on a small model of as many tensors",
    )
    parser.add_argument("--before", help="a folder that holds another version of the package dpfy")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--only",
        nargs="*",
        default=list(STRATEGIES),
        choices=list(STRATEGIES),
        help="these strategies",
    )
    options = parser.parse_args()
    if options.before:
        passed = [
            "--device",
            options.device,
            "--parameters",
            str(options.parameters),
            "--rounds",
            str(options.rounds),
        ]
        passed += ["--only", *options.only, *(["--host"] if options.host else [])]
        print(json.dumps(compared(options.before, options.turns, passed), indent=1))
        return
    total = gradients(3 if options.host else options.parameters, options.device)
    stages = {UNFUSED: unfused(total)} | {
        name: shipped(STRATEGIES[name], total) for name in options.only
    }
    medians = measure(stages, options.rounds, options.device, options.host)
    parameters = sum(t.numel() for t in total.values())
    where = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "parameters": parameters,
        "tensors": len(total),
    }
    print(json.dumps(where | report(medians, parameters, options.device, options.host), indent=1))


if __name__ == "__main__":
    main()
