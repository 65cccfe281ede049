"""Cost of the noise stage: draw, correlate, add to the sum, divide. Ratios to independent noise, strategies interleaved, medians.

python benchmarks/noise.py --device cuda --parameters 124
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from dpfy.core.events import Gaussian
from dpfy.core.ledger import Permit
from dpfy.core.participation import SinglePass
from dpfy.core.random import Randomness
from dpfy.core.values import Bound, Bounded
from dpfy.noise import optimise
from dpfy.noise.error import buffers
from dpfy.noise.inverse import inverse_square_root_banded
from dpfy.noise.optimise_blt import blt
from dpfy.noise.strategy import Grads, Identity, Strategy
from dpfy.noise.stream import NoiseStream

STEPS = 2048


def gradients(millions: float, device: str) -> Grads:
    """Tensors shaped as in a GPT: 12 blocks of width w and an embedding, scaled to the number of parameters."""
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


def clock(device: str) -> float:
    """Seconds, after the device has caught up."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(strategies: dict[str, Strategy], total: Grads, device: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of the stage for each strategy, `rounds` times, interleaved; the first steps warm up and fill the rings.

    The stage is the training loop's: draw, correlate, add to the sum, divide, in the memory of the sum.
    """
    permit = Permit("benchmark", Gaussian(1.0), 10**9, "none")
    found: dict[str, list[float]] = {}
    for name, strategy in strategies.items():
        stream = NoiseStream(strategy, 0.5, Randomness.for_tests(0), divisor=64.0, in_place=True)
        state, bounded = stream.init(total), Bounded(total, Bound(1.0))
        for step in range(3):
            _, state = stream.release(bounded, step, state, permit)
        times = []
        for step in range(3, 3 + rounds):
            start = clock(device)
            _, state = stream.release(bounded, step, state, permit)
            times.append(clock(device) - start)
        found[name] = times
        del state
    return found


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parameters", type=float, default=124 if torch.cuda.is_available() else 10, help="millions")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    strategies: dict[str, Strategy] = {
        "independent": Identity(),
        "blt 3": blt(3, STEPS, SinglePass()),
        "16 bands": optimise.banded(16, STEPS),
        "64 bands": optimise.banded(64, STEPS),
        "inverse 4": inverse_square_root_banded(4),
    }
    total = gradients(options.parameters, options.device)
    rounds = [measure(strategies, total, options.device, options.rounds) for _ in range(3)]
    medians = {name: statistics.median(t for found in rounds for t in found[name]) for name in strategies}
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
                "torch": torch.__version__,
                "parameters": sum(t.numel() for t in total.values()),
                "milliseconds": {name: round(1e3 * t, 3) for name, t in medians.items()},
                "ratio": {name: round(t / medians["independent"], 2) for name, t in medians.items()},
                "buffers": {name: buffers(s, STEPS) for name, s in strategies.items()},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
