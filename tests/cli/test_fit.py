"""`dpfy fit` and `dpfy predict` on its runs: one JSON object, a folder that verifies, refusals that
spend nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from calls import call, refused

from dpfy.core.ledger import Ledger
from dpfy.estimators import fitting, load

ROOT = Path(__file__).parents[2]
PEOPLE, SCHEMA = ROOT / "examples" / "people.csv", ROOT / "examples" / "people.schema.toml"
FIT = ("fit", PEOPLE, "--schema", SCHEMA, "--epsilon", "2")


def told(capsys, *arguments):
    status, out, err = call(capsys, *arguments, "--json")
    assert status == 0, err
    return json.loads(out)


def test_a_fit_from_the_command_line(tmp_path, capsys):
    run = tmp_path / "run"
    found = told(capsys, *FIT, "--estimator", "logistic", "--out", run, "--test", PEOPLE)
    assert found["run"] == str(run)
    assert found["estimator"] == "LogisticRegression"
    assert 1.99 < found["epsilon"] <= 2
    assert 0.4 < found["test_accuracy"] <= 1
    assert "test_auroc" in found
    assert call(capsys, "verify", run)[0] == 0
    config = (run / "config.toml").read_text()
    assert "logistic" in config
    assert str(PEOPLE) not in config


def test_persons_from_the_command_line(tmp_path, capsys):
    table, run = tmp_path / "visits.csv", tmp_path / "run"
    header, *rows = PEOPLE.read_text().splitlines()
    table.write_text(
        "\n".join([header, *(f"{k // 3},{r.split(',', 1)[1]}" for k, r in enumerate(rows))])
    )
    schema = tmp_path / "visits.toml"
    schema.write_text(SCHEMA.read_text())
    flags = ("--person", "id", "--at-most", 2)
    arguments = ("fit", table, "--schema", schema, "--epsilon", 2, "--estimator", "forest", *flags)
    found = told(capsys, *arguments, "--out", run, "--test", table)
    assert found["unit"] == "user"
    assert "of which at most 2 are used" in found["statement"]
    assert call(capsys, "verify", run)[0] == 0
    assert json.loads((run / "privacy.json").read_text())["unit"]["most_records"] == 2
    assert call(capsys, "predict", run, table)[0] == 0
    for alone, said in ((flags[:2], "--at-most"), (flags[2:], "--person")):
        assert said in refused(capsys, *arguments[:8], *alone)


def test_what_is_printed_begins_with_words(tmp_path, capsys):
    for estimator in ("logistic", "forest"):
        _, out, err = call(capsys, *FIT, "--estimator", estimator, "--out", tmp_path / estimator)
        assert err == ""
        assert out.splitlines()[0].strip()


def test_a_regression_with_settings_and_predictions_of_its_run(tmp_path, capsys):
    run, rows = tmp_path / "run", tmp_path / "rows.csv"
    found = told(
        capsys,
        *FIT,
        "--estimator",
        "linear",
        "--target",
        "hours",
        "--set",
        "solver=statistics",
        "--set",
        "norm=1.0",
        "--out",
        run,
    )
    assert "test_rmse" not in found
    assert load(run).predict([[40.0, "nurse"]])[0] >= 0
    rows.write_text("age,job\n40,nurse\n20,poet\n")
    answer = told(capsys, "predict", run, rows)
    assert len(answer["predictions"]) == 2
    assert all(0 <= value <= 80 for value in answer["predictions"])
    assert call(capsys, "predict", run, rows, "--out", tmp_path / "out.csv")[0] == 0
    assert (tmp_path / "out.csv").read_text().startswith("prediction\n")
    assert "choose another name" in refused(
        capsys, "predict", run, rows, "--out", tmp_path / "out.csv"
    )


@pytest.mark.parametrize("family", ["boosting", "boosted-trees", "forest", "tree", "soft-trees"])
def test_a_family_predicts_numbers_where_the_target_is_one(tmp_path, capsys, family):
    for target, ending in (("hours", "Regressor"), ("income", "Classifier")):
        found = told(
            capsys,
            *FIT,
            "--estimator",
            family,
            "--target",
            target,
            "--out",
            tmp_path / target,
            "--test",
            PEOPLE,
        )
        assert found["estimator"].endswith(ending)
        assert ("test_rmse" in found) == (target == "hours")
    assert "must be a column of the schema" in refused(
        capsys, *FIT, "--estimator", family, "--target", "nobody"
    )


def test_predictions_of_classes_have_probabilities(tmp_path, capsys):
    run = tmp_path / "run"
    told(capsys, *FIT, "--estimator", "naive-bayes", "--out", run)
    answer = told(capsys, "predict", run, PEOPLE)
    assert answer["classes"] == ["high", "low"]
    assert len(answer["probabilities"]) == 600
    content = bytearray((run / "estimator.safetensors").read_bytes())
    content[-1] ^= 1
    (run / "estimator.safetensors").write_bytes(content)
    assert "does not verify" in refused(capsys, "predict", run, PEOPLE)


def test_a_killed_fit_goes_on(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    asked = (*FIT, "--estimator", "logistic", "--out", run)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(fitting, "finish", killed)
    status, _, err = call(capsys, *asked)
    assert status == 130
    assert "--resume" in err
    monkeypatch.undo()
    assert "resume" in refused(capsys, *asked)
    assert told(capsys, *asked, "--resume")["run"] == str(run)
    assert call(capsys, "verify", run)[0] == 0


BAD = [
    (("--estimator", "best"), "--estimator"),
    (("--estimator", "logistic", "--epsilon", "0"), "epsilon"),
    (("--estimator", "logistic", "--epsilon", "nan"), "epsilon"),
    (("--estimator", "logistic", "--delta", "2"), "delta"),
    (("--estimator", "logistic", "--set", "rounds"), "key=value"),
    (("--estimator", "logistic", "--set", "epsilon=3"), "--set"),
    (("--estimator", "logistic", "--set", "rounds=0"), "rounds"),
    (("--estimator", "logistic", "--target", "age"), "classes"),
    (("--estimator", "linear", "--target", "job"), "number"),
    (("--estimator", "logistic", "--target", "nothing"), "target"),
    (("--estimator", "logistic", "--schema", "nowhere.toml"), "nowhere"),
    (("--estimator", "logistic", "--adjacency", "swap"), "adjacency"),
    (("--estimator", "logistic", "--test", "nowhere.csv"), "nowhere"),
    (("--estimator", "logistic", "--resume"), "--resume"),
]


@pytest.mark.parametrize(("flags", "said"), BAD)
def test_bad_input_is_one_line_and_spends_nothing(flags, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    extra = () if "--resume" in flags else ("--out", "new")
    line = refused(capsys, *FIT, *flags, "--ledger", "people.jsonl", *extra)
    assert said in line
    assert not (tmp_path / "new").exists()
    assert not Path("people.jsonl").exists() or not Ledger.read(Path("people.jsonl")).permits()


def test_rows_that_cannot_be_read_spend_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.csv").write_text('id,age,job,hours,income\n1,"torn')
    line = refused(
        capsys,
        "fit",
        "bad.csv",
        *FIT[2:],
        "--estimator",
        "logistic",
        "--ledger",
        "people.jsonl",
        "--out",
        "new",
    )
    assert "not a comma-separated table" in line
    assert not Path("new").exists()
    assert not Ledger.read(Path("people.jsonl")).permits()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id,age,job,hours\n1,30,nurse,3\n", "target"),
        ("id,age,hours,income\n1,30,3,high\n", "job"),
        ("id,age,job,hours,income\n1,30,nurse,3,enormous\n", "a row with a value of income"),
        ("id,age,job,hours,income\n", "at least one row"),
        ("[[phase]]\n", "target"),
    ],
)
def test_test_rows_that_cannot_be_read_spend_nothing(text, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("test.csv").write_text(text)
    words = ("--estimator", "naive-bayes", "--test", "test.csv", "--ledger", "people.jsonl")
    assert said in refused(capsys, *FIT, *words, "--out", "new")
    assert not Path("new").exists()
    assert not Path("people.jsonl").exists() or not Ledger.read(Path("people.jsonl")).permits()
