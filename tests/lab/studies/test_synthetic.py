"""The study of synthetic tables: its short form, and what the stored cells say."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpfy_lab.studies import summary, synthetic, synthetic_page
from dpfy_lab.studies.study import Options, run, stored

ROOT = Path(__file__).parents[3] / "docs" / "studies"


@pytest.mark.slow
def test_the_short_form_ends_in_a_page(tmp_path: Path) -> None:
    page = run(synthetic.STUDY, Options(fast=True), tmp_path)
    assert "tested on real ones" in page.read_text()
    runs = synthetic_page.grouped(stored(synthetic.STUDY, Options(fast=True), tmp_path))
    assert {method for method, _ in runs} == set(synthetic.ALL)


def test_stored_errors_are_below_those_of_the_peer() -> None:
    """Means over the runs of MST, five at epsilon 1; AIM is better than every other method that was
    run beside it.
    """
    runs = synthetic_page.grouped(summary.kept("synthetic", ROOT)[1])
    found = synthetic_page.means(runs, "mean_l1_3")
    for epsilon, most in ((1.0, 0.220), (3.16, 0.208), (10.0, 0.198)):
        assert found["mst", epsilon] <= most
    assert all(len(runs["mst", epsilon]) == 5 for epsilon in (1.0, 3.16, 10.0))
    assert len(runs["aim", 1.0]) == 5
    assert all(cell.result["synthesis_cpu_seconds"] <= 15 for cell in runs["mst", 1.0])
    for (method, epsilon), value in found.items():
        assert method == "aim" or value > found.get(("aim", epsilon), 0.0)


def test_learners_on_stored_tables() -> None:
    scores = {
        key: cell.result["learner"]["auroc"]
        for key, cells in synthetic_page.grouped(summary.kept("synthetic", ROOT)[1]).items()
        for cell in cells
        if "learner" in cell.result
    }
    assert scores["aim", 1.0] >= 0.88
    assert scores["aim", 10.0] >= 0.90


def test_marginal_methods_beat_the_networks() -> None:
    """Errors of all marginal methods, and the area under the curve of all of them but MWEM at
    epsilon 1, which is worse than a coin.
    """
    runs = synthetic_page.grouped(summary.kept("synthetic", ROOT)[1])
    errors = synthetic_page.means(runs, "mean_l1_3")
    for epsilon in (1.0, 10.0):
        networks = [errors[method, epsilon] for method in synthetic.NETWORKS]
        assert max(errors[method, epsilon] for method in ("aim", "mst", "privbayes", "mwem")) < min(
            networks
        )
        scores = {
            method: runs[method, epsilon][0].result["learner"]["auroc"]
            for method in ("aim", "mst", "privbayes", *synthetic.NETWORKS)
        }
        assert min(scores[method] for method in ("aim", "mst", "privbayes")) > max(
            scores[m] for m in synthetic.NETWORKS
        )
