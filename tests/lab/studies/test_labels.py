"""The study of labels: its short form ends in a page; its stored runs reach what we set out to
reach, with settings that hold up.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
import torch

from dpfy_lab.studies import labels, labels_page, labels_sweep, summary
from dpfy_lab.studies.study import Options, run

ROOT = Path(__file__).parents[3] / "docs" / "studies"


@pytest.mark.parametrize("key", labels_page.AIMS, ids=str)
def test_the_stored_runs_reach_their_aims(key: tuple[str, float]) -> None:
    results = summary.kept("labels", ROOT)[1]
    runs = labels_page.grouped(results)
    data, epsilon = key
    cells = runs[data, "projection", epsilon]
    mean = labels_page.means(runs)[data, "projection", epsilon]
    assert mean >= labels_page.AIMS[key]
    assert mean >= labels_page.whole(results)[key]
    assert len(cells) == 5
    assert all(
        cell.result["epsilon"] <= epsilon and cell.result["whole_cpu_seconds"] < 120
        for cell in cells
    )
    assert mean > labels_page.means(runs)[data, "rr", 1.0] or epsilon < 1


def test_figures_of_whole_records_are_those_of_their_study() -> None:
    for (data, epsilon), stated in labels_page.WHOLE_RECORDS.items():
        cells = summary.kept("images", ROOT)[1].starting(f"run-{data}-{epsilon:g}-")
        assert len(cells) == 5
        assert round(100 * mean(cell.result["test_accuracy"] for cell in cells), 2) == stated


def test_validation_finds_nothing_clearly_better_than_the_defaults() -> None:
    found = {tried.name: tried for tried in labels_sweep.compared(summary.kept("labels", ROOT)[1])}
    assert set(found) == set(labels_sweep.CHOICES)
    assert labels_sweep.CHOICES[labels_sweep.DEFAULT] == labels_sweep.Choice()
    for tried in found.values():
        assert len(tried.by_row) == len(labels.DATA) * len(labels.EPSILONS["projection"])
        assert tried.lead <= max(2 * tried.error, 0.1), tried


def test_a_sweep_holds_images_out_and_tells_settings_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = labels_sweep.KernelSettings(landmarks=60)
    worse = labels_sweep.Choice(
        kernel, labels_sweep.SelfTrainingRules(penalty=1e6, student_penalty=1e6)
    )
    monkeypatch.setattr(
        labels_sweep, "CHOICES", {"default": labels_sweep.Choice(kernel), "worse": worse}
    )
    y = torch.arange(1800) // labels_sweep.PARTS % 3
    x = 2 * torch.eye(6)[y] + 0.5 * torch.randn(1800, 6, generator=torch.Generator().manual_seed(1))
    known = labels_sweep.tried((1.0,), 1e-5, lambda: (x, y))
    assert (known["images"], known["rows"][0]["apart"]) == (300, 0)
    assert min(known["rows"][0]["accuracies"]) > 0.9
    out = torch.arange(1800) % labels_sweep.PARTS == labels_sweep.PARTS - 1
    apart = torch.where(
        out[:, None], x.roll(3, dims=1), x
    )  # what is held out lies elsewhere: only who was taught it can know it
    unknown = labels_sweep.tried((1.0,), 1e-5, lambda: (apart, y))
    assert max(unknown["rows"][0]["accuracies"]) < 0.8


@pytest.mark.slow
def test_the_short_form_ends_in_a_page(tmp_path: Path) -> None:
    assert (
        "Accuracy on the test images" in run(labels.STUDY, Options(fast=True), tmp_path).read_text()
    )
