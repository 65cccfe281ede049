"""Run the notebooks of examples/notebooks and keep their outputs: `python tools/notebooks.py
[NOTEBOOK ...]`. With `--check` nothing is written, and a cell that fails ends it.

Every notebook runs in a kernel and an empty folder of its own, without internet.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "notebooks"
SECONDS = 600
LONG = 2000
"""Characters of a plain text that is kept beside its table."""


def notebooks() -> list[Path]:
    """All notebooks, in order."""
    return sorted(FOLDER.glob("*.ipynb"))


def run(path: Path) -> Any:
    """The notebook with the outputs of this machine."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(book, timeout=SECONDS, resources={"metadata": {"path": folder}})
        client.execute(env=_environment())
    for cell in book.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in map(_clean, cell.outputs) if output is not None]
    book.metadata.get("language_info", {}).pop("version", None)
    return book


def _environment() -> dict[str, str]:
    """Imports of this checkout, commands of this environment, and plots in the page."""
    paths = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": str(ROOT)}
    added = {
        name: os.pathsep.join([path, *filter(None, [os.environ.get(name)])])
        for name, path in paths.items()
    }
    return {
        **os.environ, **added, "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "HF_HUB_OFFLINE": "1", "DPFY_DATA": "", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip


def _clean(output: Any) -> Any:
    """An output without what belongs to this machine alone; None where nothing is left."""
    if output.output_type == "stream":
        if output.name == "stderr":
            return None
        output.text = re.sub(r"/\S*/(runs/)", r"\1", output.text)
    data = output.get("data", {})
    if "text/html" in data and (len(data["text/plain"]) > LONG or " at 0x" in data["text/plain"]):
        data["text/plain"] = "(shown as a table)"
    return output


def main(arguments: list[str]) -> int:
    """Run those that are named, or all."""
    import nbformat

    named = [Path(word) for word in arguments if not word.startswith("--")]
    for path in named or notebooks():
        start = time.perf_counter()
        book = run(path)
        if "--check" not in arguments:
            nbformat.write(book, path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
