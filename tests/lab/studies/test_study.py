"""The frame: cells are stored one by one and taken up again only for the same settings; pages say
what they must.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpfy.core.errors import Corrupt, InvalidInput
from dpfy_lab.studies import figures
from dpfy_lab.studies.page import FACTS, Figure, Page, Section, Table, shown, spread
from dpfy_lab.studies.study import (
    Cell,
    Options,
    Results,
    Study,
    load_cell,
    run,
    run_cell,
    stored,
)

TOLD = dict.fromkeys(FACTS, "told")


def study(
    calls: list[str], *, factor: int = 2, facts: dict[str, str] | None = None, fail: str = ""
) -> Study:
    def cell(name: str, value: int) -> Cell:
        def compute() -> dict[str, int]:
            calls.append(name)
            if name == fail:
                raise KeyboardInterrupt
            return {"value": value * factor}

        return Cell(name, {"value": value, "factor": factor}, compute)

    def page(results: Results) -> Page:
        rows = [[name, float(cell.result["value"])] for name, cell in results.items()]
        line = figures.Line("values", [0, 1], [row[1] for row in rows])
        picture = Figure("picture", "a < b", figures.lines([line], figures.Axes("x", "y")))
        return Page(
            [Section("Values", "", [Table("values", "All", ("name", "value"), rows), picture])],
            TOLD if facts is None else facts,
        )

    return Study("toy", "A toy", "nobody", lambda options: [cell("one", 1), cell("two", 2)], page)


def test_a_stopped_study_goes_on_where_it_was(tmp_path: Path) -> None:
    calls: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(study(calls, fail="two"), Options(), tmp_path)
    assert calls == ["one", "two"]
    assert [p.name for p in (tmp_path / "cells").iterdir()] == ["one.json"]
    run(study(calls), Options(), tmp_path)
    assert calls == ["one", "two", "two"]
    run(study(calls), Options(), tmp_path)
    assert calls == ["one", "two", "two"]


def test_a_cell_with_other_settings_is_computed_again(tmp_path: Path) -> None:
    calls: list[str] = []
    run(study(calls), Options(), tmp_path)
    run(study(calls, factor=3), Options(), tmp_path)
    assert calls == ["one", "two", "one", "two"]
    body = json.loads((tmp_path / "cells" / "two.json").read_text())
    assert body["result"] == {"value": 6}
    assert body["settings"] == {"value": 2, "factor": 3}
    assert {"seconds", "cpu_seconds", "device", "torch", "dpfy", "at"} <= set(body["made"])


def test_the_page_is_made_from_the_stored_cells_and_is_the_same_every_time(tmp_path: Path) -> None:
    calls: list[str] = []
    page = run(study(calls), Options(), tmp_path)
    first = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    assert set(first) == {"index.html", "values.csv", "picture.svg"}
    run(study(calls), Options(), tmp_path)
    assert first == {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    assert first["values.csv"] == b"name,value\none,2.0\ntwo,4.0\n"
    html = page.read_text()
    assert "<svg" in html
    assert "a &lt; b" in html
    for word in (*FACTS, "hardware", "versions", "time"):
        assert f"<td>{word}</td>" in html
    assert "http" not in html.replace("http://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "").replace("https://matplotlib.org", "")


@pytest.mark.parametrize("missing", FACTS)
def test_a_page_that_leaves_out_a_fact_is_refused(tmp_path: Path, missing: str) -> None:
    facts = {k: v for k, v in TOLD.items() if k != missing}
    with pytest.raises(ValueError, match=missing):
        run(study([], facts=facts), Options(), tmp_path)


def test_a_damaged_cell_is_named(tmp_path: Path) -> None:
    one = study([])
    run(one, Options(), tmp_path)
    (tmp_path / "cells" / "one.json").write_text('{"name": "one"')
    with pytest.raises(Corrupt, match=r"one\.json"):
        run(one, Options(), tmp_path)


def test_stored_computes_nothing(tmp_path: Path) -> None:
    calls: list[str] = []
    toy = study(calls)
    run_cell(toy.cells(Options())[1], tmp_path, Options())
    assert list(stored(toy, Options(), tmp_path)) == ["two"]
    assert calls == ["two"]
    assert load_cell(toy.cells(Options())[0], tmp_path) is None


@pytest.mark.parametrize("name", ["", "../up", "Big", "a b", "-x"])
def test_a_cell_name_is_a_file_name(name: str) -> None:
    with pytest.raises(InvalidInput, match="cell"):
        Cell(name, {}, dict)


def test_numbers_in_print() -> None:
    assert [shown(v) for v in (None, 3, "x", 98.834, 0.000154, 1234.5)] == [
        "-",
        "3",
        "x",
        "98.83",
        "0.000154",
        "1234",
    ]
    score = spread([0.5, 0.7])
    assert score["mean"] == pytest.approx(60)
    assert score["worst"] == 50
    assert score["deviation"] == pytest.approx(14.142, abs=1e-3)
    assert spread([0.5])["deviation"] is None
    assert (
        Table("t", "", ("a", "b"), [["x", 1.5]]).markdown() == "| a | b |\n|---|---|\n| x | 1.50 |"
    )


@pytest.mark.slow
def test_cells_are_computed_several_at_a_time(tmp_path: Path) -> None:
    """The same results as one by one, each stored once, with how many shared the machine."""
    from dpfy_lab.studies import guide, parallel

    options, names = Options(fast=True), ["accountants", "figure1-16"]
    assert parallel.compute("guide", options, tmp_path, names, jobs=2) == []
    assert set(parallel.missing("guide", options, tmp_path)).isdisjoint(names)
    kept = {name: json.loads((tmp_path / "cells" / f"{name}.json").read_text()) for name in names}
    assert all(body["made"]["at_once"] == 2 for body in kept.values())
    assert kept["accountants"]["result"] == json.loads(json.dumps(guide.accountants()))
