"""How long an epsilon and a calibration take: the tight accountant against dp-accounting's PLD at
its default grid.

Run it alone on the machine: ``python benchmarks/accounting.py`` prints a Markdown table and says
whether the promises hold; ``--json`` prints one JSON object instead; ``--quick`` skips the slowest
reference runs (T = 1e7).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from dpfy import accounting
from dpfy.core.events import Event, Gaussian, PoissonSampled, Repeated

CASES = [
    (0.001, 0.5, 1000, 1e-5),
    (0.001, 1.0, 10_000, 1e-6),
    (0.001, 0.5, 1_000_000, 1e-8),
    (0.005, 1.0, 200, 1e-6),
    (0.005, 1.0, 20_000, 1e-6),
    (0.01, 1.0, 10_000, 1e-10),
    (0.05, 4.0, 100, 1e-5),
    (0.05, 1.0, 100, 1e-5),
    (0.05, 4.0, 1_000_000, 1e-5),
    (0.05, 1.0, 10, 1e-5),
    (0.001, 1.0, 10_000_000, 1e-6),
]
CALIBRATIONS = [(0.005, 20_000, 3.0, 1e-6), (0.05, 10_000, 8.0, 1e-6), (0.05, 200, 1.0, 1e-6)]


def training(rate: float, noise: float, steps: int) -> Event:
    """Poisson-sampled noisy training."""
    return Repeated(PoissonSampled(rate, Gaussian(noise)), steps)


def timed(function: Callable[[], float], repeats: int) -> tuple[float, float]:
    """The value and the median seconds of a call."""
    value, seconds = 0.0, []
    for _ in range(repeats):
        start = time.perf_counter()
        value = function()
        seconds.append(time.perf_counter() - start)
    return value, statistics.median(seconds)


def peer_epsilon(rate: float, noise: float, steps: int, delta: float) -> float:
    """dp-accounting's PLD, default grid."""
    import dp_accounting
    from dp_accounting import pld

    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), steps
    )
    return float(pld.PLDAccountant().compose(event).get_epsilon(delta))


def peer_noise(rate: float, steps: int, epsilon: float, delta: float) -> float:
    """dp-accounting's calibration with PLD."""
    import dp_accounting
    from dp_accounting import pld

    def make(noise: float) -> Any:
        return dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), steps
        )

    found = dp_accounting.calibrate_dp_mechanism(
        pld.PLDAccountant,
        make,
        epsilon,
        delta,
        dp_accounting.LowerEndpointAndGuess(0.1, 2.0),
        tol=1e-4,
    )
    return float(found)


def epsilons(quick: bool) -> list[dict[str, Any]]:
    """One row a case."""
    rows = []
    for rate, noise, steps, delta in CASES:
        event = training(rate, noise, steps)
        upper, ours = timed(lambda e=event, d=delta: accounting.curve(e).epsilon(d), 5)
        lower = accounting.curve(event)
        upper_again = lower.epsilon(delta)
        skip = quick and steps > 1_000_000
        theirs_value, theirs = (
            (None, None)
            if skip
            else timed(lambda a=(rate, noise, steps, delta): peer_epsilon(*a), 1)
        )
        rows.append(
            {
                "rate": rate,
                "noise": noise,
                "steps": steps,
                "delta": delta,
                "lower": lower.epsilon_lower(delta),
                "upper": max(upper, upper_again),
                "tight_ms": 1e3 * ours,
                "pld": theirs_value,
                "pld_ms": None if theirs is None else 1e3 * theirs,
            }
        )
    return rows


def calibrations() -> list[dict[str, Any]]:
    """One row a target."""
    rows = []
    for rate, steps, epsilon, delta in CALIBRATIONS:
        found, ours = timed(
            lambda r=rate, n=steps, e=epsilon, d=delta: accounting.calibrate.noise(
                lambda s: training(r, s, n), e, d
            ),
            3,
        )
        theirs_value, theirs = timed(lambda a=(rate, steps, epsilon, delta): peer_noise(*a), 1)
        rows.append(
            {
                "rate": rate,
                "steps": steps,
                "epsilon": epsilon,
                "delta": delta,
                "noise": found,
                "tight_ms": 1e3 * ours,
                "pld_noise": theirs_value,
                "pld_ms": 1e3 * theirs,
            }
        )
    return rows


def verdict(rows: list[dict[str, Any]], targets: list[dict[str, Any]]) -> dict[str, Any]:
    """The promised figures and whether they hold."""
    ours = statistics.median(row["tight_ms"] for row in rows)
    theirs = statistics.median(row["pld_ms"] for row in rows if row["pld_ms"] is not None)
    slowest = max(row["tight_ms"] for row in targets)
    ratio = min(row["pld_ms"] / row["tight_ms"] for row in targets)
    return {
        "median_ms": ours,
        "pld_median_ms": theirs,
        "faster": theirs / ours,
        "slowest_calibration_ms": slowest,
        "calibration_faster": ratio,
        "holds": ours < 100 and theirs / ours >= 10 and slowest < 500 and ratio >= 10,
    }


def table(rows: list[dict[str, Any]], targets: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| q | sigma | T | delta | epsilon (lower - upper) | tight | dp-accounting PLD | its "
        "epsilon |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        peer = (
            ("-", "-") if row["pld"] is None else (f"{row['pld_ms']:.0f} ms", f"{row['pld']:.6g}")
        )
        lines.append(
            f"| {row['rate']:g} | {row['noise']:g} | {row['steps']:g} | {row['delta']:g} | "
            f"{row['lower']:.6g} - {row['upper']:.6g} "
            f"| {row['tight_ms']:.0f} ms | {peer[0]} | {peer[1]} |"
        )
    lines += [
        "",
        "| calibrate: q | T | epsilon | delta | noise | tight | dp-accounting PLD | its noise |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in targets:
        lines.append(
            f"| {row['rate']:g} | {row['steps']:g} | {row['epsilon']:g} | {row['delta']:g} | "
            f"{row['noise']:.5f} "
            f"| {row['tight_ms']:.0f} ms | {row['pld_ms']:.0f} ms | {row['pld_noise']:.5f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    accounting.epsilon(training(0.01, 1.0, 50), 1e-5)  # imports are not part of what is measured
    peer_epsilon(0.01, 1.0, 5, 1e-3)
    rows, targets = epsilons(options.quick), calibrations()
    summary = verdict(rows, targets)
    if options.json:
        print(json.dumps({"epsilons": rows, "calibrations": targets, "summary": summary}))
        return
    print(table(rows, targets))
    print()
    print("\n".join(f"{name}: {value}" for name, value in summary.items()))


if __name__ == "__main__":
    main()
