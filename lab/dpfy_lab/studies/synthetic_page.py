"""The page of the study `synthetic`."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

from dpfy_lab.studies.page import Page, Section, Table
from dpfy_lab.studies.study import Results, Stored

MBI_MST = {1.0: 0.2247, 3.16: 0.2114, 10.0: 0.2003}
"""Marginals of three columns by mbi's MST (its repository of July 2026), one run each: measured on
the same records.
"""


def page(results: Results) -> Page:
    """Errors of marginals, then learners."""
    runs = grouped(results)
    facts = {
        "seeds": "seeds from 0 on, of noise and rows, fixed so that the page can be made again",
        "runs and spread": "mean and standard deviation over the runs",
        "accountant": "tight, with a filter for what is chosen adaptively; every run is verified",
        "unit": "one record",
        "adjacency": "one record added or removed",
        "hyperparameters": "the defaults of the package, the same at every epsilon; on which "
        "records they were chosen is not recorded: "
        "it may have been these. The settings of dp-gan and pate-gan were tried on these records, "
        "two and five of them. The choice is not "
        "charged in epsilon",
    }
    return Page([_errors(runs), _learners(runs)], facts)


def grouped(results: Results) -> dict[tuple[str, float], list[Stored]]:
    """The runs by method and epsilon."""
    found: dict[tuple[str, float], list[Stored]] = {}
    for cell in results.starting("run-"):
        found.setdefault((cell.settings["method"], cell.settings["epsilon"]), []).append(cell)
    return found


def means(runs: dict[tuple[str, float], list[Stored]], key: str) -> dict[tuple[str, float], float]:
    """The mean of a figure by method and epsilon."""
    return {name: mean(cell.result[key] for cell in cells) for name, cells in runs.items()}


def _errors(runs: dict[tuple[str, float], list[Stored]]) -> Section:
    rows: list[list[Any]] = []
    for (method, epsilon), cells in runs.items():
        three = [cell.result["mean_l1_3"] for cell in cells]
        rows.append([method, epsilon, mean(cell.result["mean_l1_2"] for cell in cells), mean(three),
                     stdev(three) if len(three) > 1 else None, len(cells), MBI_MST.get(epsilon) if method == "mst" else None,  # noqa: E501
                     mean(cell.result["synthesis_cpu_seconds"] for cell in cells)])  # fmt: skip
    columns = (
        "method",
        "epsilon",
        "pairs",
        "triples",
        "deviation",
        "runs",
        "mbi's triples",
        "CPU seconds",
    )
    words = (
        "The mean L1 distance between the shares of the synthetic table and those of the records, "
        "over all pairs and all triples."
    )
    return Section(
        "Marginals", words, [Table("errors", "Mean L1 distance of marginals", columns, rows)]
    )


def _learners(runs: dict[tuple[str, float], list[Stored]]) -> Section:
    rows: list[list[Any]] = []
    for (method, epsilon), cells in runs.items():
        scores = [cell.result["learner"] for cell in cells if "learner" in cell.result]
        if scores:
            found = [
                100 * mean(score["accuracy"] for score in scores),
                mean(score["auroc"] for score in scores),
            ]
            rows.append(
                [method, epsilon, *found, min(score["auroc"] for score in scores), len(scores)]
            )
    rows.sort(key=lambda row: (row[1], -row[3]))
    words = (
        "Gradient boosting trained on the synthetic rows alone, tested on the records: does a "
        "person earn more than 50,000? dp-gan and "
        "pate-gan train networks: a discriminator by DP-SGD, and a student of noisy votes."
    )
    columns = ("method", "epsilon", "accuracy %", "AUROC", "worst", "runs")
    return Section(
        "Learners",
        words,
        [Table("learners", "Trained on synthetic rows, tested on real ones", columns, rows)],
    )
