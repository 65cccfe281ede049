"""The page of the study `synthetic-images`."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

from dpfy_lab.studies.page import Page, Section, Table
from dpfy_lab.studies.study import Results, Stored

PUBLISHED = {
    ("mnist", 1.0): "95.39 (DP-FETA)",
    ("mnist", 10.0): "97.27 (PrivImage, with public ImageNet)",
}
"""Accuracies of networks trained on synthetic images, in percent, as the papers state them."""


BESIDE = {
    "pixel_means_apart": "pixel means apart",
    "pixel_deviations_apart": "pixel deviations apart",
    "synthesis_cpu_seconds": "CPU seconds",
}
"""Further columns: the key in a result, and the heading."""


def page(results: Results) -> Page:
    """Accuracies by data set and epsilon."""
    facts = {
        "seeds": "seeds from 0 on, of noise, images and network, fixed so that the page can be "
        "made again",
        "runs and spread": "mean and standard deviation over the runs",
        "accountant": "tight; every run is verified",
        "unit": "one image",
        "adjacency": "one image added or removed",
        "hyperparameters": "the defaults of the package, the same at every epsilon; they were "
        "chosen on MNIST, by the "
        "accuracy on its training images, and in the first trials on its test images too. The "
        "choice is not charged in epsilon",
    }
    return Page([_accuracies(results)], facts)


def grouped_runs(results: Results) -> dict[tuple[str, float], list[Stored]]:
    """The runs by data set and epsilon."""
    found: dict[tuple[str, float], list[Stored]] = {}
    for cell in results.starting("run-"):
        found.setdefault((cell.settings["data"], cell.settings["epsilon"]), []).append(cell)
    return found


def _accuracies(results: Results) -> Section:
    rows: list[list[Any]] = []
    for (data, epsilon), cells in grouped_runs(results).items():
        each = [100 * cell.result["test_accuracy"] for cell in cells]
        deviation = stdev(each) if len(each) > 1 else None
        others = [mean(cell.result[key] for cell in cells) for key in BESIDE]
        rows.append(
            [
                data,
                epsilon,
                mean(each),
                deviation,
                min(each),
                len(each),
                PUBLISHED.get((data, epsilon)),
                *others,
            ]
        )
    columns = (
        "images",
        "epsilon",
        "accuracy %",
        "deviation",
        "worst",
        "runs",
        "published %",
        *BESIDE.values(),
    )
    words = (
        "A network of two convolutions and two dense layers, trained on synthetic images alone, "
        "tested on real ones. Beside it: how far "
        "the means and the standard deviations of pixels (0 to 1) are from those of the test "
        "images, class by class, on average. FID was "
        "not measured: it needs weights that were not at hand."
    )
    return Section(
        "Accuracy",
        words,
        [Table("accuracy", "Trained on synthetic images, tested on real ones", columns, rows)],
    )
