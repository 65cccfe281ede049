"""One name, one thing: no two modules of a package define public classes or aliases of one name;
files of gradients/ stay short.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "dpfy"
PACKAGES = sorted(p.name for p in ROOT.iterdir() if (p / "__init__.py").exists())
MOST_LINES = 400
ALIAS = re.compile(r"[A-Z][a-z]\w*")


def types(file: Path) -> dict[str, str]:
    """The public classes and type aliases that a module defines at its top, also under `if` and
    `try`, and what they stand for.
    """
    found: dict[str, str] = {}
    todo = list(ast.parse(file.read_text()).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If | ast.Try):
            todo += [
                *node.body,
                *node.orelse,
                *(n for h in getattr(node, "handlers", []) for n in h.body),
            ]
        elif isinstance(node, ast.ClassDef):
            found[node.name] = f"a class of {file}"
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and ALIAS.fullmatch(node.targets[0].id)
        ):
            found[node.targets[0].id] = ast.unparse(node.value)
    return {name: meaning for name, meaning in found.items() if not name.startswith("_")}


def homonyms(files: list[Path]) -> dict[str, list[str]]:
    """Name to the modules that define it, for names that stand for more than one thing."""
    where: dict[str, dict[str, str]] = defaultdict(dict)
    for file in files:
        for name, meaning in types(file).items():
            where[name][meaning] = file.stem
    return {name: sorted(things.values()) for name, things in where.items() if len(things) > 1}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_two_modules_of_a_package_define_a_public_type_of_one_name(package: str) -> None:
    assert homonyms(sorted((ROOT / package).rglob("*.py"))) == {}


def test_homonyms_are_found(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "one.py").write_text(
        "class Layout: ...\nclass _Own: ...\nPiece = tuple[int, int]\nKey = tuple[int, ...]\n"
    )
    (tmp_path / "room" / "two.py").write_text(
        "try:\n    class Layout: ...\nexcept ImportError:\n    pass\nclass _Own: ...\nclass Piece: "
        "...\nKey = tuple[int, ...]\n"
    )
    assert homonyms(sorted(tmp_path.rglob("*.py"))) == {
        "Layout": ["one", "two"],
        "Piece": ["one", "two"],
    }


@pytest.mark.parametrize(
    "file", sorted((ROOT / "gradients").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_files_of_gradients_stay_short(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= MOST_LINES


DOCS = ROOT.parent / "docs"
ROOMS = sorted(p.name for p in (ROOT / "gradients").iterdir() if (p / "__init__.py").exists())


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda p: p.name)
def test_files_that_the_docs_name_exist(page: Path) -> None:
    """With folders from the project, dpfy/ or a package of it on; without, wherever they are."""
    packages = [ROOT.parent, ROOT, *(p for p in ROOT.rglob("*") if (p / "__init__.py").exists())]
    anywhere = {
        p.name
        for folder in ("dpfy", "tests", "benchmarks")
        for p in (ROOT.parent / folder).rglob("*.py")
    }
    named = set(re.findall(r"`([\w/]+\.py)`", page.read_text()))
    assert {
        name
        for name in named
        if name not in anywhere and not any((folder / name).exists() for folder in packages)
    } == set()


def test_the_path_of_the_data_names_every_room() -> None:
    text = (DOCS / "path-of-the-data.md").read_text()
    assert [room for room in ROOMS if f"`{room}/" not in text] == []


def test_no_two_folders_of_tests_have_a_module_of_one_name_to_share() -> None:
    """Tests put their folders on one path: of two modules of one name, one process would get the
    other's.
    """
    shared = [p.name for p in Path(__file__).parent.rglob("*.py") if not p.name.startswith("test_")]
    known = {"conftest.py", "__init__.py"}
    assert sorted(name for name in set(shared) - known if shared.count(name) > 1) == []
