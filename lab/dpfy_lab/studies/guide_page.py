"""The page of the study `guide`."""

from __future__ import annotations

from statistics import mean, stdev

from dpfy_lab.studies import figures
from dpfy_lab.studies.figures import Axes, Line
from dpfy_lab.studies.page import Figure, Page, Section, Table
from dpfy_lab.studies.study import Results, Stored

PRINTED: dict[str, float] = {
    "rdp one epoch": 1.2,
    "rdp 100 epochs": 4.95,
    "pld one epoch": 0.59,
    "pld 100 epochs": 4.62,
    "exponential mechanism": 3.24,
    "gamma, eta 0": 0.00154212,
    "eta 0, mean 100": 2.42,
    "P[K = 1], eta 0": 0.154,
    "P[K < 50], eta 0": 0.6,
    "eta 1, mean 100": 2.76,
    "eta 1, mean 1000": 3.45,
    "P[K < 50], eta 1, mean 100": 0.39,
    "P[K < 100], eta 1, mean 1000": 0.094,
    "poisson, rdp": 4.18,
    "poisson, pld": 2.63,
}
"""As printed in appendix C and footnote 19."""

REMARKS = {
    "exponential mechanism": "the choice alone: the guide's price for the whole search (C.3) is no "
    "bound",
    "pld 100 epochs": "the printed value is that of a coarser grid",
    "P[K < 50], eta 0": "the printed probability does not follow from the printed gamma",
    "poisson, rdp": "with log(1 + 1/(lambda - 1)), as the theorem has it; the printed form lacks "
    "the logarithm",
    "poisson, pld": "the printed value is that of an upper bound by privacy buckets; ours is from "
    "the exact curve",
}


def page(results: Results) -> Page:
    """All figures of the guide that can be computed, and the table."""
    private = results.starting("figure2-private-")
    seeds = sorted({cell.settings["seed"] for cell in private})
    squares = f"{len(seeds)} runs a square with noise in Figure 2, as mean and standard deviation" if len(seeds) > 1 else (  # noqa: E501
        "one run a square in Figure 2, so no spread is given there"
    )  # fmt: skip
    facts = {
        "seeds": f"noise seeds {', '.join(map(str, seeds))} in Figure 2, fixed; the rest is "
        f"computed, not drawn",
        "runs and spread": f"{squares}; without noise nothing is drawn, and there is one",
        "accountant": "RDP as in the guide, and tight (certified upper bound) beside it",
        "unit": "one example",
        "adjacency": "one example added or removed",
        "hyperparameters": "printed, except delta in Figure 1 (records to the power -1.1, not "
        "given there) and all of Figure 2, "
        "which is the same experiment on the embedded images with a linear model and a fixed "
        "number of steps",
    }
    return Page(
        [_figure_1(results), _figure_2(results, private), _figure_3(results), _appendix(results)],
        facts,
    )


def _figure_1(results: Results) -> Section:
    curves, rows = [], []
    for cell in results.starting("figure1-"):
        epsilon = cell.settings["epsilon"]
        found = cell.result["rows"]
        batches = [row["batch"] for row in found]
        curves.append(
            Line(
                f"epsilon {epsilon:g}", batches, [row["rdp"] / row["batch"] for row in found], "o-"
            )
        )
        rows += [
            [
                epsilon,
                r["batch"],
                r["rdp"],
                r["rdp"] / r["batch"],
                r["tight"],
                r["tight"] / r["batch"],
            ]
            for r in found
        ]
    columns = (
        "epsilon",
        "batch",
        "noise (rdp)",
        "noise / batch (rdp)",
        "noise (tight)",
        "noise / batch (tight)",
    )
    axes = Axes("batch size", "noise on the mean gradient / C", log_x=True, log_y=True)
    parts: list[Table | Figure] = [
        Figure("figure1", "Figure 1: batch size against noise, RDP", figures.lines(curves, axes)),
        Table("figure1", "Figure 1", columns, rows),
    ]
    return Section(
        "Figure 1: batch size against noise",
        "Ten million records, ten thousand steps, Poisson sampling.",
        parts,
    )


def _figure_2(results: Results, private: list[Stored]) -> Section:
    parts = []
    for kind, title in (("plain", "without noise"), ("private", "with noise")):
        cells = results.starting(f"figure2-{kind}-")
        rates = [f"{rate:g}" for rate in cells[0].settings["rates"]]
        rows: dict[float, list[list[float]]] = {}
        for cell in cells:
            rows.setdefault(cell.settings["clip"], []).append(
                [100 * a for a in cell.result["accuracies"]]
            )
        clips = [f"{clip:g}" for clip in rows]
        axes = Axes("learning rate", "clip norm")
        means = [[mean(square) for square in zip(*runs, strict=True)] for runs in rows.values()]
        parts.append(
            Figure(
                f"figure2-{kind}",
                f"Figure 2, {title}: held-out accuracy in percent",
                figures.heat(means, clips, rates, axes),
            )
        )
        if all(len(runs) > 1 for runs in rows.values()):
            spreads = [
                [stdev(square) for square in zip(*runs, strict=True)] for runs in rows.values()
            ]
            picture = figures.heat(spreads, clips, rates, axes)
            parts.append(
                Figure(
                    f"figure2-{kind}-spread",
                    f"Figure 2, {title}: standard deviation over runs, in points",
                    picture,
                )
            )
    words = (
        "Accuracy stays the same along diagonals where clip norm times learning rate is constant; "
        "without noise the clip norm can grow "
        f"without harm, with noise it cannot. With noise, epsilon is "
        f"{private[0].result['epsilon']:.2f} at delta 1e-5 in every square."
    )
    return Section("Figure 2: clip norm against learning rate", words, parts)


def _figure_3(results: Results) -> Section:
    rows = results["figure3"].result["rows"]
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    curves = []
    for batch in batches:
        mine = [row for row in rows if row["batch"] == batch]
        curves.append(
            Line(f"batch {batch}", [r["epochs"] for r in mine], [r["rdp"] for r in mine], "o-")
        )
    first = [row for row in rows if row["batch"] == 5000]
    both = [
        Line(name, [r["epochs"] for r in first], [r[name] for r in first], "o-")
        for name in ("rdp", "tight")
    ]
    axes = Axes("epochs (trials)", "epsilon")
    table = Table(
        "figure3",
        "Figure 3",
        ("batch", "epochs", "rdp", "tight"),
        [[r["batch"], r["epochs"], r["rdp"], r["tight"]] for r in rows],
    )
    parts: list[Table | Figure] = [
        Figure("figure3-a", "A: every trial as one more epoch", figures.lines(both, axes)),
        Figure("figure3-b", "B: other batch sizes, RDP", figures.lines(curves, axes)),
        table,
    ]
    return Section(
        "Figure 3: what tuning costs", "A million records, noise multiplier 1, delta 1e-6.", parts
    )


def _appendix(results: Results) -> Section:
    found = results["appendix-c"].result
    rows = [[name, PRINTED.get(name), value, REMARKS.get(name)] for name, value in found.items()]
    notes = results["accountants"].result
    foot = [
        [int(epochs), row["rdp"], row["tight_lower"], row["tight"]] for epochs, row in notes.items()
    ]
    parts = [
        Table(
            "appendix-c",
            "Appendix C: a hundred trials",
            ("quantity", "printed", "ours", "remark"),
            rows,
        ),
        Table(
            "footnote-19",
            "Footnote 19: accountants",
            ("epochs", "rdp", "tight, lower bound", "tight, upper bound"),
            foot,
        ),
    ]
    return Section(
        "Appendix C and footnote 19", "Where printed and ours differ, the remark says why.", parts
    )
