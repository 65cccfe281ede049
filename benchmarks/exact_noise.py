"""Speed of exact integer noise: values a CPU second on one thread, cipher included, beside NumPy's
inexact normal and OpenDP.

    python benchmarks/exact_noise.py
    python benchmarks/exact_noise.py --scales 1 30 1000 10000 1000000 --values 10000000 --json

OpenDP is an optional peer: without it its columns are empty. It goes into an environment of its
own, beside dpfy's packages:

    python -m venv --system-site-packages peer && peer/bin/pip install opendp==0.16.0 &&
    peer/bin/python benchmarks/exact_noise.py

Tables are made before the clock starts (their time is a column): a training draws from one table in
every step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from dpfy.core.randomness import Randomness
from dpfy.mechanisms import Bits, gaussian, laplace

LAWS = {"laplace": laplace, "gaussian": gaussian}


def seconds(run: Callable[[], Any], repeats: int = 3) -> float:
    """The least CPU time of a few runs: the others were disturbed."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


def peer(law: str, scale: Fraction, values: int) -> float | None:
    """Values a second of OpenDP's sampler on a vector of integers, or None where it is not
    installed.
    """
    try:
        import opendp.prelude as dp
    except ImportError:
        return None
    dp.enable_features("contrib")
    metric = dp.l1_distance(T="i64") if law == "laplace" else dp.l2_distance(T=float)
    make = dp.m.make_laplace if law == "laplace" else dp.m.make_gaussian
    draw = make(dp.vector_domain(dp.atom_domain(T="i64")), metric, scale=float(scale))
    zeros = [0] * values
    return values / seconds(lambda: draw(zeros), 1)


def measure(law: str, scale: Fraction, values: int, peer_values: int) -> dict[str, Any]:
    draw, bits = LAWS[law], Bits(Randomness.from_os(), "benchmark", 0)
    table = seconds(
        lambda: draw(1 << 20, scale, bits), 1
    )  # from 2^20 values on every draw uses the same table
    rate = values / seconds(lambda: draw(values, scale, bits))
    table = max(0.0, table - (1 << 20) / rate)
    theirs = peer(law, scale, peer_values)
    return {
        "law": law,
        "scale": str(scale),
        "million_a_second": rate / 1e6,
        "table_seconds": table,
        "one_value_microseconds": 1e6 * seconds(lambda: draw(1, scale, bits)),
        "opendp_million_a_second": None if theirs is None else theirs / 1e6,
        "times_opendp": None if theirs is None else rate / theirs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of exact integer noise.")
    parser.add_argument(
        "--scales",
        nargs="+",
        type=Fraction,
        default=[Fraction(s) for s in (1, Fraction(5, 2), 30, 1000, 10_000, 1_000_000, 2**40)],
    )
    parser.add_argument("--values", type=int, default=5_000_000)
    parser.add_argument("--peer-values", type=int, default=20_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    normal = np.random.default_rng().standard_normal
    inexact = options.values / seconds(lambda: normal(options.values)) / 1e6
    rows = [
        measure(law, scale, options.values, options.peer_values)
        for law in LAWS
        for scale in options.scales
    ]
    if options.json:
        print(json.dumps({"numpy_normal_million_a_second": inexact, "rows": rows}))
        return
    print(f"numpy's inexact normal: {inexact:.0f} million values a CPU second")
    print(
        f"{'law':10}{'scale':>16}{'million/s':>11}{'table s':>9}{'one, us':>9}{'OpenDP million/s':>18}{'times':>8}"
    )
    for row in rows:
        theirs = (
            ""
            if row["times_opendp"] is None
            else f"{row['opendp_million_a_second']:18.4f}{row['times_opendp']:8.0f}"
        )
        print(
            f"{row['law']:10}{row['scale']:>16}{row['million_a_second']:11.0f}{row['table_seconds']:9.3f}{row['one_value_microseconds']:9.0f}{theirs}"
        )


if __name__ == "__main__":
    main()
