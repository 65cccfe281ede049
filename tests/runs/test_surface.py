"""The page of the data set shows the whole public surface, line by line, and runs as printed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import blocks  # noqa: E402

PAGE = ROOT / "docs" / "dataset.md"
SURFACE = """
people.spent(), people.left()
answers = dpfy.query(people, "mean(age), count() by job", epsilon=0.5)
table = dpfy.synthesize(people, epsilon=1.0)
model = LogisticRegression(epsilon=1.0).fit(people, target="income")
net = dpfy.fit(net, people, optimizer=opt, epsilon=3.0, epochs=10, batch_size=256)
best = dpfy.tune(objective, space, people, epsilon=3.0, trials=20)
with dpfy.serve(people, epsilon=4.0, answers=200) as service: service.answer(x0)
answers.run, answers.guarantee, answers.epsilon, answers.report
answers.to_json(), answers.verify()
dpfy.load("runs/x"), dpfy.predict("runs/x", "rows.csv")
dpfy.verify("runs/x"), dpfy.sign("runs/x", key="me.pem"), dpfy.audit("runs/x")
"""


def statements(text: str) -> set[str]:
    return {ast.unparse(node) for node in ast.parse(text).body}


def test_the_page_shows_every_line_of_the_surface():
    shown = set().union(
        *(statements(b.text) for b in blocks.blocks(PAGE) if b.language == "python")
    )
    assert statements(SURFACE) <= shown


@pytest.mark.slow
def test_the_page_runs_as_printed():
    ended = blocks.in_a_process_of_its_own(PAGE)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
