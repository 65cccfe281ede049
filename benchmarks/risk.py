"""Noise for a limit of what an attack reaches, against riskcal 1.5: the same risk at the same noise,
and how long a calibration takes.

riskcal is no dependency: ``pip install --no-deps riskcal==1.5.1``, or its sdist's `src` folder on
PYTHONPATH. ``python benchmarks/risk.py`` prints one JSON object; ``--settings`` says how many.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from functools import partial

import numpy as np
from riskcal.calibration import dpsgd as peer

from dpfy import accounting
from dpfy.accounting.interpretation import AttackTarget
from dpfy.core import events


def compare(seed: int, calibrations: bool) -> dict[str, float]:
    """One random setting: our noise for a target, and what riskcal says of it."""
    rng = np.random.default_rng([58, seed])
    rate = float(np.exp(rng.uniform(math.log(1e-3), math.log(0.2))))
    steps = int(np.exp(rng.uniform(math.log(10), math.log(3000))))
    alpha = float(np.exp(rng.uniform(math.log(1e-3), math.log(0.1)))) if seed % 2 else None
    # riskcal's tolerance is 1e-3 of the rate itself, so that targets are well above it
    success = float(rng.uniform(0.03, 0.5)) + (alpha or 0.0)
    target = AttackTarget(success, alpha)
    start = time.perf_counter()
    noise = accounting.calibrate.noise_for_risk(
        lambda sigma: events.poisson(sigma, rate, steps), target
    )
    seconds = time.perf_counter() - start
    ours = target.reached(accounting.curve(events.poisson(noise, rate, steps))) + (alpha or 0.0)
    if alpha is None:
        told = float(peer.get_advantage_for_dpsgd(noise, rate, steps))
        search = partial(peer.find_noise_multiplier_for_advantage, success, rate, steps)
    else:
        told = 1 - float(peer.get_beta_for_dpsgd(noise, rate, steps, alpha))
        search = partial(peer.find_noise_multiplier_for_err_rates, alpha, 1 - success, rate, steps)
    row = {"rate": rate, "steps": steps, "success": success, "at": alpha or 0.0}
    row |= {"noise": noise, "ours": ours, "theirs": told, "seconds": seconds}
    if calibrations:
        start = time.perf_counter()
        row["their_noise"] = float(search())
        row["their_seconds"] = time.perf_counter() - start
    return row


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=int, default=100)
    parser.add_argument("--calibrations", type=int, default=20)
    asked = parser.parse_args()
    rows = []
    for seed in range(asked.settings):
        rows.append(compare(seed, seed < asked.calibrations))
    times = [r["their_seconds"] / r["seconds"] for r in rows if "their_seconds" in r]
    answer = {
        "settings": len(rows),
        "largest_difference": max(abs(r["ours"] - r["theirs"]) for r in rows),
        "largest_relative_difference": max(abs(r["ours"] / r["theirs"] - 1) for r in rows),
        "calibrations": len(times),
        "least_speedup": min(times),
        "median_speedup": statistics.median(times),
        "rows": rows,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
