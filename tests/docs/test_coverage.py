"""The page that says what the papers describe and what dpfy does: every section, algorithm, table
and figure has a row, and every command on it is one that something runs.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import blocks  # noqa: E402

PAGE = ROOT / "docs" / "coverage.md"
SAYS = ("yes", "part", "no")

GUIDE = [
    *[
        "1",
        "1.1",
        "2",
        "2.1",
        "2.1.1",
        "2.2",
        "2.3",
        "2.4",
        "3",
        "3.1",
        "3.2",
        "3.2.1",
        "3.2.2",
        "3.2.3",
    ],
    *["4", "4.1", "4.1.1", "4.1.2", "4.1.3", "4.1.4", "4.2", "4.2.1", "4.2.2", "4.3", "4.4", "4.5"],
    *[
        "5",
        "5.1",
        "5.2",
        "5.2.1",
        "5.2.2",
        "5.3",
        "5.3.1",
        "5.3.2",
        "5.3.3",
        "5.4",
        "5.4.1",
        "5.4.2",
    ],
    *[
        "5.5",
        "5.5.1",
        "5.5.2",
        "5.6",
        "5.7",
        "6",
        "A",
        "A.1",
        "A.2",
        "B",
        "C",
        "C.1",
        "C.2",
        "C.3",
        "C.4",
        "C.4.1",
        "C.4.2",
        "C.4.3",
        "D",
    ],
    *(f"Table {number}" for number in range(1, 7)),
    *(f"Figure {number}" for number in range(1, 4)),
    *(f"Algorithm {number}" for number in range(1, 4)),
]
STUDY = [
    *["I", "II", "III", "IV", "V", "VI", "VII", "VIII"],
    *(f"Table {number}" for number in ("I", "II", "III", "IV")),
    *(f"Figure {number}" for number in range(1, 15)),
    *(f"Algorithm {number}" for number in (1, 2)),
]
BLOCKS = [
    "Introduction",
    "Some Foundations of Differential Privacy",
    "A Practical Example: Private Mean Estimation",
    "The Gaussian Mechanism and Its Analysis",
    "From Gaussian Mechanism to DP-SGD",
    "Privatizing Gradient Descent",
    "Algorithm: Gradient Descent (GD)",
    "Algorithm: Private Gradient Descent (One Step)",
    "The Challenge of Multiple Steps: Adaptive Composition",
    "A first try at DP training",
    "Tighter Analysis via Renyi Differential Privacy",
    "A second try at DP training",
    "The Power of Subsampling: From GD to SGD",
    "A third try at DP training",
    "Beyond DP-SGD: Using Correlated Noise",
    "Putting Gradient Descent in Matrix Form",
    "DP-SGD in Matrix Form",
    "The Matrix Factorization Framework",
    "Structure of B and C",
    "A fourth try at DP training",
    "Conclusion",
]
CHAPTER = [
    "Introduction",
    "Principles and Mechanisms",
    "The Mathematics of Privacy: Sensitivity and Mechanisms",
    "Quantifying Information Leakage: Differential Privacy",
    "Global Sensitivity: The Lynchpin of Privacy Calibration",
    "The Additive Noise Mechanisms",
    "The Algorithmic Pillars of Differential Privacy",
    "The Post-Processing Property: Free and Safe Computation",
    "The Composition Theorem: Accounting for Cumulative Leakage",
    "Differentially Private Stochastic Gradient Descent (DP-SGD)",
    "The Challenge: Unbounded Gradient Sensitivity",
    "The Solution: Gradient Clipping",
    "The DP-SGD Algorithm",
    "Advanced Topics and Practical Pitfalls",
    "Advanced Composition and Privacy Accounting",
]
COMPONENTS = [
    "batch normalisation",
    "layer normalisation",
    "group normalisation",
    "weight normalisation",
    "graph networks",
    "SGD",
    "adaptive and accelerated optimizers",
    "second-order optimizers",
    "sparsity-aware optimizers",
    "cross-entropy",
    "pairwise and triplet losses",
    "energy-based losses",
    "pruning",
    "quantisation",
    "distillation",
    "WordPiece",
    "SentencePiece",
]
"""The rows of the guide's Table 5."""
PARTS = {
    "Components of Table 5": COMPONENTS,
    "The guide": GUIDE,
    "Building blocks": BLOCKS,
    "The study of DP-SGD and DP-FTRL": STUDY,
    "The chapter": CHAPTER,
}
"""The headings of each document, as it prints them."""


class Row(NamedTuple):
    """A row of a table of the page."""

    part: str
    where: str
    says: str
    shown: str


def rows() -> list[Row]:
    """Every row below a heading of the first kind; cells by the names of their columns."""
    found, part, names = [], "", []
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith("## "):
            part = line[3:]
        if not line.startswith("|"):
            names = []
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not names:
            names = cells
        elif set(line) - set("|-"):
            cell = dict(zip(names, cells, strict=True))
            where = cell.get("where", cell.get("component", ""))
            found.append(Row(part, where, cell["dpfy"], cell["shown by"]))
    return found


ROWS = rows()
COMMANDS = sorted({row.shown for row in ROWS if row.shown})


def documented() -> list[str]:
    """Commands of the blocks that are run: one a line, without comments, one space at a time."""
    text = [
        block.text.replace("\\\n", " ")
        for page in blocks.pages()
        for block in blocks.blocks(page)
        if block.language == "bash" and block.runs
    ]
    return [
        " ".join(line.partition(" #")[0].split()) for block in text for line in block.splitlines()
    ]


RUN = documented()


@pytest.mark.parametrize("part", PARTS)
def test_every_heading_has_a_row_and_no_other_exists(part: str) -> None:
    there = [row.where for row in ROWS if row.part == part]
    assert [name for name in PARTS[part] if name not in there] == []
    if part in ("The guide", "The study of DP-SGD and DP-FTRL"):
        assert set(there) <= set(PARTS[part])


def test_a_row_says_how_far_and_shows_it() -> None:
    assert {row.says for row in ROWS} <= set(SAYS)
    assert [row.where for row in ROWS if row.says != "no" and not row.shown] == []
    assert [row.where for row in ROWS if row.says == "no" and row.shown] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_something_runs_the_command(command: str) -> None:
    match = re.fullmatch(r"`([^`]+)`", command)
    assert match, "one command in backticks"
    verb, _, rest = match[1].partition(" ")
    if verb == "pytest":
        path, _, name = rest.partition("::")
        text = (ROOT / path).read_text("utf-8")
        assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE)
    elif match[1].startswith("dpfy reproduce "):
        study = match[1].split()[-1]
        assert list((ROOT / "docs" / "studies" / study / "cells").glob("*.json"))
    else:
        assert verb == "dpfy"
        assert any(f"{line} ".startswith(f"{match[1]} ") for line in RUN)
