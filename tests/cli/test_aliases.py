"""Commands and flags of earlier versions still work, and say their new form."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from calls import call, refused

from dpfy.cli.aliases import renewed
from dpfy.cli.app import _command


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("account --delta 1e-5", "plan account --delta 1e-5"),
        ("compare runs a b", "report compare a b"),
        ("compare mechanisms --records 5", "plan compare mechanisms --records 5"),
        ("tune plan --records 5", "plan tune --records 5"),
        ("predict serve v --run r", "serve start v --out r"),
        ("predict released r rows.csv", "predict r rows.csv"),
        ("train --data csv --path t.csv --epsilon 1", "train t.csv --epsilon 1"),
        ("train --data=mnist --budget-epsilon=8", "train mnist --budget=8"),
        ("query t.csv count() --user p --most-records 3", "query t.csv count() --person p --at-most 3"),
        ("ledger budget l --epsilon 5 --delta 1e-6", "ledger create l --epsilon 5 --delta 1e-6"),
        ("ledger budget l", "ledger show l"),
        ("audit train j.toml --data digits --steps 2", "audit train digits --config j.toml --steps 2"),
        ("audit train --data csv --set data.path=t.csv", "audit train csv --set data.path=t.csv"),
        ("audit train j.toml --canaries 9", "audit train j.toml --canaries 9"),
        ("query t.csv count()", "query t.csv count()"),
        ("", ""),
    ],
)  # fmt: skip
def test_old_words_become_new_ones(old: str, new: str) -> None:
    assert renewed(old.split()) == new.split()


def test_new_words_stay_as_they_are() -> None:
    for old in ("plan account", "report compare a b", "serve teach digits", "plan tune"):
        assert renewed(old.split()) == old.split()


def test_the_new_form_is_printed_beside_the_answer(capsys) -> None:
    words = ("--noise-multiplier", 1, "--delta", 1e-5, "--json")
    status, out, err = call(capsys, "account", *words)
    assert status == 0
    assert err.startswith("dpfy: the command is now: dpfy plan account --noise-multiplier 1")
    assert json.loads(out) == json.loads(call(capsys, "plan", "account", *words)[1])


def test_a_refusal_stays_one_line(capsys) -> None:
    assert "noise" in refused(capsys, "account", "--delta", 1e-5)


def test_there_are_fifteen_commands_and_those_of_plug_ins() -> None:
    own = _command().commands
    names = (
        "audit fit init inspect ledger plan predict query report serve sign synthesize train tune "
        "verify"
    )
    assert " ".join(sorted(own)) == names


def test_a_file_and_a_configuration_come_first(capsys, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[data]\nkind = "digits"\n')
    status, out, _ = call(capsys, "train", job, "--show-config", "--json")
    assert status == 0
    assert json.loads(out)["data"]["kind"] == "digits"
    line = refused(capsys, "train", job, "--config", job, "--show-config")
    assert "--config" in line
