"""The tables of stored studies as Markdown: what docs/studies.md shows is generated, never typed."""

from __future__ import annotations

from pathlib import Path

from dpfy import studies
from dpfy.studies.page import made_on
from dpfy.studies.study import Options, stored

BEGIN, END = "<!-- tables of {name}: begin -->", "<!-- tables of {name}: end -->"
SHOWN = {
    "building-blocks": ("tries", "salary"),
    "images": ("results", "bill"),
    "dpsgd-dpftrl": ("epsilons-sgd", "epsilons-ftrl", "baselines", "table-1", "table-2", "table-3", "table-4"),
    "guide": ("appendix-c", "footnote-19"),
}
"""Which tables of each study are shown, in which order."""
FAST = ("building-blocks", "guide")
"""Studies whose stored cells are those of --fast."""


def tables(name: str, root: Path) -> str:
    """The chosen tables of the study `name`, from the cells in `root`/name, with hardware and time."""
    study = studies.study(name)
    results = stored(study, Options(fast=name in FAST), root / name)
    page = study.page(results)
    found = page.tables()
    parts = [f"**{found[key].caption}**\n\n{found[key].markdown()}" for key in SHOWN[name]]
    facts = page.facts | made_on(results)
    told = "; ".join(f"{key}: {facts[key]}" for key in ("runs and spread", "accountant", "hardware", "time"))
    return "\n\n".join(parts) + f"\n\n*{told}.*"


def filled(text: str, root: Path) -> str:
    """`text` with everything between the marks of each study replaced by its tables."""
    for name in SHOWN:
        begin, end = BEGIN.format(name=name), END.format(name=name)
        if begin not in text:
            continue
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = f"{head}{begin}\n\n{tables(name, root)}\n\n{end}{tail}"
    return text


if __name__ == "__main__":
    import sys

    docs = Path(sys.argv[1])
    page = docs / "studies.md"
    page.write_text(filled(page.read_text(), docs / "studies"))
