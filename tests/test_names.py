"""One name, one thing: no public class name has two homes in the project; no module has the name of
a standard library module; no small file serves a single importer; files of gradients/ stay short.
"""

from __future__ import annotations

import ast
import importlib
import io
import re
import sys
import tokenize
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

import dpfy

ROOT = Path(__file__).parent.parent / "dpfy"
PACKAGES = sorted(p.name for p in ROOT.iterdir() if (p / "__init__.py").exists())
PROJECT = ROOT.parent
SOURCES = sorted(
    file
    for package in (ROOT, PROJECT / "lab" / "dpfy_lab")
    for file in package.rglob("*.py")
    if "__pycache__" not in file.parts
)
MOST_LINES = 450
FEWEST_LINES = 25
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


def module(file: Path) -> str:
    """The dotted name of a file of the project."""
    root = ROOT.parent if file.is_relative_to(ROOT) else PROJECT / "lab"
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def two_homes(files: list[Path]) -> dict[str, list[str]]:
    """Public class name to the modules that define it, where there are several."""
    homes: dict[str, set[str]] = defaultdict(set)
    for file in files:
        for name, meaning in types(file).items():
            if meaning.startswith("a class of "):
                homes[name].add(str(file))
    return {name: sorted(where) for name, where in homes.items() if len(where) > 1}


def test_no_public_class_name_has_two_homes() -> None:
    assert two_homes(SOURCES) == {}


def test_two_homes_are_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class Terms: ...\nclass _Own: ...\nPiece = int\n")
    (tmp_path / "two.py").write_text("if True:\n    class Terms: ...\nclass _Own: ...\nPiece = 1\n")
    assert list(two_homes(sorted(tmp_path.glob("*.py")))) == ["Terms"]


def test_no_module_has_the_name_of_a_standard_library_module() -> None:
    """`dpfy.statistics` is the name of a family: a package of dpfy is only ever named with it."""
    names = {module(f) for f in SOURCES if f.parent != ROOT and f.parent.parent != PROJECT / "lab"}
    shadows = {n for n in names if n.rpartition(".")[2] in sys.stdlib_module_names}
    assert shadows - {"dpfy.statistics"} == set()


def lines_of_code(text: str) -> int:
    """Lines that hold code: without docstrings, comments and blank lines."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                prose |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout | {tokenize.ENDMARKER}:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - prose)


def test_lines_of_code_leave_out_docstrings_comments_and_blank_lines() -> None:
    text = '"""Two\nlines."""\n\n# why\nx = [\n    1,\n]\n\n\ndef f():\n    """What."""\n    return 1\n'
    assert lines_of_code(text) == 5


def importers(files: list[Path]) -> dict[str, set[str]]:
    """Module to the modules that import it, also lazily: by a string that is its name."""
    known = {module(f) for f in files}
    found: dict[str, set[str]] = {name: set() for name in known}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                parts = [f"{node.module}.{a.name}" for a in node.names]
                names = [p if p in known else node.module for p in parts]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = [node.value]
            for name in set(names) & known:
                found[name].add(module(file))
    return found


def entry_points() -> set[str]:
    """Modules that the installed distributions name: commands, claims, the program itself."""
    named: set[str] = set()
    for file in (PROJECT / "pyproject.toml", PROJECT / "lab" / "pyproject.toml"):
        if file.exists():
            project = tomllib.loads(file.read_text())["project"]
            tables = [project.get("scripts", {}), *project.get("entry-points", {}).values()]
            named |= {value.partition(":")[0] for table in tables for value in table.values()}
    own = (ROOT / "entry_points.txt").read_text()
    return named | set(re.findall(r"= ([\w.]+):", own))


def test_no_small_file_serves_a_single_importer() -> None:
    """Such a file costs its reader a jump and saves nobody anything: it belongs where it is used."""
    used, exempt = importers(SOURCES), entry_points()
    small = {
        module(file): sorted(used[module(file)])
        for file in SOURCES
        if file.name not in ("__init__.py", "__main__.py")
        and module(file) not in exempt
        and len(used[module(file)]) <= 1
        and lines_of_code(file.read_text()) < FEWEST_LINES
    }
    assert small == {}


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


def test_dpfy_exports_what_it_lists_and_nothing_else() -> None:
    """A name is `dpfy.X` if and only if `__all__` holds it, and stands in one line of the file."""
    text = (ROOT / "__init__.py").read_text()
    written = re.findall(r"^ +from \S+ import (\w+) as \w+$", text, re.MULTILINE)
    assert sorted(written) == sorted(set(written)) == sorted(dpfy.__all__)
    assert len(dpfy.__all__) <= 48
    for name in dpfy.__all__:
        assert getattr(dpfy, name) is not None
    for name in {name for file in SOURCES for name in types(file)} - set(dpfy.__all__):
        assert not hasattr(dpfy, name), name


OLD_WORDS = re.compile(r"\b\w*(?:Terms|Options)\b|\bPlace\b")
"""What settings were called; a reader looks for `Budget`, `Run` and keyword arguments."""


def exported(files: list[Path]) -> set[str]:
    """The names in `__all__` of the packages that import none of the optional libraries."""
    found: set[str] = set()
    for file in files:
        if file.name == "__init__.py" and "integrations" not in file.parts:
            found |= set(getattr(importlib.import_module(module(file)), "__all__", ()))
    return found


def test_no_public_name_is_one_of_the_old_words() -> None:
    assert {name for name in exported(SOURCES) if OLD_WORDS.fullmatch(name)} == set()


@pytest.mark.parametrize(
    "page",
    [
        PROJECT / "README.md",
        *sorted(DOCS.rglob("*.md")),
        *sorted((PROJECT / "examples").rglob("*.py")),
    ],
    ids=lambda p: p.name,
)
def test_no_page_or_example_uses_one_of_the_old_words(page: Path) -> None:
    text = page.read_text()
    if page.suffix == ".md":
        text = "\n".join(re.findall(r"```python\n.*?```|`[^`\n]+`", text, re.DOTALL))
    assert OLD_WORDS.findall(text) == []
