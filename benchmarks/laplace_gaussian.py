"""Laplace or Gaussian noise: the standard deviation in each coordinate, by the number of
coordinates that a unit adds to.

python benchmarks/laplace_gaussian.py [--epsilon 0.5] [--delta 1e-6] [--plot
docs/laplace-gaussian.svg]
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from dpfy.accounting.gaussian import least_coordinates, sigma_analytic
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.mechanisms.additive import GaussianMechanism, LaplaceMechanism

COORDINATES = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200, 500, 1000)
COPIES = 20_000


def measured(epsilon: float, delta: float, coordinates: int) -> tuple[float, float]:
    """The standard deviation of what is released in one coordinate: Laplace, Gaussian."""
    bound, zeros = (
        Bound(math.sqrt(coordinates), float(coordinates), 1.0),
        np.zeros(max(coordinates, COPIES), np.int64),
    )
    mechanisms = LaplaceMechanism(1 / epsilon), GaussianMechanism(sigma_analytic(epsilon, delta))
    laplace, gaussian = (
        m.release(Bounded(zeros, bound), mock_permit(m.event, 1)).value.std() for m in mechanisms
    )
    return float(laplace), float(gaussian)


def table(epsilon: float, delta: float) -> list[tuple[int, float, float]]:
    """A row for each number of coordinates."""
    return [(d, *measured(epsilon, delta, d)) for d in COORDINATES]


def plot(rows: list[tuple[int, float, float]], epsilon: float, delta: float, path: str) -> None:
    """The figure."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "dpfy"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    for column, name in ((1, "Laplace"), (2, "Gaussian")):
        axes.loglog(
            [row[0] for row in rows],
            [row[column] for row in rows],
            marker="o",
            markersize=3,
            label=name,
        )
    axes.axvline(least_coordinates(epsilon, delta), color="grey", linewidth=0.8, linestyle=":")
    axes.set(
        xlabel="coordinates that a unit adds to",
        ylabel="standard deviation in each",
        title=f"epsilon {epsilon:g}, delta {delta:g}",
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print the table, draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=0.5)
    parser.add_argument("--delta", type=float, default=1e-6)
    parser.add_argument("--plot", default="")
    given = parser.parse_args()
    rows = table(given.epsilon, given.delta)
    print("coordinates   Laplace  Gaussian")
    for d, laplace, gaussian in rows:
        print(f"{d:11d} {laplace:9.3f} {gaussian:9.3f}")
    print(
        f"Gaussian noise has less variance from {least_coordinates(given.epsilon, given.delta)} "
        f"coordinates on"
    )
    if given.plot:
        plot(rows, given.epsilon, given.delta, given.plot)


if __name__ == "__main__":
    main()
