"""Pages, help texts and messages use none of the words of the old style that tools/wording.py lists,
and the tool finds them where they are.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import wording  # noqa: E402


def test_no_word_of_the_old_style_is_used() -> None:
    assert wording.found() == []


def test_the_list_is_long_enough() -> None:
    assert len(wording.INSTEAD) >= 60


@pytest.mark.parametrize("old", wording.INSTEAD)
def test_every_phrase_is_found_in_any_case_and_over_the_end_of_a_line(old: str) -> None:
    text = "It is " + old.replace(" ", "\n").upper() + ", say."
    assert old in [word for word, _ in wording.hits(text)]


@pytest.mark.parametrize(
    "text", ["a bill of materials", "billboard", "card.json", "privacy-card-2", "retold"]
)
def test_other_words_are_not(text: str) -> None:
    assert wording.hits(text) == []


def test_messages_and_help_are_read_and_names_are_not() -> None:
    source = (
        'def f():\n    """Was billed."""\n    raise ValueError(f"{x} was billed")\n'
        'key = "billed"\nrule = \'goes with data.test = "billed"\'\n'
    )
    tree = ast.parse(source)
    seen = [[wording.hits(text) for _, text in wording._texts(tree, command)] for command in (0, 1)]
    assert [sum(map(len, each)) for each in seen] == [1, 2]
