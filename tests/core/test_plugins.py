"""The kinds that dpfy registers itself: the list is whole, each name leads to its class, and none
can be taken.
"""

from __future__ import annotations

import ast
import importlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from dpfy.core import plugins
from dpfy.core.claim import Claim, kind_of, register
from dpfy.core.errors import InvalidInput

ROOT = Path(plugins.__file__).parents[1]
KINDS = plugins.own(plugins.CLAIMS)


@pytest.mark.parametrize("name", KINDS)
def test_each_name_leads_to_its_class(name: str) -> None:
    found = kind_of(name)
    assert issubclass(found, Claim)
    assert KINDS[name] == f"{found.__module__}:{found.__qualname__}"
    assert found.kind == name


def test_every_registered_class_is_listed() -> None:
    registered = set()
    for file in ROOT.rglob("*.py"):
        module = ".".join(file.relative_to(ROOT.parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                names = {ast.unparse(decorator) for decorator in node.decorator_list}
                if names & {"register", "claim.register"}:
                    registered.add(f"{module}:{node.name}")
    assert registered == {*KINDS.values()}


def test_the_metadata_is_made_from_the_list() -> None:
    """Whoever reads the entry points of the distribution finds the same."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    settings = project["tool"]["setuptools"]
    assert settings["dynamic"]["entry-points"] == {"file": [f"dpfy/{plugins.OWN}"]}
    assert plugins.OWN in settings["package-data"]["dpfy"]


def test_a_kind_of_dpfy_cannot_be_taken() -> None:
    @dataclass(frozen=True)
    class Mine(Claim):
        kind: ClassVar[str] = "training"
        purpose: ClassVar[str] = "statistics"

    with pytest.raises(InvalidInput, match=r"is taken by dpfy\.plan\.claim:Training"):
        register(Mine)
    assert kind_of("training").__module__ == importlib.import_module("dpfy.plan.claim").__name__


def test_unknown_names_are_nothing() -> None:
    assert plugins.find(plugins.CLAIMS, "no such kind") is None
    assert plugins.find("no.such.group", "training") is None
    assert plugins.own("no.such.group") == {}
