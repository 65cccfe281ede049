"""`dpfy plan compare estimators`: made-up data by a schema, public tables, several sizes, and bad
input.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from dpfy.cli.app import main
from dpfy.estimators import comparison
from dpfy.tables.columns import Category, Label, Number

sys.path.insert(0, str(Path(__file__).parents[1] / "estimators"))
from people import people

TOML = """
[columns.age]
kind = "number"
range = [17, 90]
[columns.job]
kind = "category"
categories = ["clerk", "nurse", "smith"]
fill = "other"
[columns.gain]
kind = "number"
range = [0, 1000]
transform = "log1p"
scale = "unit"
fill = 0
[columns.rich]
kind = "label"
classes = ["no", "yes"]
"""


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "compare", "estimators", *map(str, arguments)])
    return stop.value.code, capsys.readouterr()


@pytest.fixture
def schema(tmp_path):
    (tmp_path / "people.toml").write_text(TOML)
    return tmp_path / "people.toml"


def test_rows_are_best_first_and_more_records_and_epsilon_help(schema, capsys):
    sizes = ("--records", 300, "--records", 3000, "--epsilon", 0.2, "--epsilon", 8)
    code, said = run(
        capsys,
        "--schema",
        schema,
        *sizes,
        "--estimator",
        "logistic",
        "--estimator",
        "naive-bayes",
        "--json",
    )
    told = json.loads(said.out)
    assert code == 0
    assert (told["measure"], told["target"], len(told["rows"])) == ("AUROC", "rich", 8)
    scores = {
        (row["estimator"], row["records"], row["epsilon"]): row["score"] for row in told["rows"]
    }
    for name in ("logistic", "naive-bayes"):
        assert scores[name, 3000, 8.0] > scores[name, 300, 0.2]
        assert scores[name, 3000, 8.0] > 0.7
    for one, other in zip(told["rows"][::2], told["rows"][1::2], strict=True):
        assert one["score"] >= other["score"]
    assert [row["estimator"] for row in told["best"]] == [
        row["estimator"] for row in told["rows"][::2]
    ]


def test_a_public_table_and_a_numeric_target(schema, tmp_path, capsys):
    table, labels = people(900)
    table["gain"] = table["gain"].fillna(0.0)
    table.assign(rich=labels).to_csv(tmp_path / "public.csv", index=False)
    given = (
        "--schema",
        schema,
        "--public-data",
        tmp_path / "public.csv",
        "--records",
        700,
        "--epsilon",
        4,
    )
    code, said = run(capsys, *given, "--estimator", "logistic")
    assert code == 0
    assert "data: a public table" in said.out
    assert "best at 700 records, epsilon 4: logistic (0.9" in said.out
    code, said = run(capsys, *given, "--target", "age", "--estimator", "linear", "--json")
    assert (code, json.loads(said.out)["measure"]) == (0, "R2")
    code, said = run(capsys, *given[:4], "--records", 850, "--epsilon", 1)
    assert code == 2
    assert "must leave 100 rows of 900" in said.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--records", 5), "--records"),
        (("--epsilon", 0), "--epsilon"),
        (("--estimator", "linear"), "--estimator"),
        (("--target", "height"), "target"),
        (("--target", "job"), "choose another column"),
        (("--public-data", "nowhere.csv"), "nowhere.csv"),
    ],
)
def test_bad_input_is_one_line(schema, capsys, arguments, said):
    code, told = run(capsys, "--schema", schema, *arguments)
    assert code == 2
    assert said in told.err
    assert len(told.err.strip().splitlines()) == 1


def test_made_up_records_lie_in_their_columns():
    schema = (
        Number("a", 3.0, 9.0),
        Category("b", ("x", "y")),
        Number("c", 0.0, 99.0, transform="log1p"),
        Label("d", ("u", "v", "w")),
    )
    data = comparison.made_up(schema, None, 500, seed=1)
    assert data.measure == "accuracy"
    assert set(data.rows[:, 1]) <= {"x", "y"}
    for k, (low, high) in ((0, (3, 9)), (2, (0, 99))):
        values = data.rows[:, k].astype(float)
        assert low <= values.min() < values.max() <= high
    assert sorted(np.unique(data.values, return_counts=True)[1]) == pytest.approx(
        [167, 167, 167], abs=2
    )


def test_all_that_predict_the_target_are_candidates():
    assert {kind.__name__ for kind in comparison.candidates([], True).values()} >= {
        "LogisticRegression",
        "NaiveBayes",
        "LinearSVC",
    }
    assert {kind.__name__ for kind in comparison.candidates([], False).values()} >= {
        "LinearRegression",
        "Ridge",
        "PoissonRegressor",
    }
