"""The privacy of a run in the README.md of a saved model, which hubs show as its model card."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from torch import nn

from dpfy.report.markdown import NAME
from dpfy.runs.folder import CARD
from dpfy.training import weights
from dpfy.training.load import ReleasedModel

BEGIN, END = "<!-- dpfy: begin -->", "<!-- dpfy: end -->"
FRONT = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)

OTHER = (
    "The weights saved here are not those that the run ended with. The guarantee covers those of "
    "every step of the run, and nothing that "
    "was done to them since."
)


def describe(folder: Path, run: Path, model: nn.Module) -> bool:
    """Put the report of the finished run `run` into the README.md of `folder`, and its card beside
    it. False while it is unfinished.

    What was there stays; an earlier report is replaced. Where `model` holds other weights than the
    run ended with, it says so.
    """
    if not (run / CARD).is_file() or not (run / NAME).is_file():
        return False
    folder.mkdir(parents=True, exist_ok=True)
    page, report = folder / "README.md", (run / NAME).read_text()
    held = (
        page.read_text()
        if page.is_file()
        else (front.group() if (front := FRONT.match(report)) else "")
    )
    note = "" if _released(model, run) else f"**{OTHER}**\n\n"
    body = f"{BEGIN}\n{note}{FRONT.sub('', report).strip()}\n{END}\n"
    if BEGIN in held and END in held:
        before, _, rest = held.partition(BEGIN)
        page.write_text(before + body + rest.partition(END)[2].lstrip("\n"))
    else:
        page.write_text(f"{held.rstrip()}\n\n{body}" if held else body)
    shutil.copyfile(run / CARD, folder / CARD)
    return True


def _released(model: nn.Module, run: Path) -> bool:
    """Whether `model` holds the weights that `run` released, in every bit."""
    held, mine = ReleasedModel.read(run).weights(), weights.released(model)
    return held.keys() == mine.keys() and all(
        torch.equal(t, mine[name].detach().cpu()) for name, t in held.items()
    )
