"""Every public name of a family says what it takes, gives and raises, with an example that runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

FAMILIES = (
    "dpfy",
    "dpfy.accounting",
    "dpfy.estimators",
    "dpfy.mechanisms",
    "dpfy.tables",
    "dpfy.testing",
)
"""Families whose public names are documented in full."""

OTHER_STYLE = {"Args:": "Parameters\n---", "Example:": "Examples\n---"}
"""What parts are called in the docstrings of estimators, which follow scikit-learn."""


def public(family: str) -> list[tuple[str, Any]]:
    """The functions and classes that a family exports."""
    module = importlib.import_module(family)
    named = [(f"{family}.{name}", getattr(module, name)) for name in module.__all__]
    return [
        (name, what) for name, what in named if inspect.isfunction(what) or isinstance(what, type)
    ]


def parts(what: Any) -> list[str]:
    """The parts that the docstring of a function or class must have."""
    if isinstance(what, type) and issubclass(what, BaseException):
        return []
    wanted = ["Example:"]
    signature = inspect.signature(what)
    if any(name != "self" for name in signature.parameters):
        wanted.append("Args:")
    if inspect.isfunction(what):
        wanted.append("Raises:")
        if signature.return_annotation not in (None, "None"):
            wanted.append("Returns:")
    return wanted


NAMES = [pytest.param(what, id=name) for family in FAMILIES for name, what in public(family)]


@pytest.mark.parametrize("what", NAMES)
def test_a_public_name_says_what_it_takes_gives_and_raises(what: Any) -> None:
    text = inspect.getdoc(what) or ""
    assert text.split("\n")[0].strip()
    missing = [
        part
        for part in parts(what)
        if f"\n{part}" not in text and f"\n{OTHER_STYLE.get(part, part)}" not in text
    ]
    assert missing == []


@pytest.mark.parametrize("what", NAMES)
def test_the_example_of_a_public_name_runs(
    what: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(what.__module__)
    tests = doctest.DocTestFinder(recurse=False).find(what, what.__name__, module, {})
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in tests:
        said: list[str] = []
        runner.run(test, out=said.append)
        assert runner.failures == 0, "".join(said)
