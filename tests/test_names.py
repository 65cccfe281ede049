"""One name, one thing: no two modules of a package define a public class of the same name, and no file of gradients/ grows too long."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "dpfy"
PACKAGES = sorted(p.name for p in ROOT.iterdir() if (p / "__init__.py").exists())
MOST_LINES = 400


def classes(file: Path) -> set[str]:
    """The public classes and type aliases that a module defines at its top, also under `if` and `try`."""
    found: set[str] = set()
    todo = list(ast.parse(file.read_text()).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If | ast.Try):
            todo += [*node.body, *node.orelse, *(n for h in getattr(node, "handlers", []) for n in h.body)]
        elif isinstance(node, ast.ClassDef):
            found.add(node.name)
    return {name for name in found if not name.startswith("_")}


def homonyms(files: list[Path]) -> dict[str, list[str]]:
    """Name to the modules that define it, for names that more than one does."""
    where: dict[str, list[str]] = defaultdict(list)
    for file in files:
        for name in classes(file):
            where[name].append(file.stem)
    return {name: sorted(modules) for name, modules in where.items() if len(modules) > 1}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_two_modules_of_a_package_define_a_public_class_of_one_name(package: str) -> None:
    assert homonyms(sorted((ROOT / package).rglob("*.py"))) == {}


def test_homonyms_are_found(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "one.py").write_text("class Layout: ...\nclass _Own: ...\n")
    (tmp_path / "room" / "two.py").write_text("try:\n    class Layout: ...\nexcept ImportError:\n    pass\nclass _Own: ...\n")
    assert homonyms(sorted(tmp_path.rglob("*.py"))) == {"Layout": ["one", "two"]}


@pytest.mark.parametrize("file", sorted((ROOT / "gradients").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_of_gradients_stay_short(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= MOST_LINES
