"""Pages keep to the limits of tools/readability.py, and the tool counts what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import readability  # noqa: E402

MEASURED = ("studies.md",)
"""Pages with parts that studies write."""

PAGES = [page for page in readability.pages() if page.name not in MEASURED]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_readable(page: Path) -> None:
    found = readability.read(page)
    assert readability.problems(found) == [], found.too_long


def page_of(folder: Path, text: str) -> readability.Page:
    (folder / "page.md").write_text(text)
    return readability.read(folder / "page.md")


def test_code_tables_and_headings_are_no_sentences(tmp_path: Path) -> None:
    text = (
        "# A title of five words\n\nOne two three. Four `a.b(c)` six.\n\n| a | b c d e |\n|---|---|\n\n"
        "```python\nx = 1  # not a sentence at all\n```\n\n- an item has four\n- the next one too\n"
    )
    page = page_of(tmp_path, text)
    assert page.sentences == (
        "One two three.",
        "Four Code six.",
        "an item has four",
        "the next one too",
    )
    assert (page.words, page.average, page.longest) == (14, 3.5, 4)


def test_targets_of_links_do_not_count(tmp_path: Path) -> None:
    assert page_of(tmp_path, "See [the page](a/b/c.md#d) of it now.").words == 6


def test_long_sentences_are_found(tmp_path: Path) -> None:
    long = "word " * readability.LONGEST
    assert page_of(tmp_path, f"{long.strip()}.").too_long == []
    page = page_of(tmp_path, f"{long}more. A short one here.")
    assert len(page.too_long) == 1
    assert any("sentence of 41 words" in line for line in readability.problems(page))


@pytest.mark.parametrize(
    ("word", "count"),
    [
        ("cat", 1),
        ("table", 2),
        ("privacy", 3),
        ("epsilon", 3),
        ("noise", 1),
        ("free", 1),
        ("12", 1),
    ],
)
def test_syllables(word: str, count: int) -> None:
    assert readability.syllables(word) == count


def test_reading_ease_is_that_of_the_formula(tmp_path: Path) -> None:
    page = page_of(tmp_path, "The cat sat on the mat.")
    assert page.flesch == pytest.approx(206.835 - 1.015 * 6 - 84.6 * 1)
