"""What lies in a run folder beside the ledger's own words: files that nothing names, pages of other
versions, audits.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from dpfy.report import html_page, prose

MOST_TEXT = 1 << 20
TEXTS = (
    "",
    ".md",
    ".txt",
    ".rst",
    ".html",
    ".htm",
    ".toml",
    ".yaml",
    ".yml",
    ".json",
    ".log",
    ".cfg",
    ".ini",
    ".bib",
    ".cff",
    ".svg",
)
"""Kinds of files that may lie in a run folder and be named as not covered. Whatever could hold a
model or records is refused.
"""
PICTURES = {
    ".png": b"\x89PNG\r\n\x1a\n",
    ".jpg": b"\xff\xd8\xff",
    ".jpeg": b"\xff\xd8\xff",
    ".pdf": b"%PDF-",
}
REPOSITORY = (".git", ".hg", ".svn", "__pycache__")


def unnamed(folder: Path, named: set[str]) -> tuple[list[str], list[str]]:
    """Files that nothing names: those that could be a model or data, and are refused; and texts and
    pictures, to be listed.
    """
    refused: list[str] = []
    listed: list[str] = []
    for place in sorted(folder.iterdir()):
        if place.name in named or (
            place.name == "checkpoint" and place.exists()
        ):  # what is left of secrets is another check
            continue
        if place.is_dir() and not place.is_symlink():
            if place.name in REPOSITORY:
                listed.append(f"{place.name}/")
                continue
            for root, folders, files in os.walk(place):
                inner = [
                    Path(root, name)
                    for name in (*files, *(f for f in folders if Path(root, f).is_symlink()))
                ]
                for found in sorted(inner):
                    (listed if harmless(found) else refused).append(
                        found.relative_to(folder).as_posix()
                    )
        else:
            (listed if harmless(place) else refused).append(place.name)
    return refused, listed


def harmless(file: Path) -> bool:
    """Whether a file is a text or a picture by name and content. A link could become anything."""
    if file.is_symlink() or not file.is_file():
        return False
    suffix = file.suffix.lower()
    if suffix in PICTURES:
        with file.open("rb") as opened:
            return opened.read(len(PICTURES[suffix])) == PICTURES[suffix]
    if suffix not in TEXTS or file.stat().st_size > MOST_TEXT:
        return False
    try:
        text = file.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return not any(c < " " and c not in "\t\n\r\f" for c in text)


def strange_numbers(
    name: str, content: bytes, card: dict[str, Any], known: prose.Known, ours: str
) -> str | None:
    """What the page of another version states in numbers that neither the report nor our page of it
    states; None if nothing.
    """
    page, mine = content.decode(errors="replace"), ours
    if name == html_page.NAME:
        (page, strange), (mine, expected) = prose.page_text(page), prose.page_text(mine)
        if extra := [what for what in strange if what not in expected]:
            return extra[0]
    every = prose.Known.of(card, texts=[mine])
    called = [what for what in known.misnamed(page) if what not in known.misnamed(mine)]
    rows = [repr(row[:80]) for row in prose.strange_rows(page, mine)]
    return next(iter([*called, *rows]), None) or every.stranger(page)


def audit_problem(audit: dict[str, Any]) -> str | None:
    """What in an audit does not fit its own figures: its sentence, its share of the claim, whether
    the claim is violated.
    """
    lower, claimed = _number(audit.get("epsilon_lower")), _number(audit.get("epsilon_claimed"))
    if lower is None or lower < 0:
        return "audit.json: epsilon_lower is no epsilon"
    if claimed is not None:
        violated, share = audit.get("violated"), _number(audit.get("share_of_claim"))
        if violated is not None and violated != (lower > claimed):
            return (
                f"audit.json: violated is {violated}, and epsilon is at least {lower} where "
                f"{claimed} is claimed"
            )
        if (
            share is not None
            and 0 < claimed < math.inf
            and not math.isclose(share, lower / claimed, rel_tol=1e-6, abs_tol=1e-9)
        ):
            return (
                f"audit.json: share_of_claim is {share}, and epsilon_lower / epsilon_claimed is "
                f"{lower / claimed:.6g}"
            )
    if isinstance(said := audit.get("sentence"), str):
        known = prose.Known.of(
            {key: value for key, value in audit.items() if key != "sentence"}
        ).all
        for figure in prose.figures(said):
            if not any(figure.rounds(other) for other in known):
                return (
                    f"audit.json: its sentence states {figure.text}, which is none of its figures"
                )
    return None


def _number(value: Any) -> float | None:
    if value == "infinity":
        return math.inf
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
