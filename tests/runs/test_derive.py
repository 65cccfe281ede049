"""Derived files: covered by the guarantee, named in the ledger, followed by verification."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from dpfy.cli.app import main
from dpfy.core.errors import InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.report.verify import verify
from dpfy.runs.derive import derive
from dpfy.runs.run import Run

sys.path.insert(0, str(Path(__file__).parent))
import count
from count import LaplaceCount


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return count.run(
        Run(tmp_path_factory.mktemp("runs") / "run"), lambda: 37, LaplaceCount(2.0, delta=1e-6)
    )


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


@pytest.fixture
def rounded(run, tmp_path):
    """The count as a whole number."""
    file = tmp_path / "rounded.json"
    file.write_text(
        json.dumps({"count": round(json.loads((run / "count.json").read_text())["count"])})
    )
    return file


def wrong(run):
    return [f for f in verify(run) if not f.holds]


def test_a_derived_file_is_followed_by_verification(run, rounded):
    before = {p.name: p.read_bytes() for p in run.iterdir() if not p.name.startswith("ledger")}
    place = derive(run, rounded, of=["count.json"], how="rounded to a whole number")
    assert wrong(run) == []
    assert {name: (run / name).read_bytes() for name in before} == before
    assert any("rounded.json from count.json" in f.detail for f in verify(run))
    place.write_bytes(place.read_bytes().replace(b"count", b"Count"))
    assert any("rounded.json" in f.detail for f in wrong(run))
    place.unlink()
    assert any("rounded.json" in f.detail for f in wrong(run))


def test_one_derived_file_can_be_made_from_another(run, rounded):
    derive(run, rounded, of=["count.json"], how="rounded")
    derive(
        run,
        rounded,
        of=["rounded.json"],
        how="halved, and the public census",
        public="census 2020",
        name="share.json",
    )
    assert wrong(run) == []
    assert Ledger.read(run / "ledger.jsonl").book.derived["share.json"]["public"] == "census 2020"


REFUSED = {
    "name": ("count.json", "privacy.json", "ledger.jsonl", "../x", ".hidden"),
    "of": (["model.safetensors"], []),
    "how": ("", "two\nlines"),
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values]
)
def test_what_is_refused_changes_nothing(run, rounded, field, value):
    before = {p.name: p.read_bytes() for p in run.iterdir()}
    with pytest.raises(InvalidInput, match=field):
        derive(run, rounded, **({"of": ["count.json"], "how": "rounded"} | {field: value}))
    assert {p.name: p.read_bytes() for p in run.iterdir()} == before


def test_a_second_file_of_the_same_name_is_refused(run, rounded):
    derive(run, rounded, of=["count.json"], how="rounded")
    with pytest.raises(InvalidInput, match="already"):
        derive(run, rounded, of=["count.json"], how="rounded again")


def test_an_unfinished_run_has_nothing_to_derive_from(tmp_path, rounded):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="finished"):
        derive(tmp_path / "empty", rounded, of=["count.json"], how="rounded")


def test_the_command_line(run, rounded, capsys):
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "report",
                "derive",
                str(run),
                str(rounded),
                "--of",
                "count.json",
                "--how",
                "rounded",
                "--json",
            ]
        )
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["file"] == "rounded.json"
    with pytest.raises(SystemExit) as ended:
        main(["report", "derive", str(run), str(rounded), "--of", "count.json", "--how", "rounded"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_released_file_is_not_derived_from_itself(run):
    """The very same bytes under the very same name: only the ledger knows that they were
    released.
    """
    before = {p.name: p.read_bytes() for p in run.iterdir()}
    with pytest.raises(InvalidInput, match="name of a file of the run"):
        derive(run, run / "count.json", of=["count.json"], how="copied")
    assert {p.name: p.read_bytes() for p in run.iterdir()} == before
