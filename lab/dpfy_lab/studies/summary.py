"""The tables of stored studies as Markdown: what docs/studies.md shows is generated, never
typed.
"""

from __future__ import annotations

from pathlib import Path

from dpfy_lab import studies
from dpfy_lab.studies.page import made_on
from dpfy_lab.studies.study import Options, Results, Study, stored

BEGIN, END = "<!-- tables of {name}: begin -->", "<!-- tables of {name}: end -->"
SHOWN = {
    "building-blocks": ("tries", "rates", "salary"),
    "building-blocks-5000": ("tries", "rates"),
    "images": ("results", "bill"),
    "cifar10": ("results", "tuning"),
    "dpsgd-dpftrl": (
        "epsilons-sgd",
        "epsilons-ftrl",
        "baselines",
        "table-1",
        "table-2",
        "table-3",
        "table-4",
        "momentum",
        "ours",
        "fashion",
    ),
    "guide": ("appendix-c", "footnote-19"),
    "labels": ("results", "validation"),
    "metric-text": ("words",),
    "prediction": ("answers", "models", "numbers"),
    "federated": ("results", "claims"),
    "classical": (
        "adult",
        "convex-noise",
        "convex-tuned",
        "convex-slopes",
        "regression",
        "mnist",
        "trees-all",
        "trees-few",
        "clusters-by-dimensions",
        "clusters-images",
        "clusters-stretched",
        "clusters-adult",
        "clusters-overlapping",
        "clusters-far-apart",
    ),
    "tuning": ("searches", "scaling", "grid", "strategies"),
    "synthetic": ("errors", "learners"),
    "synthetic-images": ("accuracy",),
}
"""Which tables of each stored study are shown, in which order, by the name of its folder."""
VARIANTS = {"building-blocks-5000": ("building-blocks", Options(data_dir="mnist"))}
"""Folders that hold a study run with other options than none."""


def kept(folder: str, root: Path) -> tuple[Study, Results]:
    """The study whose cells lie in `root`/`folder`, and those cells."""
    name, options = VARIANTS.get(folder, (folder, Options()))
    study = studies.study(name)
    return study, stored(study, options, root / folder)


def tables(folder: str, root: Path) -> str:
    """The chosen tables of a stored study, from the cells in `root`/`folder`, with everything that
    a page says about its runs.
    """
    study, results = kept(folder, root)
    page = study.page(results)
    found = page.tables()
    parts = [f"**{found[key].caption}**\n\n{found[key].markdown()}" for key in SHOWN[folder]]
    told = "; ".join(
        f"{key}: {value}"
        for key, value in (page.facts | made_on(results)).items()
        if key != "versions"
    )
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
