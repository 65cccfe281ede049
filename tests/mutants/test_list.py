"""The list of planted mistakes fits the code as it is. That each is noticed takes minutes: `make
mutants`.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("mutants_run", Path(__file__).with_name("run.py"))
run = importlib.util.module_from_spec(_spec)
__import__("sys").modules["mutants_run"] = run
_spec.loader.exec_module(run)
MUTANTS = run.mutants()


def test_there_are_enough_in_every_area():
    assert len(MUTANTS) >= 60
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    assert {m.area for m in MUTANTS} == set(run.AREAS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_mistake_can_be_planted(mutant):
    """It stands in one place, changes what the code does and not only its text, and the tests that
    must notice it exist.
    """
    before = (ROOT / mutant.file).read_text()
    after = mutant.planted(before)
    assert ast.dump(ast.parse(before)) != ast.dump(ast.parse(after))
    assert mutant.tests
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert test == "selftest" or (ROOT / path).exists(), test
        assert not name or name.partition("[")[0] in (ROOT / path).read_text(), test
