"""The notebooks of examples/notebooks are stored with outputs and plots, show nothing of the machine
that made them, and run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import notebooks  # noqa: E402

BOOKS = notebooks.notebooks()
QUICK = "5-statistics-and-sql.ipynb"


def cells(path: Path) -> list[dict[str, Any]]:
    """The cells of code."""
    stored = json.loads(path.read_text("utf-8"))["cells"]
    return [cell for cell in stored if cell["cell_type"] == "code"]


def test_there_are_eight() -> None:
    assert len(BOOKS) == 8


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_outputs_and_plots_are_stored(path: Path) -> None:
    found = cells(path)
    assert [cell["execution_count"] for cell in found] == list(range(1, len(found) + 1))
    outputs = [output for cell in found for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = path.read_text("utf-8")
    assert not [word for word in ("/work", "/tmp", "/home", "/root", " at 0x") if word in text]


def test_a_notebook_runs_as_it_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {}
    for cell in cells(ROOT / "examples" / "notebooks" / QUICK):
        exec("".join(cell["source"]), space)
    assert list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_every_notebook_runs(path: Path) -> None:
    pytest.importorskip("nbclient")
    book = notebooks.run(path)
    assert all(
        output.output_type != "error"
        for cell in book.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
