"""One dataclass a command: its flags, the keys of --set and of TOML, and what a run folder keeps, which
goes back to its command.
"""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from calls import call, refused

from dpfy.cli.fit import FitForm
from dpfy.cli.query import QueryForm
from dpfy.cli.serve import StartForm
from dpfy.cli.serve_student import StudentForm
from dpfy.cli.synthesize import SynthesizeForm
from dpfy.cli.texts import TextsForm, TokenizerForm

SCHEMA = Path(__file__).parents[1] / "estimators" / "people.toml"
FORMS = {
    "query": QueryForm,
    "fit": FitForm,
    "synthesize table": SynthesizeForm,
    "synthesize texts": TextsForm,
    "synthesize tokenizer": TokenizerForm,
    "serve student": StudentForm,
    "serve start": StartForm,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"p{k // 3},{20 + k % 60},{'yn'[k % 2]}" for k in range(240)]
    Path("people.csv").write_text("\n".join(["who,age,well", *rows]) + "\n")
    Path("s.toml").write_text(
        '[columns.who]\nignore = true\n[columns.age]\nkind = "number"\nrange = [0, 100]\n'
        '[columns.well]\nkind = "label"\nclasses = ["y", "n"]\n'
    )
    Path("notes.csv").write_text("note\n" + "the ward was quiet today\n" * 240)
    return tmp_path


TABLE = ("people.csv", "--schema", "s.toml")
TRAIN = (*TABLE, "--records", 190, "--model", "linear", "--steps", 2, "--delta", "1e-4")
COMMANDS = {
    "query": (("query", "people.csv", "count() by well", *TABLE[1:], "--epsilon", 1), TABLE),
    "query of persons": (
        ("query", "people.csv", "mean(age)", *TABLE[1:], "--epsilon", 1, "--person", "who",
         "--at-most", 2, "--delta", "1e-7"), TABLE),
    "fit": (
        ("fit", *TABLE, "--epsilon", 2, "--estimator", "naive-bayes", "--set", "bins=4"), TABLE),
    "synthesize": (
        ("synthesize", *TABLE, "--epsilon", 2, "--method", "mst", "--workload", 2, "--rows", 5),
        TABLE),
    "train": (("train", *TRAIN), ("people.csv",)),
    "train labels": (
        ("train", "--protect", "labels", "--data", "digits", "--epsilon", 3), ("--protect", "labels")),
    "tune": (
        ("tune", *TRAIN[:-4], "--set", "training.steps=2", "--delta", "1e-4", "--trials", 2,
         "--law", "logarithmic",
         "--over", "training.learning_rate=0.1..1 log"), ("people.csv",)),
    "audit train": (
        ("audit", "train", "digits", "--model", "linear", "--canaries", 12, "--steps", 2,
         "--attack", "final-model"), ()),
    "synthesize tokenizer": (
        ("synthesize", "tokenizer", "notes.csv", "--column", "note", "--records", 240,
         "--epsilon", 3, "--size", 300), ("notes.csv",)),
    "serve start": (
        ("serve", "start", "voters", "--answers", 5, "--epsilon", 2, "--finish", "--port", 0),
        ("voters", "--finish")),
    "serve student": (
        ("serve", "student", "digits", "--teachers", 20, "--answers", 10, "--epsilon", 50),
        ("digits",)),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_the_configuration_of_a_run_goes_back_to_its_command(name, folder, capsys):
    asked, private = COMMANDS[name]
    if name == "serve start":
        assert call(capsys, "serve", "teach", *TABLE, "--voters", 5, "--out", "voters")[0] == 0
    status, _, err = call(capsys, *asked, "--out", "first")
    assert status == 0, err
    kept = Path("first/config.toml").read_text()
    assert str(folder) not in kept
    config = "first/config.toml"
    if name == "tune":  # there config.toml is that of the training that was chosen
        config = "first/search.toml"
        kept = Path(config).read_text()
    groups = ("serve", "synthesize", "audit")
    verb = asked[:2] if asked[0] in groups and name != "synthesize" else asked[:1]
    status, _, err = call(capsys, *verb, *private, "--config", config, "--out", "again")
    assert status == 0, err
    again = "again/search.toml" if name == "tune" else "again/config.toml"
    assert Path(again).read_text() == kept
    found = [json.loads(Path(run, "privacy.json").read_text()) for run in ("first", "again")]
    for key in ("setting", "unit", "formal"):
        assert found[0].get(key) == found[1].get(key)
    stated = [{k: card["guarantee"][k] for k in ("epsilon", "delta", "unit")} for card in found]
    assert stated[0] == stated[1]


@pytest.mark.parametrize("name", ["query", "fit", "synthesize"])
def test_a_file_alone_is_a_command_and_flags_win_over_it(name, folder, capsys):
    asked, _ = COMMANDS[name]
    status, shown, err = call(capsys, *asked, "--show-config")
    assert status == 0, err
    Path("job.toml").write_text(shown)
    assert tomllib.loads(shown)["data"] == "people.csv"
    verb = asked[0]
    assert call(capsys, verb, "job.toml", "--show-config") == (0, shown, "")
    words = ("--epsilon", 0.25, "--set", "delta=1e-8")
    status, other, _ = call(capsys, verb, "job.toml", *words, "--show-config")
    assert status == 0
    due = tomllib.loads(shown) | {"epsilon": 0.25, "delta": 1e-8}
    assert tomllib.loads(other) == due
    status, told, err = call(capsys, verb, "job.toml", *words, "--out", "run", "--json")
    assert status == 0, err
    assert 0 < json.loads(told)["epsilon"] <= 0.25
    said = refused(capsys, verb, "job.toml", "--config", "job.toml")
    assert "is given already as the first argument" in said
    assert "given twice" in refused(capsys, verb, "job.toml", "--epsilon", 1, "--set", "epsilon=2")
    assert "must be key=value" in refused(capsys, verb, "job.toml", "--set", "epsilon")
    Path("job.toml").write_text(shown + "sort = 3\n")
    assert "sort" in refused(capsys, verb, "job.toml", "--out", "no")
    Path("job.toml").write_text(shown.replace("epsilon = ", 'epsilon = "x" #'))
    assert "epsilon: got 'x'; must be a number" in refused(capsys, verb, "job.toml", "--out", "no")
    assert not Path("no").exists()


@pytest.mark.parametrize("name", FORMS)
def test_what_must_be_given_is_asked_for_at_once(name, folder, capsys):
    due = [f for f in fields(FORMS[name]) if f.default is MISSING and not f.metadata.get("rest")]
    said = refused(capsys, *name.split())
    for item in due:
        shown = item.metadata.get("metavar") or f"--{item.name.replace('_', '-')}"
        assert f"{shown}: got None; must be given" in said


def test_a_stopped_run_goes_on_by_its_folder_alone(folder, capsys, monkeypatch):
    from dpfy.statistics.statistic import SumStatistic

    real = SumStatistic.release

    def stopped(self, table, spend):
        if table.rows():
            raise KeyboardInterrupt
        return real(self, table, spend)

    monkeypatch.setattr(SumStatistic, "release", stopped)
    asked = ("query", *TABLE[:1], "count() by well", *TABLE[1:], "--epsilon", 1)
    assert call(capsys, *asked, "--ledger", "l.jsonl", "--out", "q")[0] == 130
    monkeypatch.setattr(SumStatistic, "release", real)
    status, _, err = call(capsys, "query", "--resume", "--out", "q")
    assert status == 0, err
    assert call(capsys, "verify", "q", "--ledger", "l.jsonl")[0] == 0
    assert "people.csv" not in Path("q/config.toml").read_text()
