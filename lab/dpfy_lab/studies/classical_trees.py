"""Trees: forests with random splits against one tree that is grown from the top, and boosting
beside both, by epsilon.
"""

from __future__ import annotations

import functools
from statistics import mean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy_lab.studies.classical_part import Part
from dpfy_lab.studies.page import Section, Table
from dpfy_lab.studies.study import Cell, Options, Results

EPSILONS = (0.1, 0.5, 1.0, 4.0, 16.0)
KINDS = {
    "forest": "RandomForestClassifier",
    "top-down": "DecisionTreeClassifier",
    "random-split boosting": "GradientBoostingClassifier",
    "additive boosting": "AdditiveBoostingClassifier",
}
DATA = {
    "all": "Trees: every column tells a little",
    "few": "Trees: three columns tell all, and together",
}
COLUMNS, DELTA = 12, 1e-6


def made_up(kind: str, records: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Numbers from -1 to 1, and a label that follows from all columns, or from three of them in
    boxes.
    """
    rng = np.random.default_rng(seed)
    rows = rng.uniform(-1, 1, (records, COLUMNS))
    if kind == "all":
        score = rows.sum(axis=1)
    else:
        score = 3 * np.where(
            (rows[:, 0] > 0.2) & (rows[:, 1] < 0.4), 1.0, np.where(rows[:, 2] > 0.7, 0.5, -0.5)
        )
    return rows, (score + rng.logistic(size=records) > 0).astype(np.int64)


def ranks(kind: str, epsilon: float, records: int, seeds: int) -> dict[str, Any]:
    """AUROC on fresh records, by estimator and seed."""
    from sklearn.metrics import roc_auc_score

    from dpfy.estimators import ESTIMATORS

    found: dict[str, list[float]] = {name: [] for name in KINDS}
    for seed in range(seeds):
        rows, labels = made_up(kind, records, seed)
        test, truth = made_up(kind, 10_000, 1000 + seed)
        for name, estimator in KINDS.items():
            made: Any = ESTIMATORS[estimator](
                bounds=(-1, 1), epsilon=epsilon, delta=DELTA, random_state=seed
            )
            made.set_params(classes=(0, 1)).fit(rows, labels)
            found[name].append(float(roc_auc_score(truth, made.predict_proba(test)[:, 1])))
    return found


def cells(options: Options) -> list[Cell]:
    """One for each kind of data and epsilon."""
    records, seeds = (1000, 2) if options.fast else (20_000, 5)
    return [
        Cell(
            f"trees-{kind}-{epsilon:g}",
            {
                "epsilon": epsilon,
                "delta": DELTA,
                "records": records,
                "seeds": seeds,
                "columns": COLUMNS,
                "estimators": KINDS,
            },
            functools.partial(ranks, kind, epsilon, records, seeds),
        )
        for kind in DATA
        for epsilon in EPSILONS
    ]


def rows_of(kind: str, results: Results) -> list[list[Any]]:
    """Epsilon, mean AUROC and its deviation by estimator, and whether the forest beats the tree."""
    rows: list[list[Any]] = []
    for cell in results.starting(f"trees-{kind}-"):
        told = [f"{mean(cell.result[name]):.4f} ± {stdev(cell.result[name]):.4f}" for name in KINDS]
        wins = "yes" if mean(cell.result["forest"]) > mean(cell.result["top-down"]) else "no"
        rows.append([f"{cell.settings['epsilon']:g}", *told, wins])
    return rows


def sections(results: Results) -> list[Section]:
    """A table for each kind of data."""
    columns = ("epsilon", *KINDS, "forest beats top-down")
    tables = [
        Table(f"trees-{kind}", words, columns, rows)
        for kind, words in DATA.items()
        if (rows := rows_of(kind, results))
    ]
    if not tables:
        return []
    settings = results.starting("trees-")[0].settings
    words = (
        f"AUROC on fresh records after a fit on {settings['records']:,} made-up ones with "
        f"{COLUMNS} columns, delta {DELTA:g}; mean and "
        f"standard deviation over {settings['seeds']} data sets. Random splits cost nothing, and "
        f"all of the budget goes to the leaves; a "
        "tree from the top pays for its splits."
    )
    return [Section("Trees: random splits against a tree from the top", words, tables)]


PART = Part("trees", cells, sections, "Trees have their defaults at every epsilon.")
