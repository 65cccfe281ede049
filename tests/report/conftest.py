"""Finished runs, each made once, for all tests of this folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import runs


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The folder of the run called by a name; do not change it."""
    home, known = tmp_path_factory.mktemp("runs"), {}

    def make(name: str) -> Path:
        if name not in known:
            known[name] = (runs.FIVE | runs.MORE)[name](home / name)
        return known[name]

    return make
