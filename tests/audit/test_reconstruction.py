"""A column is reconstructed from exact answers, and not from private ones within one budget."""

from __future__ import annotations

import numpy as np
import pytest

import dpfy
from dpfy.audit.reconstruction import most_right, reconstruct
from dpfy.core.errors import DpfyError, InvalidInput

PEOPLE = 60


def column_and_subsets(seed: int, questions: int = 2 * PEOPLE):
    rng = np.random.default_rng(seed)
    return rng.random(PEOPLE) < 0.5, rng.random((questions, PEOPLE)) < 0.5, rng


def right(subsets, answers, column) -> tuple[float, float, float]:
    return reconstruct(subsets, answers).share_right(column)


@pytest.mark.parametrize("seed", range(5))
def test_exact_answers_give_the_column_away(seed):
    column, subsets, rng = column_and_subsets(seed)
    exact = subsets.astype(float) @ column
    assert right(subsets, exact, column)[0] >= 0.9
    small = exact + rng.uniform(-0.5, 0.5, len(exact))
    assert right(subsets, small, column)[0] >= 0.9


def test_laplace_answers_of_one_budget_tell_no_more_than_it_allows():
    rights = []
    for seed in range(40):
        column, subsets, rng = column_and_subsets(seed)
        noisy = subsets.astype(float) @ column + rng.laplace(0, len(subsets), len(subsets))
        rights.append(right(subsets, noisy, column)[0])
    # 2,400 guesses at epsilon 1 over all questions: the expected share is 0.52 at most here.
    assert abs(float(np.mean(rights)) - 0.5) < 0.05
    assert float(np.mean(rights)) < most_right(1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("each", "most"), [(0.01, 120), (0.2, 20)])
def test_the_ledger_prevents_reconstruction(each, most, tmp_path):
    """Questions of a real session: one ledger, one budget. What it refuses, the attacker has not."""
    column, subsets, _ = column_and_subsets(7)
    names = [f"p{place}" for place in range(PEOPLE)]
    people = dpfy.Dataset(
        {"name": names, "bit": column.astype(float).tolist()},
        schema=[dpfy.Number("bit", 0, 1), dpfy.Category("name", names)],
        ledger=tmp_path / "ledger.jsonl",
        budget=dpfy.Budget(epsilon=1.0, delta=1e-6),
    )
    answers, refused = [], 0
    for number, chosen in enumerate(subsets):
        listed = ", ".join(f"'{name}'" for name, taken in zip(names, chosen, strict=True) if taken)
        sql = f"SELECT SUM(bit) FROM people WHERE name IN ({listed})"
        try:
            answer = dpfy.query(people, sql, epsilon=each, delta=0, run=tmp_path / f"run{number}")
        except DpfyError:
            refused += 1
            continue
        answers.append((chosen, answer.answers[0].value))
    assert 3 <= len(answers) <= most
    assert len(answers) + refused == len(subsets)
    found = right([chosen for chosen, _ in answers], [value for _, value in answers], column)
    assert found[1] < most_right(1.0)
    assert found[1] <= 0.5 <= found[2]


def test_bad_input_is_one_line():
    column, subsets, _ = column_and_subsets(1)
    with pytest.raises(InvalidInput, match="one number for each"):
        reconstruct(subsets, [1.0])
    with pytest.raises(InvalidInput, match="zeros and ones"):
        reconstruct(2 * subsets.astype(int), subsets.astype(float) @ column)
    with pytest.raises(InvalidInput, match="finite"):
        reconstruct(subsets, np.full(len(subsets), np.nan))
    with pytest.raises(InvalidInput, match="truth"):
        reconstruct(subsets, subsets.astype(float) @ column).share_right([True])
