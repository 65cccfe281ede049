"""`dpfy reproduce`: list, run, resume, page from stored cells, and one-line errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from dpfy.core.errors import InvalidInput
from dpfy_lab import studies
from dpfy_lab.commands.reproduce import reproduce
from dpfy_lab.studies.page import FACTS, Page, Section, Table
from dpfy_lab.studies.study import Cell, Study

app = typer.Typer()
app.command()(reproduce)
runner = CliRunner()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def compute() -> dict[str, int]:
        calls.append("cell")
        return {"value": 7}

    def page(results):  # type: ignore[no-untyped-def]
        return Page(
            [Section("S", "", [Table("t", "T", ("v",), [[results["cell"].result["value"]]])])],
            dict.fromkeys(FACTS, "said"),
        )

    module = ModuleType("toy_study")
    module.STUDY = Study(
        "toy", "A toy", "", lambda options: [Cell("cell", {"fast": options.fast}, compute)], page
    )  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_study", module)
    monkeypatch.setitem(studies.STUDIES, "toy", "toy_study")
    return calls


def answer(*arguments: str) -> dict[str, object]:
    result = runner.invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return dict(json.loads(result.stdout))


def test_list_names_every_study() -> None:
    assert (
        set(answer("--list")["studies"])
        == set(studies.STUDIES)
        >= {"guide", "images", "metric-text"}
    )  # type: ignore[call-overload]


def test_run_resume_and_page_of_stored_cells(toy: list[str], tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert answer("toy", "--out", out)["computed"] == 1
    assert answer("toy", "--out", out)["computed"] == 0
    assert toy == ["cell"]
    assert answer("toy", "--out", out, "--fast")["computed"] == 1  # other settings: computed again
    (tmp_path / "out" / "index.html").unlink()
    assert answer("toy", "--out", out, "--fast", "--stored")["cells"] == 1
    assert (tmp_path / "out" / "index.html").is_file()
    assert toy == ["cell", "cell"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give the name of a study"),
        (["nothing"], "study"),
        (["guide", "--device", "abacus"], "device"),
        (["guide", "--stored", "--out", "empty"], "holds no cell"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=words) as caught:
        runner.invoke(app, arguments, catch_exceptions=False)
    assert "\n" not in str(caught.value)
