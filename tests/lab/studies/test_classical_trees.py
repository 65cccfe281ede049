"""The parts of the study of classical learners on trees and clusters: their short forms run, and
pages say what was measured.
"""

from __future__ import annotations

import pytest

from dpfy_lab.studies import classical_clusters, classical_trees
from dpfy_lab.studies.study import Options, Results, Stored


@pytest.mark.parametrize(
    ("part", "chosen"),
    [(classical_clusters, "clusters-overlapping-2-0.5"), (classical_trees, "trees-few-4")],
)
def test_a_cell_of_the_short_form_is_computed_and_shown(part, chosen):
    cells = {cell.name: cell for cell in part.PART.cells(Options(fast=True))}
    assert all(name.startswith(f"{part.PART.name}-") for name in cells)
    cell = cells[chosen]
    result = dict(cell.compute())
    (section,) = part.PART.sections(
        Results([Stored(chosen, dict(cell.settings), result, {})], Options(fast=True))
    )
    assert len(section.parts) == (2 if part is classical_clusters else 1)
    for table in section.parts:
        assert len(table.rows) == 1
        assert len(table.rows[0]) == len(table.columns)
    assert part.PART.sections(Results([], Options(fast=True))) == []


def test_the_last_column_says_who_is_better():
    same = {"hybrid": [1.0, 1.0], "coreset": [1.0, 1.0], classical_clusters.MANY: [1.15, 1.15]}
    settings = {"records": 1, "seeds": 2, "epsilon": 1.0}
    held = [
        Stored(
            f"clusters-images-{d}-1",
            {**settings, "dimensions": d},
            {"lloyd": [a, a], "synopsis": [b, b], **same},
            {},
        )
        for d, a, b in ((2, 1.2, 1.1), (10, 1.1, 1.2))
    ]
    rows = classical_clusters.rows_of("images", Results(held, Options()))
    assert [row[-2:] for row in rows] == [["yes", "yes"], ["no", "no"]]


def test_the_short_form_has_no_images():
    assert not [
        c.name
        for c in classical_clusters.cells(Options(fast=True))
        if any(k in c.name for k in ("images", "stretched", "adult"))
    ]
    whole = classical_clusters.cells(Options())
    places = sum(len(widths) for widths in classical_clusters.WIDTHS.values())
    assert len({c.name for c in whole}) == len(whole) == places * len(classical_clusters.EPSILONS)
