"""What earlier versions wrote still verifies, damage in it is still found, and a run that they began is still finished."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dpfy.cli import app
from dpfy.report.verify import verify
from dpfy.studies import STUDIES, study
from dpfy.studies.study import Options, stored

ROOT = Path(__file__).parent.parent
V1 = ROOT / "samples" / "v1"
STUDY_CELLS = ROOT.parent / "docs" / "studies"
UNFINISHED = "interrupted"
RUNS = sorted(p.name for p in V1.iterdir() if p.is_dir() and p.name not in (UNFINISHED, "__pycache__"))
BARE = ("card.json", "ledger.jsonl", "people.jsonl")
FREE = ("ledger.jsonl.head",)
"""Says only where the ledger ended when it was last written to: a crash may leave it behind, and what is in it is never believed."""
KINDS = {file.name: file.relative_to(V1) for name in ("plain", "signed", "audited") for file in sorted((V1 / name).iterdir())}
KINDS = {name: file for name, file in KINDS.items() if name not in FREE}


def broken(run: Path, **options: object) -> list[str]:
    return [f"{f.what}: {f.detail}" for f in verify(run, **options) if not f.holds]  # type: ignore[arg-type]


def flip(file: Path, share: float) -> None:
    """One bit of one byte, `share` of the way through the file."""
    content = bytearray(file.read_bytes())
    content[int(share * (len(content) - 1))] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", [*RUNS, *BARE])
def test_verifies(name: str) -> None:
    assert broken(V1 / name) == []


def test_all_kinds_are_there() -> None:
    assert len(RUNS) >= 29
    assert set(KINDS) == {
        "audit.json", "audit.svg", "canaries.npz", "config.toml", "ledger.jsonl", "metrics.jsonl", "model.safetensors", "plan.json",
        "privacy.json", "report.html", "report.md", "signature.json",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["budget", "budget-second"])
def test_is_billed_in_the_ledger_of_its_people(name: str) -> None:
    assert broken(V1 / name, ledger=V1 / "people.jsonl") == []


def test_signatures_hold() -> None:
    assert broken(V1 / "signed", keys=[V1 / "signed.pub"]) == []
    assert broken(V1 / "people.jsonl", keys=[V1 / "signed.pub"], head=str(V1 / "people.head")) == []
    assert broken(V1 / "plain", keys=[V1 / "signed.pub"]) != []


@pytest.mark.parametrize("share", [0.0, 0.37, 0.8, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_one_flipped_byte_is_found(kind: str, share: float, tmp_path: Path) -> None:
    run = shutil.copytree(V1 / KINDS[kind].parent, tmp_path / "run")
    flip(run / kind, share)
    assert any(kind in line or kind == "signature.json" for line in broken(run)), kind


@pytest.mark.parametrize("name", BARE)
def test_one_flipped_byte_is_found_in_a_file_by_itself(name: str, tmp_path: Path) -> None:
    for share in (0.1, 0.5, 0.9):
        flip(Path(shutil.copy(V1 / name, tmp_path)), share)
        assert broken(tmp_path / name) != [], share


def test_an_unfinished_run_is_told_from_a_finished_one() -> None:
    (only,) = broken(V1 / UNFINISHED)
    assert "unfinished" in only
    assert broken(V1 / UNFINISHED / "ledger.jsonl") == []


def test_a_run_that_an_earlier_version_began_is_finished_by_this_one(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    run = shutil.copytree(V1 / UNFINISHED, tmp_path / "run")
    for secret in (run / "checkpoint", *(run / "checkpoint").iterdir()):
        secret.chmod(0o700 if secret.is_dir() else 0o600)
    with pytest.raises(SystemExit) as ended:
        app.main(["train", "--resume", "--out", str(run), "--json", "--set", "runtime.checkpoint_every=30"])
    assert ended.value.code in (0, None)
    assert broken(run) == []
    due, found = load_file(V1 / f"{UNFINISHED}.model.safetensors"), load_file(run / "model.safetensors")
    assert due.keys() == found.keys()
    for name, value in due.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", STUDIES)
def test_stored_studies_are_still_taken_up(name: str) -> None:
    """Every stored cell has the settings that the study has now."""
    folder = STUDY_CELLS / name
    assert len(stored(study(name), Options(), folder)) == len(list((folder / "cells").iterdir()))
