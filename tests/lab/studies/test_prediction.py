"""The study of answers against a model: the stored cells show the crossing, at no more than the
stated epsilon.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dpfy_lab.studies import prediction, summary
from dpfy_lab.studies.study import Options, run, stored

ROOT = Path(__file__).parents[3] / "docs" / "studies"


def test_answers_are_better_for_few_questions_and_the_model_for_many() -> None:
    results = summary.kept("prediction", ROOT)[1]
    answers = results.starting("answers-")
    assert all(
        cell.result["epsilon"] <= prediction.EPSILON for cell in [*answers, results["training"]]
    )
    model = results["training"].result["test_accuracy"]
    at = prediction.crossing(results)
    assert at is not None
    few, many = (
        {
            c.name: c.result["expected_accuracy"]
            for c in answers
            if (c.settings["budget"] >= at) == side
        }
        for side in (0, 1)
    )
    assert max(few.values()) >= model > max(many.values())
    for (
        cell
    ) in answers:  # what the service answered agrees with what is expected, to five deviations
        chance, n = cell.result["expected_accuracy"], cell.settings["budget"]
        assert (
            abs(cell.result["measured"] - chance) <= 5 * (chance * (1 - chance) / n) ** 0.5 + 5 / n
        )


@pytest.mark.slow
def test_the_short_form_ends_in_a_page(tmp_path: Path) -> None:
    page = run(prediction.STUDY, Options(fast=True), tmp_path)
    assert "Answers or a model" in page.read_text()
    assert set(stored(prediction.STUDY, Options(fast=True), tmp_path)) == {
        c.name for c in prediction.cells(Options(fast=True))
    }
