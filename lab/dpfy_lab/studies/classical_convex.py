"""Convex losses: where noise goes in (objective, output, gradients), and how the excess risk falls
with records and epsilon.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core.errors import DpfyError
from dpfy_lab.studies import figures
from dpfy_lab.studies.classical_adult import fitted
from dpfy_lab.studies.classical_part import Part
from dpfy_lab.studies.figures import Axes, Line
from dpfy_lab.studies.page import Figure, Section, Table
from dpfy_lab.studies.study import Cell, Options, Results

Floats = NDArray[np.float64]
SEEDS = 6
NOISE = {"features": 10, "records": 20_000, "epsilon": 1.0, "delta": 1e-6}
ALPHAS = (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
TUNED_EPSILONS, TUNED = (0.1, 0.5, 1.0, 4.0), ("objective", "output")
GRADIENT = "gradient"
SLOPES = {"features": 5, "delta": 1e-8, "pull": 0.01}
"""`pull`: the weight of |w|^2 / 2 beside the mean loss, which makes the risk strongly convex."""
SIZES, RATES = (8_000, 16_000, 32_000, 64_000, 128_000), (0.1, 0.2, 0.4, 0.8, 1.6)
AT_EPSILON, AT_SIZE = 0.5, 64_000
SLOPE_SOLVERS: dict[str, dict[str, Any]] = {
    GRADIENT: {"clip": 1.0, "rounds": 200},
    "newton": {"clip": 1.0},
    "objective": {},
    "output": {},
}
"""Slopes are not cut here: what cutting adds to the risk falls more slowly. Enough rounds that what
is left is noise.
"""
THEORY, WITHIN = -2.0, 0.15


def made_up(records: int, features: int, seed: int) -> tuple[Floats, NDArray[np.int64]]:
    """Records that follow a logistic model."""
    rng = np.random.default_rng(seed)
    given = rng.uniform(-1, 1, (records, features))
    scores = given @ np.linspace(-1.5, 1.5, features) + rng.logistic(size=records)
    return given, (scores > 0).astype(np.int64)


def risk(
    weights: Floats, given: Floats, labels: NDArray[np.int64], pull: float
) -> tuple[float, Floats]:
    """Mean logistic loss plus pull/2 |w|^2, and its gradient; the first weight is the constant."""
    scores = given @ weights[1:] + weights[0]
    off = 1 / (1 + np.exp(-scores)) - labels
    value = float(np.mean(np.logaddexp(0.0, scores) - labels * scores)) + pull / 2 * float(
        weights @ weights
    )
    return value, np.append(off.mean(), given.T @ off / len(off)) + pull * weights


def least(given: Floats, labels: NDArray[np.int64], pull: float) -> tuple[float, Floats]:
    """The smallest risk, and where it is."""
    from scipy.optimize import minimize

    start = np.zeros(given.shape[1] + 1)
    found = minimize(
        risk,
        start,
        (given, labels, pull),
        "L-BFGS-B",
        jac=True,
        options={"ftol": 1e-16, "gtol": 1e-11, "maxiter": 1000},
    )
    return float(found.fun), np.asarray(found.x)


def off(
    solver: str, records: int, features: int, pull: float, given: Mapping[str, Any], seed: int
) -> tuple[float, float]:
    """Excess risk of a private fit, and how far its weights are from the best ones."""
    from dpfy.estimators import LogisticRegression

    rows, labels = made_up(records, features, seed)
    made = LogisticRegression(
        bounds=(-1, 1),
        classes=[0, 1],
        norm=math.sqrt(features),
        solver=solver,
        alpha=pull * records,
        random_state=seed,
        **given,
    ).fit(rows, labels)
    weights = np.append(made.intercept_, made.coef_[0])
    smallest, best = least(rows, labels, pull)
    return risk(weights, rows, labels, pull)[0] - smallest, float(np.linalg.norm(weights - best))


def noise(alpha: float, records: int, seeds: int) -> dict[str, Any]:
    """The mean squared distance of released weights from the minimum of the same objective, by
    solver; None where it is refused.
    """
    terms = {"epsilon": NOISE["epsilon"], "delta": NOISE["delta"]}
    found: dict[str, Any] = {}
    for solver in TUNED:
        try:
            runs = [
                off(solver, records, int(NOISE["features"]), alpha / records, terms, seed)
                for seed in range(seeds)
            ]
            found[solver] = {
                "distance": math.sqrt(mean(d**2 for _, d in runs)),
                "excess": mean(e for e, _ in runs),
            }
        except DpfyError:
            found[solver] = None
    return found


def tuned(solver: str, alpha: float | None, epsilon: float, data_dir: str | None) -> dict[str, Any]:
    """Adult, at one regularisation; without figures where the proof does not cover it."""
    try:
        return fitted(
            "LogisticRegression",
            {"epsilon": epsilon, "delta": 1e-6, "solver": solver, "alpha": alpha},
            data_dir,
        )
    except DpfyError:
        return {"refused": True}


def slope(solver: str, seeds: int, largest: int, at_size: int) -> dict[str, Any]:
    """Mean excess risks over records and over epsilon, and their slopes on logarithmic scales."""
    features, delta, pull = int(SLOPES["features"]), SLOPES["delta"], SLOPES["pull"]
    more = SLOPE_SOLVERS[solver]

    def excess(records: int, epsilon: float) -> float:
        given = {"epsilon": epsilon, "delta": delta, **more}
        return mean(off(solver, records, features, pull, given, seed)[0] for seed in range(seeds))

    sizes = [n for n in SIZES if n <= largest]
    by_size = [excess(n, AT_EPSILON) for n in sizes]
    by_epsilon = [excess(at_size, e) for e in RATES]
    return {
        "sizes": sizes,
        "by_size": by_size,
        "slope_size": _fitted(sizes, by_size),
        "epsilons": list(RATES),
        "by_epsilon": by_epsilon,
        "slope_epsilon": _fitted(RATES, by_epsilon),
    }


def _fitted(x: Sequence[float], y: Sequence[float]) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def cells(options: Options) -> list[Cell]:
    """Noise by regularisation, tuned solvers on Adult (not in the short form), and slopes."""
    records, seeds = (2000, 2) if options.fast else (int(NOISE["records"]), SEEDS)
    found = []
    for alpha in ALPHAS:
        settings: dict[str, Any] = {**NOISE, "records": records, "seeds": seeds, "alpha": alpha}
        found.append(
            Cell(
                f"convex-noise-{alpha:g}", settings, functools.partial(noise, alpha, records, seeds)
            )
        )
    for epsilon in () if options.fast else TUNED_EPSILONS:
        for solver in (*TUNED, GRADIENT):
            for pull in (None, *(ALPHAS if solver in TUNED else ())):
                name = f"convex-tuned-{solver}-{epsilon:g}-{'rule' if pull is None else format(pull, 'g')}"
                settings = {"solver": solver, "alpha": pull, "epsilon": epsilon}
                found.append(
                    Cell(
                        name,
                        settings,
                        functools.partial(tuned, solver, pull, epsilon, options.data_dir),
                    )
                )
    seeds, largest, at_size = (1, SIZES[1], SIZES[0]) if options.fast else (4, SIZES[-1], AT_SIZE)
    for solver, more in SLOPE_SOLVERS.items():
        settings = {**SLOPES, "given": more, "seeds": seeds, "largest": largest, "solver": solver}
        settings |= {
            "sizes": list(SIZES),
            "epsilons": list(RATES),
            "at_epsilon": AT_EPSILON,
            "at_size": at_size,
        }
        found.append(
            Cell(
                f"convex-slope-{solver}",
                settings,
                functools.partial(slope, solver, seeds, largest, at_size),
            )
        )
    return found


# --- the page
# -------------------------------------------------------------------------------------------------------------------


def noise_rows(results: Results) -> list[list[Any]]:
    """alpha, then distance and excess risk of each solver, and whether objective perturbation has
    less noise.
    """
    rows: list[list[Any]] = []
    for cell in results.starting("convex-noise-"):
        one, other = (cell.result[solver] for solver in TUNED)
        less = None if one is None else "yes" if one["distance"] < other["distance"] else "no"
        held = [
            v
            for r in (one, other)
            for v in ((None, None) if r is None else (r["distance"], r["excess"]))
        ]
        rows.append([cell.settings["alpha"], *held, less])
    return rows


def tuned_rows(results: Results) -> list[list[Any]]:
    """For each epsilon: the best AUROC of each solver over its regularisations, that one, and what
    noisy gradients reach by default.
    """
    rows: list[list[Any]] = []
    for epsilon in TUNED_EPSILONS:
        row: list[Any] = [f"{epsilon:g}"]
        best = 0.0
        for solver in TUNED:
            held = [
                c
                for c in results.starting(f"convex-tuned-{solver}-{epsilon:g}-")
                if "auroc" in c.result
            ]
            top = max(held, key=lambda c: mean(c.result["auroc"]), default=None)
            if top is not None:
                best = max(best, mean(top.result["auroc"]))
                row += [f"{mean(top.result['auroc']):.4f}", top.name.rpartition("-")[2]]
        ours = results.starting(f"convex-tuned-{GRADIENT}-{epsilon:g}-")
        if ours and len(row) == 5:
            found = mean(ours[0].result["auroc"])
            rows.append([*row, f"{found:.4f}", "yes" if found > best else "no"])
    return rows


def slope_rows(results: Results) -> list[list[Any]]:
    """Slopes by solver, and whether both are near the theory."""
    rows: list[list[Any]] = []
    for cell in results.starting("convex-slope-"):
        found = [cell.result["slope_size"], cell.result["slope_epsilon"]]
        near = all(abs(s - THEORY) <= WITHIN for s in found)
        rows.append(
            [
                cell.settings["solver"],
                *(f"{s:.3f}" for s in found),
                f"{THEORY:g}",
                "yes" if near else "no",
            ]
        )
    return rows


def _noise_section(results: Results) -> list[Section]:
    rows = noise_rows(results)
    if not rows:
        return []
    records = results.starting("convex-noise-")[0].settings["records"]
    words = (
        f"Logistic regression on {records:,} made-up records with {NOISE['features']} features, "
        f"epsilon {NOISE['epsilon']:g}, delta 1e-6. "
        "Distance: root mean square of how far the released weights are from the minimum of the "
        "objective that both solvers minimise. "
        "Objective perturbation has no proof at the smallest regularisations, and refuses them."
    )
    held = [f"{what}, {solver}" for solver in TUNED for what in ("distance", "excess risk")]
    table = Table(
        "convex-noise",
        "Noise by regularisation",
        ("alpha", *held, "objective has less noise"),
        rows,
    )
    return [Section("Where noise goes in", words, [table])]


def _tuned_section(results: Results) -> list[Section]:
    rows = tuned_rows(results)
    if not rows:
        return []
    words = (
        "Adult, mean AUROC over five splits. Objective and output perturbation at the "
        "regularisation that is best on these very "
        "splits, for each epsilon, which favours them; noisy gradients with one default rule."
    )
    columns = (
        "epsilon",
        "objective",
        "at alpha",
        "output",
        "at alpha",
        "noisy gradients",
        "noisy gradients are best",
    )
    return [
        Section(
            "Noisy gradients against both",
            words,
            [Table("convex-tuned", "AUROC on Adult", columns, rows)],
        )
    ]


def _slope_section(results: Results) -> list[Section]:
    rows = slope_rows(results)
    if not rows:
        return []
    words = (
        f"Mean excess empirical risk of strongly convex logistic regression on made-up records "
        f"with {SLOPES['features']} features, "
        f"delta {SLOPES['delta']:g}: over the number of records at epsilon {AT_EPSILON:g}, and "
        f"over epsilon at {AT_SIZE:,} records. "
        "Theory has d log(1/delta) / (n epsilon)^2 (Bassily, Smith & Thakurta 2014), hence slopes "
        "of -2."
    )
    columns = ("solver", "slope over records", "slope over epsilon", "theory", f"within {WITHIN:g}")
    held = results.starting("convex-slope-")
    lines = [Line(c.settings["solver"], c.result["sizes"], c.result["by_size"], "o-") for c in held]
    picture = figures.lines(lines, Axes("records", "excess risk", log_x=True, log_y=True))
    table = Table("convex-slopes", "Slopes on logarithmic scales", columns, rows)
    return [
        Section(
            "How the excess risk falls", words, [table, Figure("slopes", "Excess risk", picture)]
        )
    ]


def sections(results: Results) -> list[Section]:
    """Noise by place, the tuned comparison, slopes."""
    return [*_noise_section(results), *_tuned_section(results), *_slope_section(results)]


PART = Part(
    "convex",
    cells,
    sections,
    "Regularisations of objective and output perturbation are the best of six in hindsight.",
)
