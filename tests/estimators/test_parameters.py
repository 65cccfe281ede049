"""Docstrings of estimators: every parameter is described, and every example runs."""

from __future__ import annotations

import doctest
import pydoc
import re

import pytest

from dpfy.estimators.estimator import every
from dpfy.estimators.parameters import ENTRY, documented, entries, sections

NAMES = sorted(every())


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_described_once_with_its_default(name):
    kind = every()[name]
    found = entries(sections(kind.__doc__)["Parameters"])
    known = kind().get_params(deep=False)
    assert set(found) == set(known)
    assert len(ENTRY.findall(sections(kind.__doc__)["Parameters"])) == len(known)
    for parameter, value in known.items():
        assert len(found[parameter].splitlines()) > 1, f"{parameter} is not explained"
        said = re.search(r"default=(\S+)$", found[parameter].splitlines()[0])
        assert said is not None, parameter
        assert said.group(1) == (f'"{value}"' if isinstance(value, str) else str(value)), parameter


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_own_and_inherited_parts(name):
    told = pydoc.plain(pydoc.render_doc(every()[name]))
    for part in ("epsilon : float", "unit : dpfy.Person", "report_ : dict", ">>> model = "):
        assert part in told or (part.startswith(">>>") and name == "PrivateScaler")


@pytest.mark.parametrize("name", NAMES)
def test_the_example_runs_as_printed(name):
    kind = every()[name]
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder(recurse=False).find(kind, name, globs={}):
        assert test.examples
        assert runner.run(test).failed == 0


def test_the_nearest_description_counts():
    class Base:
        """One.

        Parameters
        ----------
        a : int, default=1
            Of the base.
        b : int, default=2
            Also.
        """

    class Own(Base):
        """Two.

        Parameters
        ----------
        a : int, default=3
            Its own.

        Examples
        --------
        >>> 1
        1
        """

    text = documented(Own)
    assert text.startswith("Two.\n\nParameters\n----------\na : int, default=3\n    Its own.\n")
    assert "Of the base" not in text
    assert text.index("b : int") < text.index("Examples")
