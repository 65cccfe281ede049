"""Classical learners on tables: the guide's comparisons, and what each family reaches. One module
for each part; this one joins them.
"""

from __future__ import annotations

from dpfy.core.errors import DpfyError
from dpfy_lab.studies import (
    classical_adult,
    classical_clusters,
    classical_convex,
    classical_regression,
    classical_trees,
)
from dpfy_lab.studies.classical_part import Part
from dpfy_lab.studies.page import Page
from dpfy_lab.studies.study import Cell, Options, Results, Study

PARTS: tuple[Part, ...] = (
    classical_adult.PART,
    classical_convex.PART,
    classical_regression.PART,
    classical_trees.PART,
    classical_clusters.PART,
)


def cells(options: Options) -> list[Cell]:
    """Those of all parts."""
    found = []
    for part in PARTS:
        made = part.cells(options)
        if other := [cell.name for cell in made if not cell.name.startswith(f"{part.name}-")]:
            raise DpfyError(
                f"study classical: the cell {other[0]} is not named after its part, {part.name}"
            )
        found += made
    return found


def page(results: Results) -> Page:
    """The sections of all parts, in their order."""
    sections = []
    for part in PARTS:
        sections += part.sections(Results(results.starting(f"{part.name}-"), results.options))
    facts = {
        "seeds": "seeds of splits, folds and noise are fixed, so that the page can be made again",
        "runs and spread": "as each table says; where a table has a deviation, it is the standard "
        "deviation over splits or seeds",
        "accountant": "tight",
        "unit": "one record",
        "adjacency": "one record added or removed, unless a row says that it is replaced",
        "hyperparameters": " ".join(part.settings for part in PARTS),
    }
    return Page(sections, facts)


STUDY = Study(
    "classical",
    "Classical learners: linear models, trees, clusters",
    "The comparisons of the practical guide (Ponomareva et al. 2023, section 4.1 and appendix A) "
    "on UCI Adult, the regression sets of Wang "
    "2018, MNIST and made-up data.",
    cells,
    page,
)
