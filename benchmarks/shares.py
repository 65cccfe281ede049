"""Error of the mean over clients with noise in shares, against central Gaussian noise at the same
epsilon: one JSON line a case.

    python benchmarks/shares.py --clients 1000 --coordinates 14 --bits 14,16,18 --epsilon 1

Vectors nearly agree, which is the hardest case for the range of the sums. Central noise is the
least that the tight accountant allows.
"""

from __future__ import annotations

import argparse
import json
import math
import time

import numpy as np

from dpfy.accounting import calibrate
from dpfy.core import events
from dpfy.core.errors import Unsupported
from dpfy.core.randomness import Randomness
from dpfy.federated.shares import SharingScheme, choose

DELTA = 1e-6


def measured(scheme: SharingScheme, clients: int, seed: int) -> float:
    """The mean squared error of a coordinate of the sum."""
    rng, size, secret = (
        np.random.default_rng(seed),
        scheme.shares.dimension,
        Randomness.for_tests(seed),
    )
    common = rng.normal(size=size)
    total, truth = np.zeros(scheme.shares.coordinates, np.uint64), np.zeros(size)
    for client in range(clients):
        vector = common + 0.2 * rng.normal(size=size)
        vector *= scheme.clip / np.linalg.norm(vector)
        total += scheme.encode(vector, secret, client, 0)
        truth += vector
    found = scheme.decode(total & np.uint64((1 << scheme.bits) - 1), 0)
    return float(np.mean((found - truth) ** 2))


def case(
    clients: int, size: int, bits: int, epsilon: float, law: str, seed: int
) -> dict[str, object]:
    """One row of the table."""
    about = {"clients": clients, "coordinates": size, "bits": bits, "epsilon": epsilon, "law": law}
    central = calibrate.noise(events.Gaussian, epsilon, DELTA)
    by_rdp = calibrate.noise(events.Gaussian, epsilon, DELTA, accountant="rdp")
    try:
        scheme = choose(
            dimension=size,
            clip=1.0,
            clients=clients,
            bits=bits,
            epsilon=epsilon,
            delta=DELTA,
            law=law,
            rotation=seed,
        )
    except Unsupported as problem:
        return about | {"refused": str(problem)}
    began = time.process_time()
    found = measured(scheme, clients, seed)
    return about | {
        "error": round(found / central**2, 4),
        "error_by_rdp": round(found / by_rdp**2, 4),
        "predicted": round((scheme.stddev / central) ** 2, 4),
        "spread": round(math.sqrt(2 / size), 4),
        "overflow": float(f"{scheme.overflow:.2g}"),
        "share": round(scheme.share, 3),
        "milliseconds_a_client": round(1000 * (time.process_time() - began) / clients, 2),
    }


def main() -> None:
    """Print the cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--coordinates", type=int, default=14, help="a power of two")
    parser.add_argument("--bits", default="14,15,16,18,20")
    parser.add_argument("--epsilon", default="1,8")
    parser.add_argument("--laws", default="discrete-gaussian,skellam")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    for law in given.laws.split(","):
        for epsilon in map(float, given.epsilon.split(",")):
            for bits in map(int, given.bits.split(",")):
                print(
                    json.dumps(
                        case(given.clients, 1 << given.coordinates, bits, epsilon, law, given.seed)
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
