"""The page of the study `dpsgd-dpftrl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from dpfy_lab.studies import dpsgd_dpftrl_future as future
from dpfy_lab.studies import figures
from dpfy_lab.studies.figures import Axes, Line
from dpfy_lab.studies.images_page import grouped
from dpfy_lab.studies.page import Figure, Page, Section, Table, spread
from dpfy_lab.studies.study import Results, Stored

CLIP, BATCH = 1.1, 500
MOMENTUM = 0.9
"""Not printed: inferred, with others beside it."""
TABLE_1 = {1.0: (1.68, 92.22), 0.75: (3.33, 93.17), 0.5: (13.09, 94.13)}
TABLE_2 = {1.0: (1.68, 93.63), 0.75: (3.33, 95.38), 0.5: (13.09, 96.61)}
TABLE_3 = {
    25.0: (2.65, 90.18),
    20.0: (3.41, 91.27),
    12.5: (5.84, 93.63),
    8.0: (9.92, 95.21),
    4.0: (23.80, 96.17),
}
TABLE_4_SGD = {0.872: (3.41, 95.70), 0.710: (5.71, 96.02), 0.545: (13.14, 96.60)}
TABLE_4_FTRL = {0.044: (3.41, 91.27), 0.028: (5.71, 93.57), 0.014: (13.14, 95.55)}
"""As printed: noise to (epsilon, accuracy in percent)."""


def node_noise(printed: float) -> float:
    """Table IV gives the noise of a tree node on the mean gradient; in clip norms on the sum it is
    this.
    """
    return round(printed * BATCH / CLIP, 2)


def page(results: Results) -> Page:
    """Epsilons, baselines, the four tables, and the same budget with our recipe."""
    seeds = sorted({cell.settings["seed"] for cell in results.values() if "seed" in cell.settings})
    sections = [_epsilons(results), _baselines(results), _tables(results), _curves(results)]
    if results.starting("momentum-"):
        sections.insert(3, _momenta(results))
    if results.starting("run-"):
        sections.append(_ours(results))
    if results.starting("fashion-"):
        sections.append(future.section(results))
    facts = {
        "seeds": f"{', '.join(map(str, seeds))}, fixed so that the page can be made again; initial "
        f"weights have seed 0",
        "runs and spread": "each table gives the number of runs, their mean and standard deviation "
        "(- for a single run)",
        "accountant": "tight (upper bound); RDP beside it where the study used it",
        "unit": "one example",
        "adjacency": "one example added or removed",
        "hyperparameters": "printed: batch, epochs, noise, clip norm, learning rate. Not printed "
        "and inferred: 54,000 training records for "
        f"DP-SGD (the printed epsilons belong to rate 1/210 and 4,200 steps), momentum "
        f"{MOMENTUM:g} for DP-SGD (others are compared on "
        "the page), none for DP-FTRL. Batches are Poisson samples, which the accounting needs; the "
        "study drew them without replacement. "
        "Nothing was tuned for Fashion-MNIST but our recipe, as the study images tells",
    }
    return Page(sections, facts)


def _epsilons(results: Results) -> Section:
    rows = results["epsilons"].result["rows"]
    sgd = [row for row in rows if row["mechanism"] == "dp-sgd"]
    ftrl = [row for row in rows if row["mechanism"] == "dp-ftrl"]
    names = ("tight 54000", "rdp 54000", "tight 60000", "rdp 60000")
    orders = ("tight fixed", "rdp fixed", "tight reshuffled", "rdp reshuffled")
    words = (
        "The printed epsilons of DP-SGD hold for 54,000 training records. Those of DP-FTRL hold if "
        "every record comes at the same place "
        "in every epoch; if batches are reshuffled, as is usual, they are too low."
    )
    sgd_rows = [
        [row["batch"], row["noise"], row["printed"], *(row[name] for name in names)] for row in sgd
    ]
    ftrl_rows = [[row["noise"], row["printed"], *(row[name] for name in orders)] for row in ftrl]
    parts = [
        Table("epsilons-sgd", "DP-SGD", ("batch", "sigma", "printed", *names), sgd_rows),
        Table(
            "epsilons-ftrl",
            "DP-FTRL, one tree over 1,200 steps",
            ("noise multiplier", "printed", *orders),
            ftrl_rows,
        ),
    ]
    return Section("What the epsilons really are", words, parts)


def _baselines(results: Results) -> Section:
    rows, parts = [], []
    for name, asked in (("mlp", 98.0), ("lenet", 98.9)):
        cell = results.get(f"plain-{name}")
        if cell is None:
            continue
        found = cell.result
        rows.append(
            [
                name,
                100 * found["test_accuracy"],
                asked,
                found["training_seconds"],
                found["inference_seconds"],
            ]
        )
        digits = [str(k) for k in range(10)]
        confusion = figures.heat(found["confusion"], digits, digits, Axes("guess", "truth"))
        parts.append(Figure(f"confusion-{name}", f"{name}: confusion (rows: truth)", confusion))
        epochs = [row["epoch"] for row in found["curve"]]
        for what in ("loss", "accuracy"):
            line = Line("", epochs, [row[f"test_{what}"] for row in found["curve"]])
            parts.append(
                Figure(
                    f"plain-{name}-{what}",
                    f"{name}: test {what}",
                    figures.lines([line], Axes("epoch", what)),
                )
            )
    table = Table(
        "baselines",
        "Without privacy",
        ("model", "accuracy %", "aim", "training s", "inference s"),
        rows,
    )
    return Section("Non-private baselines", "Adam, batches of 128, 15 epochs.", [table, *parts])


def runs_of(results: Results, prefix: str) -> list[Stored]:
    """The runs of one row, over seeds."""
    return [
        cell
        for cell in results.starting(f"{prefix}-")
        if cell.name.removeprefix(f"{prefix}-").isdigit()
    ]


def _rows(
    results: Results, printed: Mapping[float, tuple[float, float]], prefix: str, label: str
) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for noise, (epsilon, accuracy) in printed.items():
        name = node_noise(noise) if prefix == "ftrl" and noise < 1 else noise
        runs = runs_of(results, f"{prefix}-{name:g}")
        if not runs:
            rows.append([label, noise, epsilon, None, accuracy, None, None, None, 0, None, None])
            continue
        score = spread([run.result["test_accuracy"] for run in runs])
        one = runs[0].result
        difference = round(score["mean"] - accuracy, 6)
        rows.append([label, noise, epsilon, one["epsilon"], accuracy, score["mean"], score["deviation"], difference, score["runs"],  # noqa: E501
                     one["training_seconds"], one["inference_seconds"]])  # fmt: skip
    return rows


COLUMNS = ("", "noise", "epsilon printed", "epsilon, "
                                           "tight", "printed "
                                                    "%", "ours "
                                                         "%", "deviation", "difference", "runs", "training s",
           "inference s")  # fmt: skip


def _tables(results: Results) -> Section:
    parts = [
        Table("table-1", "Table I: DP-SGD, "
                         "MLP", COLUMNS, _rows(results, TABLE_1, "sgd-mlp-256", "MLP")),
        Table("table-2", "Table II: DP-SGD, "
                         "LeNet", COLUMNS, _rows(results, TABLE_2, "sgd-lenet-256", "LeNet")),
        Table("table-3", "Table III: DP-FTRL, "
                         "LeNet", COLUMNS, _rows(results, TABLE_3, "ftrl", "LeNet")),
        Table("table-4", "Table IV: DP-SGD and DP-FTRL at equal printed epsilon, LeNet", COLUMNS,
              _rows(results, TABLE_4_SGD, "sgd-lenet-500", "DP-SGD") + _rows(results, TABLE_4_FTRL, "ftrl", "DP-FTRL")),
    ]  # fmt: skip
    return Section(
        "Tables I to IV at the printed settings", "A row with 0 runs was not computed.", parts
    )


def _momenta(results: Results) -> Section:
    """Accuracy by momentum for every row of DP-SGD, and how far each momentum is from the printed
    accuracies.
    """
    rows_of = {("mlp", 256): TABLE_1, ("lenet", 256): TABLE_2, ("lenet", 500): TABLE_4_SGD}
    found: dict[tuple[str, int, float], dict[float, list[float]]] = {}
    for cell in [*results.starting("sgd-"), *results.starting("momentum-")]:
        s = cell.settings
        row = found.setdefault((s["model"], s["batch"], s["noise"]), {})
        row.setdefault(s["momentum"], []).append(cell.result["test_accuracy"])
    momenta = sorted({m for row in found.values() for m in row})
    rows: list[list[Any]] = []
    for (model, batch, noise), row in sorted(
        found.items(), key=lambda item: (item[0][:2], -item[0][2])
    ):
        means = [100 * mean(row[m]) if m in row else None for m in momenta]
        counts = "/".join(str(len(row.get(m, ()))) for m in momenta)
        rows.append([model, batch, noise, rows_of[model, batch][noise][1], *means, counts])
    columns = (
        "model",
        "batch",
        "noise",
        "printed %",
        *(f"momentum {m:g} %" for m in momenta),
        "runs",
    )
    off = [_off(rows, 4 + k) for k in range(len(momenta))]
    rows.append(["largest difference", None, None, None, *off, None])
    words = (
        "The study does not print the momentum of DP-SGD. Each column has another; the last row is "
        "the largest difference to a printed "
        "value."
    )
    return Section(
        "Which momentum", words, [Table("momentum", "DP-SGD by momentum", columns, rows)]
    )


def _off(rows: Sequence[Sequence[Any]], column: int) -> float:
    return max(abs(row[column] - row[3]) for row in rows if row[column] is not None)


def _curves(results: Results) -> Section:
    pictures = []
    for prefix, title in (
        ("sgd-mlp-256", "DP-SGD, MLP"),
        ("sgd-lenet-256", "DP-SGD, LeNet"),
        ("ftrl", "DP-FTRL, LeNet"),
    ):
        lines: dict[str, list[Line]] = {"epsilon": [], "accuracy": []}
        for cell in results.starting(f"{prefix}-"):
            if cell.settings["seed"] != 0:
                continue
            rows = cell.result["curve"]
            label = f"noise {cell.settings.get('noise', cell.settings.get('node_noise')):g}"
            steps = [row["step"] for row in rows]
            lines["epsilon"].append(Line(label, steps, [row["epsilon"] for row in rows]))
            lines["accuracy"].append(Line(label, steps, [row["test_accuracy"] for row in rows]))
        for what, curves in lines.items():
            if curves:
                pictures.append(
                    Figure(
                        f"{prefix}-{what}",
                        f"{title}: {what} by step",
                        figures.lines(curves, Axes("step", what)),
                    )
                )
    words = (
        "Privacy and utility over the run. A correlated-noise run is one release: its epsilon does "
        "not depend on where it is stopped."
    )
    return Section("Figures 5 to 14: privacy and utility over the run", words, pictures)


def _ours(results: Results) -> Section:
    best_printed = max(
        accuracy
        for table in (TABLE_1, TABLE_2, TABLE_3, TABLE_4_SGD, TABLE_4_FTRL)
        for _, accuracy in table.values()
    )
    rows: list[list[Any]] = []
    for (data, epsilon), runs in grouped(results).items():
        score = spread([run.result["test_accuracy"] for run in runs])
        billed = max(run.result["epsilon"] for run in runs)
        printed = [
            accuracy
            for table in (TABLE_1, TABLE_2, TABLE_3, TABLE_4_SGD)
            for e, accuracy in table.values()
            if e <= epsilon * 1.12
        ]
        best = max(printed, default=None) if data == "mnist" else None
        rows.append(
            [
                data,
                epsilon,
                billed,
                best,
                score["mean"],
                score["deviation"],
                score["worst"],
                score["runs"],
            ]
        )
    columns = (
        "data",
        "epsilon asked",
        "epsilon charged",
        "best printed % at most 12% above",
        "ours %",
        "deviation",
        "worst",
        "runs",
    )
    words = (
        f"The recipe of the study `images`, with its stored runs. The best accuracy printed at any "
        f"epsilon is {best_printed}%. "
    )
    return Section(
        "The same budgets with our recipe, and Fashion-MNIST",
        words,
        [Table("ours", "Our recipe", columns, rows)],
    )
