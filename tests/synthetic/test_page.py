"""docs/synthetic.md; its code is run by tests/docs."""

from __future__ import annotations

from pathlib import Path

from dpfy.synthetic.methods import METHODS
from dpfy.synthetic.plan import LAB

PAGE = (Path(__file__).parents[2] / "docs" / "synthetic.md").read_text()


def test_every_method_is_on_the_page():
    assert all(f"`{name}`" in PAGE for name in (*METHODS, *LAB))
