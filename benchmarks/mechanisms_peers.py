"""Mechanisms beside those of other libraries, part by part. Peers are optional: what is not
installed is named and left out.

    python benchmarks/mechanisms_peers.py --part speed

OpenDP goes into an environment of its own: see benchmarks/exact_noise.py.

speed: exact discrete Laplace and Gaussian noise, cipher included, one thread, in the same run as
OpenDP's. Bars: 10 million values a CPU second for scales from 1 to 10^4, and 100 times OpenDP.
"""

from __future__ import annotations

import argparse
import sys
from fractions import Fraction

import exact_noise

BAR, TIMES = 10.0, 100.0


def speed() -> bool:
    """Whether every bar on speed that could be measured holds."""
    good = True
    for law in exact_noise.LAWS:
        for scale in (1, 10, 100, 1000, 10_000):
            row = exact_noise.measure(law, Fraction(scale), 5_000_000, 20_000)
            times = row["times_opendp"]
            holds = row["million_a_second"] >= BAR and (times is None or times >= TIMES)
            beside = (
                "OpenDP is not installed"
                if times is None
                else f"{times:.0f} times OpenDP's {row['opendp_million_a_second']:.3f}"
            )
            print(
                f"{law:10}{scale:>8}{row['million_a_second']:8.0f} million a second, "
                f"{beside}{'' if holds else '  BELOW THE BAR'}"
            )
            good = good and holds
    return good


PARTS = {"speed": speed}


def main() -> None:
    parser = argparse.ArgumentParser(description="Mechanisms beside those of other libraries.")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    held = [PARTS[part]() for part in parser.parse_args().part]
    sys.exit(0 if all(held) else 1)


if __name__ == "__main__":
    main()
