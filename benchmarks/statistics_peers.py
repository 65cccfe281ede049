"""Errors of private statistics on UCI Adult, beside OpenDP, Google's library (PyDP) and diffprivlib
at the same epsilon.

    DPFY_DATA=... python benchmarks/statistics_peers.py --peers VENV/bin/python [--runs 100] [--out
    docs/benchmarks]

The peers live in an environment of their own (pip install opendp==0.16.0 python-dp==1.1.5
diffprivlib==0.6.6 scikit-learn==1.7.2); this file is run there as a worker, with the columns on
standard input. All are pure: delta 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np

EPSILONS = (0.1, 1.0)
RANGES = {"age": (0, 125), "hours": (0, 168)}
BINS = 5
SECONDS = 8
"""Processor time for one figure."""
QUANTILES = {
    "median(age)": ("age", 0.5),
    "quantile(age, 0.9)": ("age", 0.9),
    "median(hours)": ("hours", 0.5),
    "quantile(hours, 0.9)": ("hours", 0.9),
}
PUBLIC = ("mean(age), n public", "variance(age), n public")
ASKED = (
    "count() where income = '>50K'",
    "sum(age)",
    "mean(age)",
    *PUBLIC,
    "variance(age)",
    f"histogram(age, bins={BINS})",
    *QUANTILES,
)


def truth(data):
    """What is true, by statistic."""
    age = data["age"]
    due = {
        ASKED[0]: float(data["rich"].sum()),
        "sum(age)": age.sum(),
        "mean(age)": age.mean(),
        "variance(age)": age.var(),
        f"histogram(age, bins={BINS})": np.histogram(age, bins=BINS, range=RANGES["age"])[0],
    }
    due |= {"mean(age), n public": age.mean(), "variance(age), n public": age.var()}
    return due | {
        name: float(np.quantile(data[c], q, method="inverted_cdf"))
        for name, (c, q) in QUANTILES.items()
    }


def opendp(data, epsilon):
    """OpenDP's chains, calibrated by its own search."""
    import opendp.prelude as dp

    dp.enable_features("contrib", "honest-but-curious")
    low, high = map(float, RANGES["age"])
    age, n = data["age"], len(data["age"])
    floats = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.symmetric_distance()
    words = dp.vector_domain(dp.atom_domain(T=str)), dp.symmetric_distance()
    whole = dp.vector_domain(dp.atom_domain(T=int)), dp.symmetric_distance()
    sized = dp.vector_domain(dp.atom_domain(bounds=(low, high)), size=n), dp.symmetric_distance()

    def chain(make, distance=1):
        return dp.binary_search_chain(make, distance, epsilon)

    rich = age[data["rich"]].tolist()
    count = chain(lambda s: floats >> dp.t.then_count() >> dp.m.then_laplace(s))
    total = chain(
        lambda s: floats >> dp.t.then_clamp((low, high)) >> dp.t.then_sum() >> dp.m.then_laplace(s)
    )
    mean = chain(lambda s: sized >> dp.t.then_mean() >> dp.m.then_laplace(s), 2)
    variance = chain(lambda s: sized >> dp.t.then_variance(ddof=0) >> dp.m.then_laplace(s), 2)
    keys = [str(k) for k in range(BINS)]
    bins = [str(k) for k in np.minimum((age - low) * BINS // (high - low), BINS - 1).astype(int)]
    table = chain(lambda s: words >> dp.t.then_count_by_categories(keys) >> dp.m.then_laplace(s))
    half = [
        dp.binary_search_chain(lambda s, c=c: floats >> c >> dp.m.then_laplace(s), 1, epsilon / 2)
        for c in (dp.t.then_count(),)
    ]
    halved = dp.binary_search_chain(
        lambda s: floats >> dp.t.then_clamp((low, high)) >> dp.t.then_sum() >> dp.m.then_laplace(s),
        1,
        epsilon / 2,
    )
    ages = age.tolist()
    made = {
        ASKED[0]: lambda: count(rich),
        "sum(age)": lambda: total(ages),
        "mean(age)": lambda: halved(ages) / max(half[0](ages), 1),
        "mean(age), n public": lambda: mean(ages),
        "variance(age), n public": lambda: variance(ages),
        f"histogram(age, bins={BINS})": lambda: table(bins)[:BINS],
    }
    for name, (column, q) in QUANTILES.items():
        values = list(range(RANGES[column][0], RANGES[column][1] + 1))
        scores = whole >> dp.t.then_quantile_score_candidates(values, alpha=q)
        pick = chain(
            lambda s, scores=scores: (
                scores >> dp.m.then_noisy_max(dp.max_divergence(), s, negate=True)
            )
        )
        cells = data[column].astype(int).tolist()
        made[name] = lambda pick=pick, cells=cells, values=values: values[pick(cells)]
    return made


def pydp(data, epsilon):
    """Google's algorithms through PyDP."""
    from pydp.algorithms.laplacian import (
        BoundedMean,
        BoundedSum,
        BoundedVariance,
        Count,
        Percentile,
    )

    def asked(kind, cells, column="age", **more):
        low, high = RANGES[column]
        return lambda: kind(
            epsilon=epsilon, lower_bound=low, upper_bound=high, dtype="float", **more
        ).quick_result(cells)

    age, rich = data["age"].tolist(), data["age"][data["rich"]].tolist()
    made = {
        ASKED[0]: lambda: Count(epsilon=epsilon, dtype="float").quick_result(rich),
        "sum(age)": asked(BoundedSum, age),
        "mean(age)": asked(BoundedMean, age),
        "variance(age)": asked(BoundedVariance, age),
    }
    for name, (column, q) in QUANTILES.items():
        made[name] = asked(Percentile, data[column].tolist(), column, percentile=q)
    return made


def diffprivlib(data, epsilon):
    """diffprivlib's tools: the number of records is public to all of them."""
    import diffprivlib.tools as tools

    age, low_high = data["age"], RANGES["age"]
    made = {
        ASKED[0]: lambda: tools.count_nonzero(data["rich"], epsilon=epsilon),
        "sum(age)": lambda: tools.sum(age, epsilon=epsilon, bounds=low_high),
        "mean(age), n public": lambda: tools.mean(age, epsilon=epsilon, bounds=low_high),
        "variance(age), n public": lambda: tools.var(age, epsilon=epsilon, bounds=low_high),
        f"histogram(age, bins={BINS})": lambda: tools.histogram(
            age, epsilon=epsilon, bins=BINS, range=low_high
        )[0],
    }
    for name, (column, q) in QUANTILES.items():
        cells, bounds = data[column], RANGES[column]
        made[name] = lambda cells=cells, bounds=bounds, q=q: tools.quantile(
            cells, q, epsilon=epsilon, bounds=bounds
        )
    return made


def ours(data, epsilon):
    """dpfy's statistics, as a query of one of them plans it."""
    from dpfy.core.values import mock_permit
    from dpfy.queries.plan import QueryTerms, plan
    from dpfy.statistics.statistic import Spend
    from dpfy.tables.columns import Category, Number
    from dpfy.tables.schema import Schema
    from dpfy.tables.table import PrivateTable

    columns = Schema.of(
        {c: Number(c, *map(float, r)) for c, r in RANGES.items()}
        | {"income": Category("income", ("<=50K", ">50K"))}
    )
    cells = {c: data[c] for c in RANGES} | {"income": np.where(data["rich"], ">50K", "<=50K")}

    def asked(name):
        public = name.endswith(", n public")
        terms = QueryTerms(epsilon, records=len(data["age"]) if public else None)
        made = plan(name.removesuffix(", n public"), columns, terms)
        (statistic,), (claim,) = made.statistics, made.claims
        table = PrivateTable(cells, columns.columns)

        def run():
            permit = mock_permit(claim.event, claim.releases, adjacency=claim.adjacency)
            found = [
                a.value for a in statistic.release(table, Spend(claim, terms.contribution, permit))
            ]
            return found if len(found) > 1 else found[0]

        return run

    return {name: asked(name) for name in ASKED}


PEERS = {"OpenDP": opendp, "PyDP": pydp, "diffprivlib": diffprivlib, "dpfy": ours}


def measured(name, data, runs):
    """statistic -> epsilon -> [mean absolute error, its standard error, share of failures,
    milliseconds, runs], by one library.
    """
    warnings.simplefilter("ignore")
    due, found = truth(data), {}
    for epsilon in EPSILONS:
        for statistic, run in PEERS[name](data, epsilon).items():
            errors, failed, made = [], 0, 0
            start = time.process_time()
            while made < 20 or (made < runs and time.process_time() - start < SECONDS):
                made += 1
                try:
                    errors.append(np.abs(np.asarray(run(), float) - due[statistic]).mean())
                except Exception:
                    failed += 1
            spent = (time.process_time() - start) / made * 1e3
            error = float(np.mean(errors)) if errors else None
            chance = float(np.std(errors) / np.sqrt(len(errors))) if errors else None
            found.setdefault(statistic, {})[str(epsilon)] = [
                error,
                chance,
                failed / made,
                spent,
                made,
            ]
            print(name, statistic, epsilon, error, f"{spent:.1f} ms", failed or "", file=sys.stderr)
    return found


def adult():
    """Age, hours a week, and whether the income is above 50K."""
    from dpfy.core.files import DataFolder
    from dpfy.tables.sources import read_table

    cells = read_table(DataFolder.find(None).file("adult", "adult.csv.gz", "adult.csv"))
    return {
        "age": cells["age"],
        "hours": cells["hr_per_week"],
        "rich": [c == ">50K" for c in cells["income"]],
    }


def arrays(cells):
    """Columns as arrays."""
    return {
        "age": np.array(cells["age"], float),
        "hours": np.array(cells["hours"], float),
        "rich": np.array(cells["rich"], bool),
    }


def table(found):
    """The figures as Markdown."""
    lines = [
        "| statistic | epsilon | " + " | ".join(PEERS) + " |",
        "|---|---|" + "---|" * len(PEERS),
    ]
    for statistic in ASKED:
        for epsilon in map(str, EPSILONS):
            row = []
            for name in PEERS:
                held = found[name].get(statistic, {}).get(epsilon)
                error = (
                    ""
                    if held is None or held[0] is None
                    else f"{held[0]:.3g}" + (f" ± {held[1]:.1g}" if held[1] else "")
                )
                text = "-" if held is None else error or "fails"
                row.append(
                    text
                    + (
                        f" ({held[2]:.0%} of the runs fail)"
                        if held and held[0] is not None and held[2]
                        else ""
                    )
                )
            lines.append(f"| {statistic} | {epsilon} | {' | '.join(row)} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", help="Python of an environment with the peers")
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", choices=[n for n in PEERS if n != "dpfy"])
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measured(options.worker, arrays(json.load(sys.stdin)), options.runs)))
        return
    cells = adult()
    found = {"dpfy": measured("dpfy", arrays(cells), options.runs)}
    alone = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    for name in PEERS:
        if name != "dpfy":
            command = [options.peers, __file__, "--worker", name, "--runs", str(options.runs)]
            answer = subprocess.run(
                command,
                input=json.dumps(cells),
                text=True,
                stdout=subprocess.PIPE,
                check=True,
                env=alone,
            )
            found[name] = json.loads(answer.stdout)
    lines = table(found)
    print("\n".join(lines))
    if options.out:
        (options.out / "statistics.json").write_text(
            json.dumps({"runs": options.runs, "found": found}, indent=1)
        )
        head = [
            "# Errors of private statistics beside three libraries",
            "",
            f"Mean absolute error over up to {options.runs} runs, with what chance leaves open "
            f"(one standard error), on UCI Adult (30,162",
            "records), delta 0, public ranges: age 0 to 125, hours 0 to 168. OpenDP 0.16.0, PyDP "
            "1.1.5, diffprivlib 0.6.6. `n public`: the",
            "number of records is taken for public, and one record is replaced. The table is "
            "written by `benchmarks/statistics_peers.py`.",
            "Where all use the same noise (counts, sums, means with n public) the figures differ "
            "by chance alone.",
            "",
        ]
        (options.out / "statistics.md").write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()
