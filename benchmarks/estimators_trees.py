"""Trees and clusters: AUROC on UCI Adult beside DP-EBM and diffprivlib, costs of k-means, speed and
memory of boosting.

    DPFY_DATA=... python benchmarks/estimators_trees.py auroc [--interpret VENV/bin/python]
    [--diffprivlib VENV/bin/python] DPFY_DATA=... python benchmarks/estimators_trees.py clusters
    [--diffprivlib VENV/bin/python] DPFY_DATA=... python benchmarks/estimators_trees.py speed
    [--rows 1000000]

Peers live in environments of their own (pip install interpret-core==0.7.8 pandas; pip install
diffprivlib==0.6.6 scikit-learn==1.7.2 pandas); this file is run there as a worker. Splits are
`RandomState(seed).permutation`, the first fifth for testing, seeds 0 to 4; delta 1e-6, a record
added or removed. Every estimator has its defaults: nothing is chosen for an epsilon.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np

DELTA = 1e-6
SPLITS = range(5)
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
NUMBERS = ("age", "education_num", "capital_gain", "capital_loss", "hr_per_week")
IGNORED = ("fnlwgt", "education")
"""What the packaged schema leaves out; DP-EBM is given the table with and without, and the better
of both counts.
"""


def table(path):
    """UCI Adult, complete rows."""
    import pandas

    return pandas.read_csv(path, skipinitialspace=True)


def parts(rows, seed):
    """Training rows and test rows of a split."""
    order = np.random.RandomState(seed).permutation(len(rows))
    cut = len(rows) // 5
    return rows.iloc[order[cut:]], rows.iloc[order[:cut]]


def trees():
    """Our estimators, as they come."""
    from dpfy import estimators

    return {
        "AdditiveBoosting": estimators.AdditiveBoostingClassifier,
        "GradientBoosting": estimators.GradientBoostingClassifier,
        "RandomForest": estimators.RandomForestClassifier,
        "DecisionTree": estimators.DecisionTreeClassifier,
        "SoftTree": estimators.SoftTreeClassifier,
    }


def our_fits(rows, names, epsilons, seeds=SPLITS):
    """name -> epsilon -> [AUROC of each split], and the CPU seconds of a fit."""
    from sklearn.metrics import roc_auc_score

    found = {}
    for name in names:
        for epsilon in epsilons:
            scores, spent = [], []
            for seed in seeds:
                train, test = parts(rows, seed)
                X, y = train.drop(columns=["income", *IGNORED]), train["income"]
                made = trees()[name](epsilon=epsilon, delta=DELTA, schema="adult")
                start = time.process_time()
                made.fit(X, y)
                spent.append(time.process_time() - start)
                scores.append(
                    roc_auc_score(
                        test["income"] == ">50K",
                        made.predict_proba(test.drop(columns=["income", *IGNORED]))[:, 1],
                    )
                )
            found.setdefault(name, {})[str(epsilon)] = {"auroc": scores, "seconds": min(spent)}
            print(f"{name} {epsilon}: {np.mean(scores):.4f}, {min(spent):.2f} s", file=sys.stderr)
    return found


def ebm_fits(rows, epsilons):
    """DP-EBM as tuned: log1p columns, rate 0.1, 400 rounds; with public bounds where it takes
    them.
    """
    from interpret.privacy import DPExplainableBoostingClassifier
    from sklearn.metrics import roc_auc_score

    rows = rows.assign(**{c: np.log1p(rows[c]) for c in ("capital_gain", "capital_loss")})
    found = {}
    for name, dropped, more in (
        ("tuned", IGNORED, {"learning_rate": 0.1, "max_rounds": 400}),
        ("tuned, all columns", (), {"learning_rate": 0.1, "max_rounds": 400}),
    ):
        held = rows.drop(columns=[*dropped])
        columns = [c for c in held.columns if c != "income"]
        kinds = ["continuous" if held[c].dtype.kind in "if" else "nominal" for c in columns]
        ranges = {
            str(k): (float(held[c].min()), float(held[c].max()))
            for k, c in enumerate(columns)
            if kinds[k] == "continuous"
        }
        for epsilon in epsilons:
            scores, spent = [], []
            for seed in SPLITS:
                train, test = parts(held, seed)
                made = DPExplainableBoostingClassifier(
                    epsilon=epsilon,
                    delta=DELTA,
                    composition="gdp",
                    feature_types=kinds,
                    n_jobs=1,
                    random_state=None,
                    privacy_bounds={int(k): v for k, v in ranges.items()},
                    **more,
                )
                start = time.process_time()
                made.fit(train[columns], train["income"] == ">50K")
                spent.append(time.process_time() - start)
                scores.append(
                    roc_auc_score(test["income"] == ">50K", made.predict_proba(test[columns])[:, 1])
                )
            found.setdefault(name, {})[str(epsilon)] = {"auroc": scores, "seconds": min(spent)}
            print(
                f"DP-EBM {name} {epsilon}: {np.mean(scores):.4f}, {min(spent):.2f} s",
                file=sys.stderr,
            )
    return found


def diffprivlib_fits(rows, epsilons):
    """diffprivlib's forest and tree on one-hot columns, pure epsilon; its trees have no other
    guarantee.
    """
    import pandas
    from diffprivlib.models import DecisionTreeClassifier, RandomForestClassifier
    from sklearn.metrics import roc_auc_score

    y = (rows["income"] == ">50K").to_numpy()
    X = rows.drop(columns=["income", *IGNORED])
    X = X.assign(**{c: np.log1p(X[c]) for c in ("capital_gain", "capital_loss")})
    X = pandas.get_dummies(X, dtype=float)
    low, high = X.min().to_numpy(), X.max().to_numpy()
    found = {}
    for name, kind, more in (
        ("RandomForest", RandomForestClassifier, {}),
        (
            "RandomForest, 20 trees of depth 8",
            RandomForestClassifier,
            {"n_estimators": 20, "max_depth": 8},
        ),
        ("DecisionTree", DecisionTreeClassifier, {}),
    ):
        for epsilon in epsilons:
            scores = []
            for seed in SPLITS:
                order = np.random.RandomState(seed).permutation(len(X))
                cut = len(X) // 5
                train, test = order[cut:], order[:cut]
                made = kind(epsilon=epsilon, bounds=(low, high), classes=[False, True], **more)
                made.fit(X.to_numpy()[train], y[train])
                scores.append(roc_auc_score(y[test], made.predict_proba(X.to_numpy()[test])[:, 1]))
            found.setdefault(name, {})[str(epsilon)] = {"auroc": scores, "seconds": None}
            print(f"diffprivlib {name} {epsilon}: {np.mean(scores):.4f}", file=sys.stderr)
    return found


def rank(rows, interpret, diffprivlib):
    """AUROC of our trees, and of the peers whose Python is given, in one job."""
    found = {"dpfy": our_fits(rows, trees(), EPSILONS)}
    for name, python in (("DP-EBM", interpret), ("diffprivlib", diffprivlib)):
        if python:
            found[name] = asked_of(python, name, {})
    lines = [
        "| | " + " | ".join(f"epsilon {e:g}" for e in EPSILONS) + " | CPU seconds |",
        "|---|" + "---|" * (len(EPSILONS) + 1),
    ]
    for home, held in found.items():
        for name, row in held.items():
            cells = [
                f"{np.mean(row[str(e)]['auroc']):.4f} ± {np.std(row[str(e)]['auroc']) / 2:.4f}"
                for e in EPSILONS
            ]
            lines.append(
                f"| {home} {name} | {' | '.join(cells)} | "
                f"{_seconds(row[str(EPSILONS[1])]['seconds'])} |"
            )
    return found, lines


def _seconds(spent):
    """CPU seconds, where they were measured."""
    return "-" if spent is None else f"{spent:.2f}"


def asked_of(python, name, more):
    """What a peer finds in its own environment."""
    alone = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [python, __file__, "--worker", name, "--more", json.dumps(more)]
    return json.loads(
        subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True, env=alone).stdout
    )


def numbers(rows):
    """Adult's five numbers on their scales: log1p of money, 0 to 1 for it, -1 to 1 for all else."""
    from dpfy.estimators import KMeans
    from dpfy.tables import Schema

    columns = tuple(c for c in Schema.of("adult").features if c.name in NUMBERS)
    table = rows[list(NUMBERS)]
    return (
        columns,
        table,
        KMeans(n_clusters=1, schema=columns, random_state=0).fit(table)._given(table).scaled(),
    )


def mnist():
    """MNIST in its first 40 principal components (public by assumption), on which lengths above 10
    are cut.
    """
    import gzip

    from sklearn.decomposition import PCA

    with gzip.open(folder() / "mnist" / "train-images-idx3-ubyte.gz") as file:
        images = (
            np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784).astype(np.float32)
            / 255
        )
    return (
        PCA(40, svd_solver="randomized", random_state=0).fit_transform(images).astype(np.float64)
        / 10
    )


def gaussians(count, dimensions, clusters, seed=0, spread=1 / 8):
    """Round clusters with centres on a sphere of radius 0.875, moved into the unit ball."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(clusters, dimensions))
    centres *= 0.875 / np.linalg.norm(centres, axis=1)[:, None]
    rows = centres[rng.integers(clusters, size=count)] + rng.normal(
        size=(count, dimensions)
    ) * spread / np.sqrt(dimensions)
    return rows / np.maximum(np.linalg.norm(rows, axis=1), 1.0)[:, None]


def clusters(rows, diffprivlib, runs):
    """Costs over the best without privacy: Adult, MNIST, 64 clusters in 100 dimensions (there the
    mean squared distance).
    """
    from sklearn.cluster import KMeans as Plain

    from dpfy.estimators import KMeans

    columns, table, scaled = numbers(rows)
    found, lines = (
        {},
        ["| data | epsilon | dpfy: mean (worst) | CPU seconds |", "|---|---|---|---|"],
    )

    def add(data, epsilon, costs, seconds):
        found.setdefault(data, {})[str(epsilon)] = costs
        lines.append(
            f"| {data} | {epsilon:g} | {np.mean(costs):.4f} ({np.max(costs):.4f}) | "
            f"{_seconds(seconds and seconds / len(costs))} |"
        )
        print(lines[-1], file=sys.stderr)

    for k in (3, 8):
        best = Plain(k, n_init=10, random_state=0).fit(scaled).inertia_
        for epsilon in EPSILONS:
            start = time.process_time()
            made = [
                KMeans(n_clusters=k, schema=columns, epsilon=epsilon, delta=DELTA).fit(table)
                for _ in range(runs)
            ]
            spent = time.process_time() - start
            add(
                f"Adult, 5 numbers, k = {k}", epsilon, [-m.score(table) / best for m in made], spent
            )
        if diffprivlib:
            np.save(path := folder_for_peers() / "adult.npy", scaled)
            for epsilon, costs in asked_of(
                diffprivlib, "diffprivlib k-means", {"file": str(path), "k": k, "best": best}
            ).items():
                add(f"diffprivlib: Adult, k = {k}", float(epsilon), costs, None)
    images = mnist()
    best = Plain(10, n_init=3, random_state=0).fit(images).inertia_
    for epsilon in (0.5, 1.0, 4.0):
        start = time.process_time()
        made = [
            KMeans(n_clusters=10, bounds=(-1, 1), norm=1.0, epsilon=epsilon, delta=DELTA).fit(
                images
            )
            for _ in range(5)
        ]
        add(
            "MNIST, 40 components, k = 10",
            epsilon,
            [-m.score(images) / best for m in made],
            time.process_time() - start,
        )
    for seed in range(3):
        points = gaussians(100_000, 100, 64, seed)
        start = time.process_time()
        made = KMeans(n_clusters=64, bounds=(-1, 1), norm=1.0, epsilon=1.0, delta=DELTA).fit(points)
        add(
            f"64 clusters in 100 dimensions ({seed})",
            1.0,
            [-made.score(points) / len(points)],
            time.process_time() - start,
        )
    return found, lines


def diffprivlib_clusters(file, k, best):
    """diffprivlib's k-means on the same scaled points."""
    from diffprivlib.models import KMeans

    points = np.load(file)
    found = {}
    for epsilon in EPSILONS:
        made = [
            KMeans(k, epsilon=epsilon, bounds=(points.min(axis=0), points.max(axis=0))).fit(points)
            for _ in range(5)
        ]
        costs = [
            ((points[:, None] - m.cluster_centers_) ** 2).sum(axis=2).min(axis=1).sum() / best
            for m in made
        ]
        found[str(epsilon)] = [float(c) for c in costs]
    return found


PAIRS = (
    "AdditiveBoosting",
    "GradientBoosting",
    "RandomForest",
    "DecisionTree",
    "KMeans",
    "GaussianMixture",
)


def one_fit(name, ours, rows):
    """CPU seconds and the peak of memory (in MiB, less that of the data alone) of one fit on `rows`
    x 50; in a process of its own.
    """
    rng = np.random.default_rng(0)
    X = rng.random((rows, 50))
    y = (X[:, 0] + X[:, 1] * X[:, 2] + 0.3 * rng.normal(size=rows) > 0.8).astype(np.int64)
    made, given = (our_pair if ours else plain_pair)(name), (X,) if name in PAIRS[4:] else (X, y)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(*given)
    spent = time.process_time() - start
    whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": spent, "more": (whole - held) / 1024, "whole": whole / 1024}


def our_pair(name):
    """Our estimator, with its defaults."""
    from dpfy import estimators

    if name in PAIRS[4:]:
        return getattr(estimators, name)(bounds=(0, 1))
    return getattr(estimators, name + "Classifier")(bounds=(0, 1), classes=(0, 1))


def plain_pair(name):
    """That of scikit-learn at the same trees, clusters or components. Rounds of additive boosting
    are a tree for each column.
    """
    from sklearn import cluster, ensemble, mixture, tree

    own = our_pair(name)
    if name == "AdditiveBoosting":
        return ensemble.HistGradientBoostingClassifier(
            max_iter=own.rounds * 50, max_leaf_nodes=2, max_bins=255, early_stopping=False
        )
    if name == "GradientBoosting":
        leaves = 2**own.max_depth
        return ensemble.HistGradientBoostingClassifier(
            max_iter=own.n_estimators, max_leaf_nodes=leaves, early_stopping=False
        )
    if name == "RandomForest":
        return ensemble.RandomForestClassifier(own.n_estimators, max_depth=own.max_depth, n_jobs=1)
    if name == "DecisionTree":
        return tree.DecisionTreeClassifier(max_depth=own.max_depth)
    if name == "KMeans":
        return cluster.KMeans(own.n_clusters, n_init=1, random_state=0)
    return mixture.GaussianMixture(own.n_components, covariance_type="diag", random_state=0)


def speed(rows, names):
    """Each pair, one process after the other."""
    found, lines = (
        {},
        [
            "| on x 50 | CPU seconds | scikit-learn | ratio | memory, MiB | scikit-learn | ratio |",
            "|---|" + "---|" * 6,
        ],
    )
    for name in names:
        pair = []
        for side in ("ours", "plain"):
            command = [sys.executable, __file__, "--one", f"{name}:{side}:{rows}"]
            pair.append(
                json.loads(
                    subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True).stdout
                )
            )
        one, other = pair
        ratios = one["seconds"] / other["seconds"], one["whole"] / other["whole"]
        lines.append(
            f"| {name}, {rows:,} rows | {one['seconds']:.2f} | {other['seconds']:.2f} | "
            f"{ratios[0]:.2f} | {one['whole']:.0f} |"
            f" {other['whole']:.0f} | {ratios[1]:.2f} |"
        )
        print(lines[-1], file=sys.stderr)
        found[name] = {"ours": one, "scikit-learn": other}
    return found, lines


def folder():
    """Where the data are."""
    return Path(os.environ["DPFY_DATA"])


def folder_for_peers():
    """Where points lie that a peer reads."""
    import tempfile

    return Path(tempfile.mkdtemp(prefix="dpfy-peers-"))


def worker(name, more):
    """A peer, in its own environment."""
    warnings.simplefilter("ignore")
    rows = table(folder() / "adult" / "adult.csv.gz")
    work = {"DP-EBM": ebm_fits, "diffprivlib": diffprivlib_fits}
    return (
        diffprivlib_clusters(**more)
        if name == "diffprivlib k-means"
        else work[name](rows, EPSILONS)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("auroc", "clusters", "speed"))
    parser.add_argument("--interpret", help="Python of an environment with interpret-core")
    parser.add_argument("--diffprivlib", help="Python of an environment with diffprivlib")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument(
        "--runs", type=int, default=10, help="fits of k-means on Adult for each epsilon"
    )
    parser.add_argument("--only", nargs="+", choices=PAIRS, default=PAIRS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--more", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(options.worker, json.loads(options.more))))
        return
    if options.one:
        name, side, rows = options.one.split(":")
        print(json.dumps(one_fit(name, side == "ours", int(rows))))
        return
    if options.what == "speed":
        found, lines = speed(options.rows, options.only)
    elif options.what in ("auroc", "clusters"):
        rows = table(folder() / "adult" / "adult.csv.gz")
        found, lines = (
            rank(rows, options.interpret, options.diffprivlib)
            if options.what == "auroc"
            else clusters(rows, options.diffprivlib, options.runs)
        )
    else:
        parser.error("say auroc, clusters or speed")
    print("\n".join(lines))
    if options.out:
        (options.out / f"estimators-{options.what}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
