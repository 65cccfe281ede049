"""Synthetic tables of UCI Adult: how far their marginals are from the records, and what learners
that see nothing else can do.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import dpfy
from dpfy.core.errors import Internal
from dpfy.core.files import DataFolder
from dpfy.runs.run import Run
from dpfy.synthetic.counts import encoded
from dpfy.synthetic.domain import Domain
from dpfy.synthetic.evaluate import learner_scores, marginal_errors
from dpfy.synthetic.methods import METHODS
from dpfy.synthetic.plan import LAB, SynthesisOptions, SynthesisTerms
from dpfy.synthetic.run import synthesize_table
from dpfy_lab.studies.study import Cell, Options, Study
from dpfy_lab.studies.synthetic_page import page

DELTA = 1e-9
NETWORKS = ("dp-gan", "pate-gan")
ALL = (*METHODS, *LAB)
RUNS = {
    ("aim", 1.0): 5,
    ("aim", 3.16): 1,
    ("aim", 10.0): 2,
    ("mst", 1.0): 5,
    ("mst", 3.16): 5,
    ("mst", 10.0): 5,
    ("privbayes", 1.0): 1,
    ("privbayes", 3.16): 1,
    ("privbayes", 10.0): 1,
    ("mwem", 1.0): 1,
    ("mwem", 3.16): 1,
    ("mwem", 10.0): 1,
    ("independent", 1.0): 1,
    ("dp-gan", 1.0): 1,
    ("dp-gan", 10.0): 1,
    ("pate-gan", 1.0): 1,
    ("pate-gan", 10.0): 1,
}
"""How many runs of each method there are at each epsilon."""
LEARNER, LEARNT = "gradient boosting", (1.0, 10.0)
"""The learner, and at which epsilon it is trained: on every run of AIM, and on the first run of
each other method.
"""
TARGET = "income>50K"


def cells(options: Options) -> list[Cell]:
    """A run for each method, epsilon and seed."""
    found = []
    for (method, epsilon), runs in (
        dict.fromkeys(((m, 1.0) for m in ALL), 1) if options.fast else RUNS
    ).items():
        for seed in range(runs):
            settings = {
                "method": method,
                "epsilon": epsilon,
                "delta": DELTA,
                "seed": seed,
                "fast": options.fast,
            }
            settings["learner"] = (
                LEARNER if epsilon in LEARNT and (seed == 0 or method == "aim") else None
            )
            found.append(
                Cell(
                    f"run-{method}-{epsilon:g}-{seed}",
                    settings,
                    functools.partial(run_one, settings, options),
                )
            )
    return found


def run_one(settings: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """A verified synthesis, then its distance from the records, which are public here."""
    domain, records = table(options)
    terms, how = _asked(settings, len(records[TARGET]))
    started = time.process_time()
    with tempfile.TemporaryDirectory() as place:
        run = Run(Path(place) / "run", seed=settings["seed"])
        made = synthesize_table(records, schema=domain, terms=terms, run=run, options=how)
        seconds = time.process_time() - started
        wrong = [finding for finding in dpfy.verify(made.run) if not finding.holds]
        if wrong:
            raise Internal("the synthesis verifies", f"{wrong[0].what}: {wrong[0].detail}")
        rows = _coded(str(made.table), domain)
    held = _coded(records, domain)
    found = {f"mean_l1_{k}": marginal_errors(domain, held, rows, k)["mean_l1"] for k in (2, 3)}
    if settings["learner"] is not None:
        found["learner"] = learner_scores(domain, settings["learner"], rows, held, _target(domain))
    stated = made.report["guarantee"]
    return found | {
        "synthesis_cpu_seconds": seconds,
        "rows": len(rows),
        "measured": made.facts["measured"],
        "epsilon": stated["epsilon"],
        "accountant": stated["accountant"],
        "adjacency": stated["adjacency"],
    }


def _asked(settings: Mapping[str, Any], records: int) -> tuple[SynthesisTerms, SynthesisOptions]:
    """What a run is given; networks are told how many records there are, or how many rows to
    make.
    """
    method = settings["method"]
    terms = SynthesisTerms(
        settings["epsilon"], settings["delta"], records=records if method == "dp-gan" else None
    )
    return terms, SynthesisOptions(method, rows=records if method == "pate-gan" else None)


def _coded(data: Any, domain: Domain) -> Any:
    return np.concatenate(list(encoded(data, domain)), axis=1).T


def _target(domain: Domain) -> int:
    return domain.number("target", TARGET)


@functools.lru_cache(maxsize=1)
def table(options: Options) -> tuple[Domain, dict[str, list[int]]]:
    """Domain and records: all of Adult in the cells of McKenna et al., or in the short form 2,000
    made-up records of four columns.
    """
    if options.fast:
        rng = np.random.default_rng(0)
        age, job = rng.integers(0, 8, 2000), rng.integers(0, 5, 2000)
        rich = (age + job + rng.integers(0, 4, 2000) > 8).astype(np.int64)
        made = {"age": age, "job": job, "sex": rng.integers(0, 2, 2000), TARGET: rich}
        return Domain.of({"age": 8, "job": 5, "sex": 2, TARGET: 2}), {
            name: column.tolist() for name, column in made.items()
        }
    folder = DataFolder.find(options.data_dir)
    sizes = json.loads(folder.file("adult-discrete", "adult-domain.json").text())
    rows = list(
        csv.reader(io.StringIO(folder.file("adult-discrete", "adult.csv.gz", "adult.csv").text()))
    )
    columns = {name: [int(row[k]) for row in rows[1:]] for k, name in enumerate(rows[0])}
    return Domain.of(sizes), {name: columns[name] for name in sizes}


STUDY = Study(
    "synthetic",
    "Synthetic tables of UCI Adult",
    "48,842 records of 14 columns in the cells of McKenna et al. 2022 (AIM), delta 1e-9, one "
    "record added or removed; error is the mean "
    "over all marginals of the L1 distance between shares. That marginals serve learners better "
    "than networks do: Tao et al. 2021.",
    cells,
    page,
)
