"""Linear models, naive Bayes and principal components beside diffprivlib on the same records, by
epsilon.

    DPFY_DATA=... python benchmarks/estimators_peers.py --diffprivlib VENV/bin/python [--only adult
    regression components] [--out FOLDER]

diffprivlib lives in an environment of its own (pip install diffprivlib==0.6.6 scikit-learn==1.7.2
pandas), where this file is run as a worker on arrays that are prepared here, once, for both: the
same rows, splits, public bounds and norms. Ours spend delta 1e-6 beside epsilon; diffprivlib's
learners have no delta. Every learner has its defaults. Trees and clusters:
benchmarks/estimators_trees.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

EPSILONS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
DELTA, SPLITS, FOLDS = 1e-6, 5, 5
REGRESSION = ("bike", "energy", "pol", "elevators")
COMPONENTS = {"airfoil": 2, "concrete": 3, "energy": 3}
"""Sets of the regression study, by how many components are kept of their features (rows of norm at
most 1).
"""


def adult() -> dict[str, Any]:
    """UCI Adult: numbers and one-hot categories within 0 and 1, and who is rich."""
    from dpfy.estimators.columns import FeatureColumns
    from dpfy.estimators.linear.design import RowLayout
    from dpfy.estimators.records import read
    from dpfy.tables import Schema
    from dpfy_lab.studies.classical_adult import RICH, table

    X, y = table(None)
    columns = FeatureColumns(tuple(Schema.of("adult").features))
    rows = RowLayout(columns, constant=False).rows(read(X, columns), np.inf)
    dense = rows.toarray() if hasattr(rows, "toarray") else rows
    low = np.where(dense.min(axis=0) < 0, -1.0, 0.0)  # the scales of the schema: [-1, 1], or [0, 1]
    return {
        "X": dense,
        "y": (y == RICH).astype(np.int64),
        "low": low,
        "norm": np.sqrt(len(columns.columns)),
    }


def sets(names: Any) -> dict[str, tuple[Any, Any]]:
    """Regression sets: rows of norm 1, targets within [-1, 1]."""
    from dpfy_lab.studies.classical_regression import prepared

    return {name: prepared(name, None) for name in names}


def split(size: int, seed: int) -> tuple[Any, Any]:
    """(training, test): the first fifth of a permutation is for the test."""
    order = np.random.RandomState(seed).permutation(size)
    return order[size // 5 :], order[: size // 5]


def auroc(truth: Any, chances: Any) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(truth, chances))


def classes(given: dict[str, Any], who: str) -> dict[str, Any]:
    """AUROC on Adult, mean over splits, by learner and epsilon."""
    X, y = given["X"], given["y"]
    found: dict[str, dict[str, float]] = {}
    for epsilon in EPSILONS:
        scores: dict[str, list[float]] = {}
        for seed in range(SPLITS):
            train, test = split(len(X), seed)
            for name, made in classifiers(who, epsilon, given).items():
                model = made.fit(X[train], y[train])
                scores.setdefault(name, []).append(
                    auroc(y[test], model.predict_proba(X[test])[:, 1])
                )
        for name, values in scores.items():
            found.setdefault(name, {})[f"{epsilon:g}"] = float(np.mean(values))
    return found


def classifiers(who: str, epsilon: float, given: dict[str, Any]) -> dict[str, Any]:
    """Logistic regression and naive Bayes, as they come."""
    low, high = given["low"], np.ones(len(given["low"]))
    if who == "dpfy":
        from dpfy import estimators

        public: dict[str, Any] = {
            "epsilon": epsilon,
            "delta": DELTA,
            "bounds": (low, high),
            "classes": (0, 1),
        }
        norm = float(given["norm"])
        return {
            "logistic regression": estimators.LogisticRegression(norm=norm, **public),
            "naive Bayes": estimators.NaiveBayes(**public),
        }
    from diffprivlib import models

    return {
        "logistic regression": models.LogisticRegression(
            epsilon=epsilon, data_norm=float(given["norm"]), max_iter=1000
        ),
        "naive Bayes": models.GaussianNB(epsilon=epsilon, bounds=(low, high)),
    }


def numbers(given: dict[str, tuple[Any, Any]], who: str) -> dict[str, Any]:
    """Excess of the mean squared error over least squares, mean over folds, by set and epsilon.
    Predictions are moved into [-1, 1].
    """
    found: dict[str, dict[str, float]] = {}
    for name, (rows, target) in given.items():
        order = np.random.RandomState(0).permutation(len(target))
        for epsilon in EPSILONS:
            excess = []
            for fold in range(FOLDS):
                test, train = (
                    order[fold::FOLDS],
                    np.concatenate([order[k::FOLDS] for k in range(FOLDS) if k != fold]),
                )
                plain = rows[test] @ np.linalg.lstsq(rows[train], target[train], rcond=None)[0]
                told = regressor(who, epsilon).fit(rows[train], target[train]).predict(rows[test])
                errors = [
                    float(np.mean((np.clip(np.ravel(p), -1, 1) - target[test]) ** 2))
                    for p in (told, plain)
                ]
                excess.append(errors[0] - errors[1])
            found.setdefault(name, {})[f"{epsilon:g}"] = float(np.mean(excess))
    return found


def regressor(who: str, epsilon: float) -> Any:
    """Linear regression without a constant, of rows and targets within [-1, 1]."""
    if who == "dpfy":
        from dpfy.estimators import LinearRegression

        public: dict[str, Any] = {"bounds": (-1, 1), "target_bounds": (-1, 1), "norm": 1.0}
        return LinearRegression(epsilon=epsilon, delta=DELTA, fit_intercept=False, **public)
    from diffprivlib import models

    return models.LinearRegression(
        epsilon=epsilon, bounds_X=(-1, 1), bounds_y=(-1, 1), fit_intercept=False
    )


def components(given: dict[str, tuple[Any, Any]], who: str) -> dict[str, Any]:
    """The variance that private components hold, over that of the best ones, mean over five seeds,
    by set and epsilon.
    """
    found: dict[str, dict[str, float]] = {}
    for name, (rows, _) in given.items():
        covariance = np.cov(rows.T, bias=True)
        best = float(np.sort(np.linalg.eigvalsh(covariance))[::-1][: COMPONENTS[name]].sum())
        for epsilon in EPSILONS:
            shares = []
            for _ in range(5):
                base = np.linalg.qr(
                    decomposition(who, epsilon, COMPONENTS[name]).fit(rows).components_.T
                )[0]
                shares.append(float(np.trace(base.T @ covariance @ base)) / best)
            found.setdefault(name, {})[f"{epsilon:g}"] = float(np.mean(shares))
    return found


def decomposition(who: str, epsilon: float, count: int) -> Any:
    """Principal components of rows of norm at most 1."""
    if who == "dpfy":
        from dpfy.estimators import PCA

        return PCA(n_components=count, epsilon=epsilon, delta=DELTA, bounds=(-1, 1), norm=1.0)
    from diffprivlib import models

    return models.PCA(count, epsilon=epsilon, data_norm=1.0, bounds=(-1, 1))


WORK = {"adult": classes, "regression": numbers, "components": components}
SAYS = {
    "adult": ("AUROC on Adult, five splits", False),
    "regression": ("Linear regression: excess squared error over least squares", True),
    "components": ("Principal components: variance held, over that of the best", False),
}
"""What a table shows, and whether less is better."""


def asked_of(python: str, what: str, file: Path) -> dict[str, Any]:
    """What diffprivlib finds, in its own environment."""
    alone = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    said = subprocess.run(
        [python, __file__, "--worker", what, str(file)],
        text=True,
        stdout=subprocess.PIPE,
        check=True,
        env=alone,
    )
    found: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return found


def worker(what: str, file: str) -> dict[str, Any]:
    """diffprivlib's side of a table."""
    warnings.simplefilter("ignore")
    held = np.load(file)
    if what == "adult":
        return WORK[what](dict(held), "diffprivlib")
    names = {key.rpartition("-")[0] for key in held.files}
    return WORK[what](
        {name: (held[f"{name}-X"], held[f"{name}-y"]) for name in sorted(names)}, "diffprivlib"
    )


def compared(what: str, python: str) -> dict[str, Any]:
    """Both sides of a table."""
    given: Any = (
        adult() if what == "adult" else sets(REGRESSION if what == "regression" else COMPONENTS)
    )
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "given.npz"
        flat = (
            given
            if what == "adult"
            else {
                f"{n}-{k}": v for n, pair in given.items() for k, v in zip("Xy", pair, strict=True)
            }
        )
        np.savez(file, **flat)
        return {"dpfy": WORK[what](given, "dpfy"), "diffprivlib": asked_of(python, what, file)}


def lines(what: str, found: dict[str, Any]) -> list[str]:
    """A table: both sides, and whether ours is at least as good."""
    title, less = SAYS[what]
    told = [
        f"**{title}**",
        "",
        "| | epsilon | dpfy | diffprivlib | at least as good |",
        "|---|---|---|---|---|",
    ]
    for name, row in found["dpfy"].items():
        for epsilon, ours in row.items():
            other = found["diffprivlib"][name][epsilon]
            good = ours <= other if less else ours >= other
            told.append(
                f"| {name} | {epsilon} | {ours:.4g} | {other:.4g} | {'yes' if good else 'no'} |"
            )
    return told


def main() -> None:
    """All tables, or those asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--diffprivlib", help="Python of an environment with diffprivlib")
    parser.add_argument("--only", nargs="*", choices=list(WORK), default=list(WORK))
    parser.add_argument("--out", type=Path, help="folder for estimators-peers.json")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(*options.worker)))
        return
    if not options.diffprivlib:
        parser.error("say where diffprivlib is: --diffprivlib VENV/bin/python")
    found = {}
    for what in options.only:
        found[what] = compared(what, options.diffprivlib)
        print("\n".join(lines(what, found[what])), "\n", flush=True)
    if options.out:
        (options.out / "estimators-peers.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
