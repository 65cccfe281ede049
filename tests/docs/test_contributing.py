"""CONTRIBUTING.md says where a change goes: at most two existing files for each kind of change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHANGES = (
    "layer rule",
    "sampler",
    "event",
    "noise strategy",
    "accountant",
    "clip rule",
    "kind of release",
    "command",
    "flag",
    "report field",
    "integration",
    "estimator",
    "seeded mistake",
    "device",
    "dtype",
)


def rows() -> dict[str, tuple[list[str], str]]:
    """The files to edit, and what to add, for each change of the table."""
    found = {}
    for line in (ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and "](" in cells[1]:
            found[cells[0]] = re.findall(r"\]\(([^)]+)\)", cells[1]), cells[2]
    return found


def test_every_typical_change_has_a_row() -> None:
    assert tuple(rows()) == CHANGES


@pytest.mark.parametrize("change", CHANGES)
def test_at_most_two_existing_files_are_edited(change: str) -> None:
    files, words = rows()[change]
    assert 1 <= len(files) <= 2
    texts = [(ROOT / file).read_text("utf-8") for file in files]
    for name in re.findall(r"`([A-Z_]{4,})`", words):  # the tables that the row tells to extend
        assert any(name in text for text in texts) or "instead" in words, name
