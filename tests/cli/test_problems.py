"""Everything that is wrong with a job is told at once; and when the number of records may be
counted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from calls import call, fill, refused, rows

from dpfy.core.errors import InvalidInput
from dpfy.training import config

WRONG = """
[data]
kind = "csv"

[privcy]
epsilon = 1

[privacy]
delta = 7
epsilom = 3
accountant = "moments"

[training]
learning_rate = -1
steps = 0
clip = "flatt"
clip_gamma = 3.0

[runtime]
pad = 1
"""


def test_a_file_with_many_mistakes_is_refused_once(capsys, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(WRONG)
    status, out, err = call(
        capsys, "train", tmp_path / "job.toml", "--out", tmp_path / "run", "--json"
    )
    assert status == 2
    fields = {problem["field"] for problem in json.loads(out)["error"]["problems"]}
    assert fields == {
        "privcy", "privacy.epsilom", "privacy.delta", "privacy.accountant", "data.path", "data.schema", "training.clip",
        "training.learning_rate", "training.steps", "runtime.pad", "privacy.records",
    }  # fmt: skip
    lines = err.strip().splitlines()
    assert lines[0] == f"dpfy: {len(fields)} problems:"
    assert len(lines) == 1 + len(fields), "a line for each, and none twice"
    assert {line.split(". ", 1)[1].split(": ")[0] for line in lines[1:]} == fields
    assert not (tmp_path / "run").exists()


def test_what_hangs_on_a_wrong_key_is_not_called_wrong_too() -> None:
    """clip_gamma is right for the clip that was meant; saying that `flat` does not read it would
    mislead.
    """
    with pytest.raises(InvalidInput) as found:
        config.make({"training": {"clip": "automatik", "clip_gamma": 3.0}}, {})
    assert found.value.field == "training.clip"
    assert not hasattr(found.value, "problems")


def test_one_mistake_is_told_as_ever() -> None:
    with pytest.raises(InvalidInput, match=r"^privacy.epsilon: got -1; must be greater than 0$"):
        config.make({"privacy": {"epsilon": -1}}, {})


def table(folder: Path, capsys, count: int = 60) -> Path:
    (folder / "t.csv").write_text(rows(count))
    assert call(capsys, "init", folder / "t.csv", "--out", folder, "--label", "income")[0] == 0
    fill(folder / "t.schema.toml")
    return folder / "t.job.toml"


def test_a_public_count_is_counted(capsys, tmp_path: Path) -> None:
    job = table(tmp_path, capsys)
    given = [
        "--records",
        "public",
        "--set",
        "privacy.adjacency=replace-one",
        "--steps",
        2,
        "--delta",
        "1e-3",
    ]
    status, _, err = call(capsys, "train", job, *given, "--out", tmp_path / "run", "--json")
    assert status == 0, err
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert card["guarantee"]["adjacency"] == "replace-one"
    assert 'records = "public"' in (tmp_path / "run" / "config.toml").read_text(), (
        "the declaration is published"
    )
    assert "48" in json.dumps(card["sections"][0]), "60 less the 12 held out"
    assert call(capsys, "verify", tmp_path / "run")[0] == 0


def test_a_count_is_not_public_where_it_is_what_is_hidden(capsys, tmp_path: Path) -> None:
    """Neighbours under add-or-remove-one differ in their number: printing it would tell them
    apart.
    """
    line = refused(
        capsys, "train", table(tmp_path, capsys), "--records", "public", "--out", tmp_path / "run"
    )
    assert "privacy.records: got 'public'" in line
    assert "replace-one" in line


@pytest.mark.parametrize("given", ["many", "-3", "3.5", "", "0"])
def test_other_words_for_the_number_are_refused(capsys, tmp_path: Path, given: str) -> None:
    assert "privacy.records" in refused(
        capsys, "train", "--records", given, "--out", tmp_path / "run"
    )


def test_users_are_not_counted(capsys, tmp_path: Path) -> None:
    given = [
        "--records",
        "public",
        "--set",
        "privacy.adjacency=replace-one",
        "--set",
        "data.user=id",
        "--set",
        "data.most_records=2",
    ]
    line = refused(capsys, "train", table(tmp_path, capsys), *given, "--out", tmp_path / "run")
    assert "counting users is not supported; give the public number" in line


def test_a_path_says_what_it_is(capsys, tmp_path: Path) -> None:
    table(tmp_path, capsys)
    given = [
        "--path",
        tmp_path / "t.csv",
        "--set",
        f"data.schema={tmp_path / 't.schema.toml'}",
        "--records",
        48,
        "--model",
        "linear",
    ]
    status, _, err = call(
        capsys,
        "train",
        *given,
        "--steps",
        2,
        "--delta",
        "1e-3",
        "--out",
        tmp_path / "run",
        "--json",
    )
    assert status == 0, err
    assert "data.schema: got None" in refused(
        capsys, "train", "--path", tmp_path / "t.csv", "--out", tmp_path / "other"
    )


def test_the_refusal_of_a_wrong_number_says_what_was_held_out(capsys, tmp_path: Path) -> None:
    line = refused(
        capsys,
        "train",
        table(tmp_path, capsys),
        "--records",
        60,
        "--delta",
        "1e-3",
        "--set",
        "privacy.adjacency=replace-one",
        "--out",
        tmp_path / "run",
    )
    assert "60 less the 12 held out by data.test_fraction = 0.2" in line
    assert "--records 48" in line
