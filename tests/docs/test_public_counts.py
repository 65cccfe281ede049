"""No example makes a plan from a count of private records: such a plan tells whether one of them is
there (docs/decisions.md).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import blocks

MAKERS = r"dpsgd|dpftrl|bandmf|blt|\w*Terms"
COUNTED = re.compile(
    rf"\brecords\s*=\s*(?:len\(|[\w.\[\]]+\.shape)|\b(?:{MAKERS})\([^#\n]*?(?:\blen\(|\.shape\b)"
)


def counted(text: str) -> list[str]:
    """Lines that take the number of records from data, and do not say beside it that this data is
    public.
    """
    lines = text.splitlines()
    return [
        line.strip()
        for before, line in zip(["", *lines], lines, strict=False)
        if COUNTED.search(line.partition("#")[0])
        and "public" not in before + line.partition("#")[2]
    ]


@pytest.mark.parametrize(
    "file",
    [*blocks.pages(), *sorted((blocks.ROOT / "examples").glob("*.py"))],
    ids=lambda p: p.name,
)
def test_plans_are_made_from_public_numbers(file: Path) -> None:
    assert counted(file.read_text()) == []


def test_a_count_is_found() -> None:
    for line in (
        "r = dpfy.dpsgd(records=len(train), batch_size=2)",
        "r = dpfy.dpsgd(len(x), 5)",
        "TextTerms(1.0, 1e-5, x.shape[0])",
    ):
        assert counted(line) == [line]
    assert counted("# this text is public\nr = dpfy.dpsgd(len(x), 5)") == []
    assert (
        counted("r = dpfy.dpsgd(records=400, batch_size=len(batch) if full else 3)  # public") == []
    )
