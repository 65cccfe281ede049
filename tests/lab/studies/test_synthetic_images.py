"""The study of synthetic images: its short form, and what the stored cells say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dpfy_lab.studies import summary, synthetic_images, synthetic_images_page
from dpfy_lab.studies.study import Options, run

ROOT = Path(__file__).parents[3] / "docs" / "studies"


@pytest.mark.slow
def test_the_short_form_of_images_ends_in_a_page(tmp_path: Path) -> None:
    page = run(synthetic_images.STUDY, Options(fast=True), tmp_path)
    assert "tested on real ones" in page.read_text()


def test_networks_on_stored_images_recognise_real_digits() -> None:
    runs = synthetic_images_page.grouped_runs(summary.kept("synthetic-images", ROOT)[1])
    for epsilon, least in ((1.0, 0.954), (10.0, 0.97)):
        cells = runs["mnist", epsilon]
        assert len(cells) == synthetic_images.RUNS["mnist", epsilon]
        for cell in cells:
            assert cell.result["test_accuracy"] >= least
            assert 0.99 * epsilon < cell.result["epsilon"] <= epsilon
            assert cell.result["synthesis_cpu_seconds"] < 20 * 60


def test_equal_images_are_not_apart() -> None:
    x, y = torch.rand(40, 1, 28, 28), torch.arange(40) % 4
    assert set(synthetic_images.closeness((x, y), (x, y)).values()) == {0.0}
    apart = synthetic_images.closeness((x / 2, y), (x, y))
    assert apart["pixel_means_apart"] == pytest.approx(0.25, abs=0.02)
    assert apart["pixel_deviations_apart"] == pytest.approx(0.14, abs=0.03)


def test_shaken_images_are_much_the_same() -> None:
    torch.manual_seed(0)
    held = torch.zeros(50, 1, 28, 28)
    held[:, :, 8:20, 8:20] = 1
    found = synthetic_images.shaken(held)
    assert found.shape == held.shape
    assert 0.7 < float(found.sum() / held.sum()) < 1.3
    assert float((found - held).abs().mean()) > 0.01
