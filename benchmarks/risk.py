"""Noise for a limit of what an attack reaches, against riskcal 1.5: the same risk at the same noise,
and how long a calibration takes.

riskcal is no dependency: ``pip install --no-deps riskcal==1.5.1``, or its sdist's `src` folder on
PYTHONPATH. ``python benchmarks/risk.py`` prints one JSON object, and each setting on standard
error. Seconds are of the processor.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from functools import partial

import numpy as np
from riskcal.calibration import dpsgd as peer

from dpfy import accounting
from dpfy.accounting.interpretation import AttackTarget
from dpfy.core import events


def compare(seed: int, calibrates: bool) -> dict[str, float]:
    """One random setting: our noise for a target, and what riskcal says of it."""
    rng = np.random.default_rng([58, seed])
    rate = float(np.exp(rng.uniform(math.log(1e-3), math.log(0.2))))
    steps = int(np.exp(rng.uniform(math.log(10), math.log(3000))))
    alpha = float(np.exp(rng.uniform(math.log(1e-3), math.log(0.1)))) if seed % 2 else None
    # riskcal's tolerance is 1e-3 of the rate itself, so that targets are well above it
    success = float(rng.uniform(0.03, 0.5)) * -math.expm1(-rate * steps) + (alpha or 0.0)
    target = AttackTarget(success, alpha)
    start = time.process_time()
    noise = accounting.calibrate.noise_for_risk(
        lambda sigma: events.poisson(sigma, rate, steps), target
    )
    row = {"rate": rate, "steps": steps, "success": success, "at": alpha or 0.0, "noise": noise}
    row["seconds"] = time.process_time() - start
    row["ours"] = target.reached(accounting.curve(events.poisson(noise, rate, steps)))
    start = time.process_time()
    if alpha is None:
        row["theirs"] = float(peer.get_advantage_for_dpsgd(noise, rate, steps))
        search = partial(peer.find_noise_multiplier_for_advantage, success)
    else:
        row["theirs"] = 1 - float(peer.get_beta_for_dpsgd(noise, rate, steps, alpha)) - alpha
        search = partial(peer.find_noise_multiplier_for_err_rates, alpha, 1 - success)
    row["their_seconds_once"] = time.process_time() - start
    if calibrates:  # in a narrow range: from its default, noise 0.1, it takes minutes
        start = time.process_time()
        row["their_noise"] = float(search(rate, steps, noise_min=noise / 2, noise_max=2 * noise))
        row["their_seconds"] = time.process_time() - start
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
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    times = [r["their_seconds"] / r["seconds"] for r in rows if "their_seconds" in r]
    answer = {
        "settings": len(rows),
        "largest_difference": max(abs(r["ours"] - r["theirs"]) for r in rows),
        "calibrations": len(times),
        "least_speedup": min(times, default=None),
        "median_speedup": statistics.median(times) if times else None,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
