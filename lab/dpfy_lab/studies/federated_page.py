"""The page of the study `federated`."""

from __future__ import annotations

from typing import Any

from dpfy_lab.studies import figures
from dpfy_lab.studies.figures import Axes, Line
from dpfy_lab.studies.page import Figure, Page, Section, Table, spread
from dpfy_lab.studies.study import Results, Stored

FIXED = "fedavg-"
NOT_FIXED = ("fedavg-adaptive", "fedavg-unamplified")


def page(results: Results) -> Page:
    """Accuracies of all rows, then the four claims."""
    runs = grouped(results)
    seeds = ", ".join(map(str, sorted({c.settings["seed"] for c in results.values()})))
    facts = {
        "seeds": f"seeds {seeds} of weights, noise, cohorts and minibatches, fixed so that the "
        f"page can be made again",
        "runs and spread": "mean and standard deviation over the seeds, in points",
        "accountant": "tight; every run is verified",
        "unit": "one user: a writer with all of their images",
        "adjacency": "sampled cohorts: one user added or removed; check-ins: the contributions of "
        "one user zeroed out",
        "hyperparameters": "local rate, clip norms and server rates were chosen with other seeds "
        "on 90 of the 539 writers, held apart, "
        "trained on the other 449; the test images were used once a row. The choice is not charged "
        "in epsilon",
    }
    return Page([_rows(runs), _claims(runs)], facts)


def grouped(results: Results) -> dict[str, list[Stored]]:
    """The runs by row."""
    found: dict[str, list[Stored]] = {}
    for cell in results.starting("run-"):
        found.setdefault(cell.name.removeprefix("run-").rpartition("-")[0], []).append(cell)
    return found


def means(runs: dict[str, list[Stored]]) -> dict[str, float]:
    """Mean accuracy of each row, in points."""
    return {
        name: 100 * sum(c.result["test_accuracy"] for c in cells) / len(cells)
        for name, cells in runs.items()
    }


def claims(runs: dict[str, list[Stored]]) -> list[list[Any]]:
    """What was to be shown: a name, the margin in points, how it must be, and whether it is."""
    mean = means(runs)
    fixed = {
        name: value
        for name, value in mean.items()
        if name.startswith(FIXED) and name not in NOT_FIXED
    }
    best = max(fixed.values())
    rows = [
        ("DP-FedAvg over DP-FedSGD", best - mean["fedsgd"], 0),
        ("adaptive clipping over the best fixed clip", mean["fedavg-adaptive"] - best, -1),
        ("DP-FTRL over DP-FedAvg with amplification", mean["dpftrl"] - best, -2),
        (
            "DP-FTRL over DP-FedAvg without amplification",
            mean["dpftrl"] - mean["fedavg-unamplified"],
            0,
        ),
    ]
    return [
        [what, margin, f"above {least}", "yes" if margin > least else "no"]
        for what, margin, least in rows
    ]


def _rows(runs: dict[str, list[Stored]]) -> Section:
    table: list[list[Any]] = []
    for name, cells in runs.items():
        first, score = cells[0], spread([c.result["test_accuracy"] for c in cells])
        row, done = first.settings["row"], first.result
        table.append([name, row["gathered"], row["clip"], row["rate"], done["noise_multiplier"], done["noise_on_mean"],
                      max(c.result["epsilon"] for c in cells), score["mean"], score["deviation"], score["worst"], score["runs"],  # noqa: E501
                      sum(c.result["training_seconds"] for c in cells) / len(cells)])  # fmt: skip
    columns = ("row", "clients are", "clip", "server "
                                             "rate", "noise "
                                                     "multiplier", "noise on the mean", "epsilon", "mean %", "deviation",  # noqa: E501
               "worst", "runs", "seconds a run")  # fmt: skip
    first = next(iter(runs.values()))[0]
    done = first.result
    words = (
        f"{done['clients']} users, {done['cohort']:.4g} expected in each of "
        f"{first.settings['rounds']} rounds. A user takes 10 "
        "steps on 20 of its images (fedsgd: adds up 10 such gradients without moving). Images are "
        "14 x 14, the model has one hidden "
        f"layer of 32. Check-ins come in an order that nobody drew, each user at most every "
        f"{first.settings['separation']} rounds."
    )
    fixed = [row for row in table if row[0].startswith(FIXED) and row[0] not in NOT_FIXED]
    line = Line(
        "fixed clip",
        [row[2] for row in fixed],
        [row[7] for row in fixed],
        "o-",
        [row[8] or 0.0 for row in fixed],
    )
    picture = Figure(
        "clips",
        "Accuracy by fixed clip norm",
        figures.lines([line], Axes("clip norm", "accuracy, %")),
    )
    return Section(
        "Results",
        words,
        [
            Table("results", "Accuracy on images of writers that took no part", columns, table),
            picture,
        ],
    )


def _claims(runs: dict[str, list[Stored]]) -> Section:
    wanted = {"fedsgd", "fedavg-adaptive", "dpftrl", "fedavg-unamplified"}
    rows = claims(runs) if wanted <= runs.keys() and len(runs) > len(wanted) else []
    columns = ("claim", "points", "must be", "holds")
    words = (
        "Differences of means. DP-FedAvg is its best fixed clip norm, by the same test accuracy, "
        "which favours it."
    )
    return Section(
        "What was to be shown", words, [Table("claims", "Margins in points", columns, rows)]
    )
