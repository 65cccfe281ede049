"""What earlier versions wrote still verifies, damage in it is still found, and a run that they
began is still finished.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dpfy.cli import app
from dpfy.report.compare import publish
from dpfy.report.verify import verify
from dpfy_lab.studies import STUDIES, study
from dpfy_lab.studies.study import Options, stored

ROOT = Path(__file__).parent.parent
V1 = ROOT / "samples" / "v1"
V2 = ROOT / "samples" / "v2"
STUDY_CELLS = ROOT.parent / "docs" / "studies"
UNFINISHED = "interrupted"
RUNS = sorted(
    p.name for p in V1.iterdir() if p.is_dir() and p.name not in (UNFINISHED, "__pycache__")
)
BARE = ("card.json", "ledger.jsonl", "people.jsonl")
TEXT = ".txt"
"""Pages are stored under another name, as data and not as source."""
FREE = ("ledger.jsonl.head",)
"""Says only where the ledger ended when it was last written to: a crash may leave it behind, and
what is in it is never believed.
"""
KINDS = {
    file.name.removesuffix(TEXT): name for name in ("plain", "signed", "audited") for file in sorted((V1 / name).iterdir())  # noqa: E501
    if file.name not in FREE
}  # fmt: skip


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The samples with their files under their own names."""
    place = shutil.copytree(V1, tmp_path_factory.mktemp("samples") / "v1")
    for page in place.glob(f"*/*{TEXT}"):
        page.rename(page.with_suffix(""))
    return place


def broken(run: Path, **options: object) -> list[str]:
    return [f"{f.what}: {f.detail}" for f in verify(run, **options) if not f.holds]  # type: ignore[arg-type]


def flip(file: Path, share: float) -> None:
    """One bit of one byte, `share` of the way through the file."""
    content = bytearray(file.read_bytes())
    content[int(share * (len(content) - 1))] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", [*RUNS, *BARE])
def test_verifies(name: str, v1: Path) -> None:
    assert broken(v1 / name) == []


def test_all_kinds_are_there() -> None:
    assert len(RUNS) >= 29
    assert set(KINDS) == {
        "audit.json", "audit.svg", "canaries.npz", "config.toml", "ledger.jsonl", "metrics.jsonl", "model.safetensors", "plan.json",  # noqa: E501
        "privacy.json", "report.html", "report.md", "signature.json",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["budget", "budget-second"])
def test_is_billed_in_the_ledger_of_its_people(name: str, v1: Path) -> None:
    assert broken(v1 / name, ledger=v1 / "people.jsonl") == []


def test_signatures_hold(v1: Path) -> None:
    assert broken(v1 / "signed", keys=[v1 / "signed.pub"]) == []
    assert broken(v1 / "people.jsonl", keys=[v1 / "signed.pub"], head=str(v1 / "people.head")) == []
    assert broken(v1 / "plain", keys=[v1 / "signed.pub"]) != []


@pytest.mark.parametrize("share", [0.0, 0.37, 0.8, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_one_flipped_byte_is_found(kind: str, share: float, v1: Path, tmp_path: Path) -> None:
    run = shutil.copytree(v1 / KINDS[kind], tmp_path / "run")
    flip(run / kind, share)
    assert any(kind in line or kind == "signature.json" for line in broken(run)), kind


@pytest.mark.parametrize("name", BARE)
def test_one_flipped_byte_is_found_in_a_file_by_itself(name: str, v1: Path, tmp_path: Path) -> None:
    for share in (0.1, 0.5, 0.9):
        flip(Path(shutil.copy(v1 / name, tmp_path)), share)
        assert broken(tmp_path / name) != [], share


@pytest.mark.parametrize("name", ["plain", "audited"])
def test_pages_that_are_written_again_are_accepted_and_edited_ones_are_not(
    name: str, v1: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(v1 / name, tmp_path / "run")
    for form, page in (("html", "report.html"), ("md", "report.md")):
        publish(run, form)
        assert broken(run) == []
        flip(run / page, 0.5)
        assert [line for line in broken(run) if page in line] != []
        publish(run, form)


@pytest.fixture(scope="module")
def v2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The samples of version 0.2 with their files under their own names."""
    place = shutil.copytree(V2, tmp_path_factory.mktemp("samples") / "v2")
    (place / "trained" / f"report.html{TEXT}").rename(place / "trained" / "report.html")
    return place


OF_TABLE = ("fitted", "queried", "synthetic")


@pytest.mark.parametrize("name", [*OF_TABLE, "people.jsonl", "trained", "tuned"])
def test_runs_of_version_02_verify(name: str, v2: Path) -> None:
    options = {"ledger": v2 / "people.jsonl"} if name in OF_TABLE else {}
    assert broken(v2 / name, **options) == []


@pytest.mark.parametrize("name", [*OF_TABLE, "trained", "tuned"])
def test_a_changed_number_in_a_run_of_version_02_is_found(
    name: str, v2: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(v2 / name, tmp_path / "run")
    card = run / "privacy.json"
    text = card.read_text("utf-8")
    old = json.loads(text)["guarantee"]["epsilon"]
    assert str(old) in text
    card.write_text(text.replace(str(old), str(old * 0.9)), "utf-8")
    assert broken(run) != []


def test_an_unfinished_run_is_told_from_a_finished_one(v1: Path) -> None:
    (only,) = broken(v1 / UNFINISHED)
    assert "unfinished" in only
    assert broken(v1 / UNFINISHED / "ledger.jsonl") == []


def test_a_run_that_an_earlier_version_began_is_finished_by_this_one(
    v1: Path, tmp_path: Path
) -> None:
    pytest.importorskip("sklearn")
    run = shutil.copytree(v1 / UNFINISHED, tmp_path / "run")
    for secret in (run / "checkpoint", *(run / "checkpoint").iterdir()):
        secret.chmod(0o700 if secret.is_dir() else 0o600)
    with pytest.raises(SystemExit) as ended:
        app.main(
            [
                "train",
                "--resume",
                "--out",
                str(run),
                "--json",
                "--set",
                "runtime.checkpoint_every=30",
            ]
        )
    assert ended.value.code in (0, None)
    assert broken(run) == []
    due, found = (
        load_file(v1 / f"{UNFINISHED}.model.safetensors"),
        load_file(run / "model.safetensors"),
    )
    assert due.keys() == found.keys()
    for name, value in due.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", STUDIES)
def test_stored_studies_are_still_taken_up(name: str) -> None:
    """Every stored cell has the settings that the study has now."""
    folder = STUDY_CELLS / name
    assert len(stored(study(name), Options(), folder)) == len(list((folder / "cells").iterdir()))
