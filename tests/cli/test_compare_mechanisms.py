"""`dpfy plan compare mechanisms`: the table as JSON and as text, the picture, and bad input."""

from __future__ import annotations

import json

import pytest

from dpfy.cli.app import main

ARGUMENTS = [
    "compare",
    "mechanisms",
    "--records",
    "5000",
    "--batch-size",
    "250",
    "--steps",
    "40",
    "--epsilon",
    "1",
    "--delta",
    "1e-6",
]
KEYS = {
    "mechanism",
    "sampling",
    "noise_multiplier",
    "noise_std",
    "sensitivity",
    "rmse",
    "max_error",
    "buffers",
}


def run(arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return stop.value.code


def test_json_is_one_object_with_rows_least_error_first(capsys):
    assert run([*ARGUMENTS, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["steps"] == 40
    rows = answer["mechanisms"]
    assert all(set(row) == KEYS for row in rows)
    assert [row["rmse"] for row in rows] == pytest.approx(
        sorted(row["rmse"] for row in rows), rel=1e-4
    )
    assert {"dp-sgd", "band-mf", "blt", "tree", "sqrt", "dense"} <= {
        row["mechanism"] for row in rows
    }


def test_text_and_picture(tmp_path, capsys):
    assert run([*ARGUMENTS, "--sampling", "poisson", "--plot", str(tmp_path / "noise.svg")]) == 0
    out = capsys.readouterr().out
    assert "dp-sgd" in out
    assert "cyclic-poisson" in out
    assert (tmp_path / "noise.svg").stat().st_size > 10_000


def test_bad_input_is_one_line(capsys):
    assert run([*ARGUMENTS, "--sampling", "random"]) == 2
    error = capsys.readouterr().err
    assert "sampling" in error
    assert error.count("\n") == 1
    assert run([a if a != "1e-6" else "0.5" for a in ARGUMENTS]) == 2
    assert "delta" in capsys.readouterr().err
