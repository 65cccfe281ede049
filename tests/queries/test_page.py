"""The code and the figures of docs/statistics.md, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dpfy.queries.plan import QueryTerms, _calibrated
from dpfy.statistics import functions, language
from dpfy.tables.columns import Number
from dpfy.tables.schema import Schema

PAGE = (Path(__file__).parents[2] / "docs" / "statistics.md").read_text()


def test_it_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "statistics.md", "exec"), {})
    assert (tmp_path / "runs/q/answers.json").is_file()


def test_every_statistic_is_on_the_page():
    for name in functions.FUNCTIONS:
        assert f"{name}(" in PAGE, name


ROWS = re.findall(r"^\| ([\d.]+), (1e-\d) \| ([\d.]+), ([\d.]+) \| (\d+)", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("epsilon", "delta", "laplace", "gaussian", "first"), ROWS)
def test_gaussian_noise_is_better_from_so_many_sums_on(epsilon, delta, laplace, gaussian, first):
    assert len(ROWS) == 5
    columns, terms = (
        Schema.of({f"x{i}": Number(f"x{i}", 0, 1) for i in range(20)}),
        QueryTerms(float(epsilon), float(delta)),
    )

    def errors(count):
        text = ", ".join(f"sum(x{i})" for i in range(count))
        asked = functions.build(language.parse(text), columns.named)
        return [
            asked[0].error(_calibrated(asked, terms, family)[0])
            for family in ("laplace", "gaussian")
        ]

    assert errors(1) == pytest.approx([float(laplace), float(gaussian)], rel=5e-3)
    before, after = errors(int(first) - 1), errors(int(first))
    assert before[0] < before[1]
    assert after[0] > after[1]
