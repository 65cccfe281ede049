"""The study of labels: its short form ends in a page; its stored runs reach what we set out to reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpfy.studies import labels, labels_page, summary
from dpfy.studies.study import Options, run

ROOT = Path(__file__).parent.parent.parent / "docs" / "studies"


@pytest.mark.parametrize("key", labels_page.AIMS, ids=str)
def test_the_stored_runs_reach_their_aims(key: tuple[str, float]) -> None:
    runs = labels_page.grouped(summary.kept("labels", ROOT)[1])
    data, epsilon = key
    cells = runs[data, "projection", epsilon]
    mean = labels_page.means(runs)[data, "projection", epsilon]
    assert mean >= labels_page.AIMS[key]
    assert mean >= labels_page.WHOLE_RECORDS.get(key, 0.0)
    assert len(cells) == 5
    assert all(cell.result["epsilon"] <= epsilon and cell.result["whole_cpu_seconds"] < 120 for cell in cells)
    assert mean > labels_page.means(runs)[data, "rr", 1.0] or epsilon < 1


@pytest.mark.slow
def test_the_short_form_ends_in_a_page(tmp_path: Path) -> None:
    assert "Accuracy on the test images" in run(labels.STUDY, Options(fast=True), tmp_path).read_text()
