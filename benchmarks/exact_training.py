"""The noise stage of training with float and with exact noise, in turns: medians, and the ratio of
the two.

python benchmarks/exact_training.py --device cuda --parameters 124000000             # also: other
shapes of the kernel python benchmarks/exact_training.py --device cuda --prove
# single precision for all 2^32 words, two doubles python benchmarks/exact_training.py --device cpu
--parameters 4000000
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

from dpfy.core.events import Gaussian
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.noise import exact_kernel, exact_selftest
from dpfy.noise.strategy import Identity, Strategy
from dpfy.noise.stream import NoiseStream
from dpfy.noise.toeplitz import Blt, inverse_square_root_banded, square_root_banded
from noise import seconds

WARM = 5
STRATEGIES: dict[str, Strategy] = {
    "independent": Identity(),
    "16 bands": square_root_banded(16),
    "blt 2": Blt((0.98, 0.7), (0.2, 0.3)),
    "inverse 4": inverse_square_root_banded(4),
}
SHAPES: dict[str, dict[str, int | None]] = {
    "as shipped": {},
    "72 registers": {"REGISTERS": None},
    "48 registers": {"REGISTERS": 48},
    "256 lanes": {"WIDTH": 256},
    "64 lanes": {"WIDTH": 64},
    "rows by 32": {"ROOM": 32},
    "rows by 128": {"ROOM": 128},
}
"""Other constants of the kernel, to be compared."""


def stage(
    strategy: Strategy, total: dict[str, torch.Tensor], exact: bool, scale: float
) -> Callable[[int], None]:
    """One release in the memory of the sum."""
    stream = NoiseStream(
        strategy, scale, Randomness.for_tests(0), divisor=64.0, in_place=True, exact=exact
    )
    permit, held = mock_permit(Gaussian(scale), 10**6), [stream.init(total)]

    def run(step: int) -> None:
        held[0] = stream.release(Bounded(total, Bound(l2=1.0)), step, held[0], permit)[1]

    return run


def shaped(run: Callable[[int], None], constants: dict[str, int | None]) -> Callable[[int], None]:
    """The stage with other constants of the kernel."""

    def other(step: int) -> None:
        kept = {name: getattr(exact_kernel, name) for name in constants}
        for name, value in constants.items():
            setattr(exact_kernel, name, value)
        try:
            run(step)
        finally:
            for name, value in kept.items():
                setattr(exact_kernel, name, value)

    return other


def compared(parameters: int, device: str, rounds: int, only: str, scale: float) -> dict[str, Any]:
    """Milliseconds of the float and of the exact stage, in turns, and their ratio."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sizes = [parameters // 2, parameters // 3, parameters - parameters // 2 - parameters // 3]
    total = {str(i): torch.zeros(n, device=device) for i, n in enumerate(sizes)}
    stages = {"float": stage(STRATEGIES[only], total, False, scale)}
    exact = stage(STRATEGIES[only], total, True, scale)
    stages |= (
        {f"exact, {name}": shaped(exact, given) for name, given in SHAPES.items()}
        if device == "cuda"
        else {"exact": exact}
    )
    found: dict[str, list[float]] = {name: [] for name in stages}
    for step in range(WARM + rounds):
        for name, run in stages.items():
            taken = seconds(run, step, device)
            if step >= WARM:
                found[name].append(taken)
    torch.set_num_threads(threads)
    medians = {name: 1e3 * statistics.median(times) for name, times in found.items()}
    ratios = {name: round(value / medians["float"], 3) for name, value in medians.items()}
    return {
        "milliseconds": {name: round(value, 3) for name, value in medians.items()},
        "ratio to float": ratios,
    }


def undecided(parameters: int, device: str) -> float:
    """Which share of the rows of 16 values is decided by numbers of two doubles."""
    total = [torch.zeros(parameters, device=device)]
    counts = exact_kernel.launch(total, exact_selftest.LATTICE, 1.0, exact_selftest.KEY, 1.0, total)
    assert counts is not None
    return float(counts.sum()) / (parameters / 16)


def proven(device: str) -> dict[str, float]:
    """Binary logarithms of errors: of single precision over all words there are, of numbers of two
    doubles; and cells that are wrong.
    """
    where, chunk = torch.device(device), 1 << 26
    worst = max(
        exact_selftest.single_error(where, begin, 1, chunk) for begin in range(0, 2**32, chunk)
    )
    wrong = [
        exact_selftest.disagreements(where, exact_selftest.MANY, kind)
        for kind in (torch.float32, torch.bfloat16)
    ]
    sure = exact_selftest.disagreements(where, exact_selftest.FEW, torch.float32, 1.0)
    return {
        "single precision": math.log2(worst),
        "trusted": math.log2(exact_kernel.ERROR),
        "two doubles": math.log2(exact_selftest.long_error(where)),
        "wrong cells": sum(wrong) + sure,
    }


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--parameters", type=float, default=124e6 if torch.cuda.is_available() else 4e6
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--scale", type=float, default=0.5, help="noise in clip norms")
    parser.add_argument("--strategy", default="independent", choices=list(STRATEGIES))
    parser.add_argument("--prove", action="store_true")
    options = parser.parse_args()
    count = int(options.parameters)
    told: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "parameters": count,
        "strategy": options.strategy,
    }
    if options.prove:
        told["proof"] = proven(options.device)
    else:
        told |= compared(count, options.device, options.rounds, options.strategy, options.scale)
        if options.device == "cuda":
            told["rows decided by two doubles"] = undecided(count, options.device)
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
