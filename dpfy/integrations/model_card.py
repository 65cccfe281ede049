"""The privacy of a run in the README.md of a saved model, which hubs show as its model card."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from dpfy.report.markdown import NAME
from dpfy.runs.folder import CARD

BEGIN, END = "<!-- dpfy: begin -->", "<!-- dpfy: end -->"
FRONT = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)


def describe(folder: Path, run: Path) -> bool:
    """Put the report of the finished run `run` into the README.md of `folder`, and its card beside it. False while it is unfinished.

    What was there stays; an earlier report is replaced.
    """
    if not (run / CARD).is_file() or not (run / NAME).is_file():
        return False
    folder.mkdir(parents=True, exist_ok=True)
    page, report = folder / "README.md", (run / NAME).read_text()
    held = page.read_text() if page.is_file() else (front.group() if (front := FRONT.match(report)) else "")
    body = f"{BEGIN}\n{FRONT.sub('', report).strip()}\n{END}\n"
    if BEGIN in held and END in held:
        before, _, rest = held.partition(BEGIN)
        page.write_text(before + body + rest.partition(END)[2].lstrip("\n"))
    else:
        page.write_text(f"{held.rstrip()}\n\n{body}" if held else body)
    shutil.copyfile(run / CARD, folder / CARD)
    return True
