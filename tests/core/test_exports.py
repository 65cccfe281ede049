"""Names that are found when first used: each is where it is said to be, and listed once."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from dpfy.core.plugins import lazy_names

ROOT = Path(__file__).parents[2] / "dpfy"
PACKAGES = sorted(
    ".".join(file.relative_to(ROOT.parent).parent.parts)
    for file in ROOT.rglob("__init__.py")
    if "lazy_names" in file.read_text() and "flower" not in file.parts
)


def test_a_name_is_imported_when_it_is_used() -> None:
    find, _ = lazy_names("dpfy.core", {"dpfy.core.unit": "Unit Adjacency"})
    assert find("Unit") is importlib.import_module("dpfy.core.unit").Unit
    with pytest.raises(AttributeError, match=r"module 'dpfy\.core' has no attribute 'Person'"):
        find("Person")


@pytest.mark.parametrize("name", PACKAGES)
def test_every_name_that_a_package_lists_is_found(name: str) -> None:
    package = importlib.import_module(name)
    assert dir(package) == sorted(package.__all__)
    for exported in package.__all__:
        assert getattr(package, exported) is not None


@pytest.mark.parametrize("name", PACKAGES)
def test_types_are_those_that_are_found(name: str) -> None:
    """What a type checker reads under TYPE_CHECKING is what `lazy_names` finds."""
    file = ROOT.parent.joinpath(*name.split("."), "__init__.py")
    typed: dict[str, set[str]] = {}
    found: dict[str, set[str]] = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.If):
            for part in node.body:
                assert isinstance(part, ast.ImportFrom)
                typed.setdefault(part.module or "", set()).update(a.name for a in part.names)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            homes = ast.literal_eval(node.value.args[1])
            found = {module: set(listed.split()) for module, listed in homes.items()}
    assert typed == found
