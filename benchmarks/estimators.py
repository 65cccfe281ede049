"""Processor seconds and memory of private linear models, naive Bayes and components, beside those
of scikit-learn on the same records.

    python benchmarks/estimators.py [--records 1000000] [--columns 50] [--only LogisticRegression
    ...] [--out docs/benchmarks]

Every fit runs in a process of its own, on one thread: seconds are those of `fit` alone, memory is
the peak of the process, with the table and the imports in it. With DPFY_DATA the Adult data is
fitted too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

CLASSES, NUMBERS = "classes", "numbers"
CASES: dict[str, tuple[str, str, dict[str, Any], str, str, dict[str, Any]]] = {
    "LogisticRegression": (
        CLASSES,
        "LogisticRegression",
        {},
        "sklearn.linear_model",
        "LogisticRegression",
        {},
    ),
    "LinearSVC": (CLASSES, "LinearSVC", {}, "sklearn.svm", "LinearSVC", {}),
    "LinearRegression": (
        NUMBERS,
        "LinearRegression",
        {},
        "sklearn.linear_model",
        "LinearRegression",
        {},
    ),
    "LinearRegression, statistics": (
        NUMBERS,
        "LinearRegression",
        {"solver": "statistics"},
        "sklearn.linear_model",
        "LinearRegression",
        {},
    ),
    "Ridge": (NUMBERS, "Ridge", {}, "sklearn.linear_model", "Ridge", {}),
    "PoissonRegressor": (
        NUMBERS,
        "PoissonRegressor",
        {},
        "sklearn.linear_model",
        "PoissonRegressor",
        {},
    ),
    "NaiveBayes": (CLASSES, "NaiveBayes", {}, "sklearn.naive_bayes", "GaussianNB", {}),
    "PCA": (CLASSES, "PCA", {}, "sklearn.decomposition", "PCA", {}),
}
"""What is predicted, our estimator with its settings, and its counterpart."""
ADULT = ("LogisticRegression", "LinearSVC", "NaiveBayes")
MOST_SECONDS, MOST_MEMORY, MOST_ADULT = 3.0, 2.0, 0.3
"""Ratios, and seconds on Adult, that were asked for."""


def table(records: int, columns: int, kind: str) -> tuple[Any, Any]:
    """Records with numbers between -1 and 1; the target follows from them."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (records, columns))
    score = X @ np.linspace(-1, 1, columns) + rng.normal(size=records)
    return X, (score > 0).astype(np.int64) if kind == CLASSES else np.clip(score + 10, 0, 20)


def made(case: str, ours: bool) -> Any:
    """The estimator of a case, ours or theirs."""
    kind, name, settings, module, other, more = CASES[case]
    if not ours:
        return getattr(__import__(module, fromlist=[other]), other)(**more)
    import dpfy.estimators

    public: dict[str, Any] = {"classes": [0, 1]} if kind == CLASSES else {"target_bounds": (0, 20)}
    return getattr(dpfy.estimators, name)(
        bounds=(-1, 1), **({} if name == "PCA" else public), **settings
    )


def one(case: str, ours: bool, records: int, columns: int) -> dict[str, float]:
    """A fit in this process: its processor seconds, and the peak of memory."""
    X, y = table(records, columns, CASES[case][0])
    estimator = made(case, ours)
    if ours:  # what is loaded when it is first used is no part of a fit
        made(case, True).fit(X[:100], y[:100])
    started = time.process_time()
    estimator.fit(X, y)
    return {
        "seconds": time.process_time() - started,
        "mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def apart(case: str, ours: bool, records: int, columns: int) -> dict[str, float]:
    """The same in a process of its own, on one thread."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    asked = [
        "--one",
        case,
        "ours" if ours else "theirs",
        "--records",
        str(records),
        "--columns",
        str(columns),
    ]
    said = subprocess.run(
        [sys.executable, __file__, *asked],
        env=os.environ | threads,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def adult() -> list[dict[str, Any]]:
    """Seconds of a fit on Adult, the median of five after a first one."""
    import pandas

    import dpfy.estimators
    from dpfy.core.files import DataFolder

    path = DataFolder.find(None).file("adult", "adult.csv.gz", "adult.csv").path
    whole = pandas.read_csv(path)
    X, y = whole.drop(columns="income"), whole["income"]
    rows = []
    for name in ADULT:
        spent = []
        for _ in range(6):
            started = time.process_time()
            getattr(dpfy.estimators, name)(schema="adult").fit(X, y)
            spent.append(time.process_time() - started)
        seconds = float(np.median(spent[1:]))
        rows.append({"estimator": name, "seconds": seconds, "holds": seconds <= MOST_ADULT})
    return rows


def compared(case: str, records: int, columns: int) -> dict[str, Any]:
    """Both, and their ratios."""
    ours, theirs = (apart(case, who, records, columns) for who in (True, False))
    ratios = {key: ours[key] / theirs[key] for key in ours}
    holds = ratios["seconds"] <= MOST_SECONDS and ratios["mebibytes"] <= MOST_MEMORY
    return {
        "estimator": case,
        "counterpart": CASES[case][4],
        "ours": ours,
        "theirs": theirs,
        "ratios": ratios,
        "holds": holds,
    }


def line(row: dict[str, Any]) -> str:
    """A row in print."""
    (ours, theirs), ratios = (row["ours"], row["theirs"]), row["ratios"]
    seconds = f"{ours['seconds']:8.2f} s {theirs['seconds']:8.2f} s {ratios['seconds']:6.2f}"
    memory = (
        f"{ours['mebibytes']:8.0f} MiB {theirs['mebibytes']:6.0f} MiB {ratios['mebibytes']:6.2f}"
    )
    return (
        f"{row['estimator']:<30}{seconds}{memory}   {'holds' if row['holds'] else 'DOES NOT HOLD'}"
    )


def main() -> None:
    """All cases, or those asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=50)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--one", nargs=2, metavar=("CASE", "WHO"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder for estimators.json")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.one[0], given.one[1] == "ours", given.records, given.columns)))
        return
    rows = []
    for case in given.only:
        rows.append(compared(case, given.records, given.columns))
        print(line(rows[-1]), flush=True)
    told: dict[str, Any] = {"records": given.records, "columns": given.columns, "rows": rows}
    if os.environ.get("DPFY_DATA"):
        told["adult"] = adult()
        for row in told["adult"]:
            print(
                f"Adult, {row['estimator']:<23}{row['seconds']:8.3f} s   "
                f"{'holds' if row['holds'] else 'DOES NOT HOLD'}"
            )
    if given.out:
        (given.out / "estimators.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
