"""`dpfy audit`: one JSON object, exit status 1 for a claim exceeded or a bug missed, files left for
the report.
"""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from dpfy.cli.audit import app
from dpfy.core.errors import Corrupt, InvalidInput

runner = CliRunner()
SMALL = ["--model", "linear", "--epsilon", "8", "--steps", "12", "--insecure-seed", "1"]


@pytest.fixture(autouse=True)
def one_thread():
    """Small models: threads only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def call(*arguments: str, status: int = 0) -> dict:
    result = runner.invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def test_mechanism_reports_claim_bound_and_power(tmp_path):
    answer = call(
        "mechanism",
        "--steps",
        "4",
        "--canaries",
        "3000",
        "--insecure-seed",
        "1",
        "--plot",
        str(tmp_path / "roc.svg"),
    )
    assert 0.7 * answer["epsilon_claimed"] < answer["epsilon_lower"] <= answer["epsilon_claimed"]
    assert answer["violated"] is False
    assert answer["points_beyond_claim"] == 0
    assert answer["noise"]["finds_factor"] < 1.05
    assert answer["assumptions"]
    assert (tmp_path / "roc.svg").is_file()


def test_correlated_mechanism():
    arguments = (
        "--steps",
        "8",
        "--epochs",
        "2",
        "--bands",
        "2",
        "--canaries",
        "3000",
        "--insecure-seed",
        "2",
    )
    answer = call("mechanism", *arguments)
    assert 0.7 * answer["epsilon_claimed"] < answer["epsilon_lower"] <= answer["epsilon_claimed"]
    with pytest.raises(InvalidInput, match="must divide the number of steps"):
        runner.invoke(app, ["mechanism", "--steps", "7", "--epochs", "2"], catch_exceptions=False)


def test_final_model_audit_leaves_its_record(tmp_path):
    out = tmp_path / "run"
    answer = call(
        "train", "--out", str(out), "--attack", "final-model", "--canaries", "400", *SMALL
    )
    assert answer["violated"] is False
    assert answer["epsilon_lower"] <= answer["epsilon_claimed"] <= 8
    assert "does_not_show" in answer
    stored = json.loads((out / "audit.json").read_text())
    assert stored["epsilon_lower"] == answer["epsilon_lower"]
    assert stored["points"][0] == {"false_positive_rate": 1.0, "true_positive_rate": 1.0}
    assert "run" not in stored  # a run folder holds no path
    assert (out / "audit.svg").is_file()
    again = call("run", str(out))
    assert again["epsilon_lower"] == answer["epsilon_lower"]
    (out / "canaries.npz").write_bytes(b"nothing")
    with pytest.raises(Corrupt, match="not a file of canaries"):
        runner.invoke(app, ["run", str(out)], catch_exceptions=False)


def test_white_box_audit_of_a_training(tmp_path):
    answer = call("train", "--out", str(tmp_path / "run"), "--canaries", "300", *SMALL)
    assert answer["attack"] == "white-box"
    assert 1 < answer["epsilon_lower"] <= answer["epsilon_claimed"]
    assert {other["method"] for other in answer["others"]} == {"one-run", "one-run f-DP"}


def test_a_violated_claim_is_exit_status_one(tmp_path):
    """The plan of the run is replaced by one that claims twice the noise: the same evidence now
    contradicts it.
    """
    import numpy as np

    out = tmp_path / "run"
    call("train", "--out", str(out), "--canaries", "300", *SMALL)
    held = dict(np.load(out / "canaries.npz"))
    held["projections"] = held["projections"] * 0 + 3.0 * held["included"]
    np.savez_compressed(out / "canaries.npz", **held)
    answer = call("run", str(out), status=1)
    assert answer["violated"] is True
    assert "Look first at" in answer["sentence"]


@pytest.mark.parametrize("confidence", ["0.01", "0.49", "0.9999999999"])
def test_a_confidence_that_says_nothing_is_refused_before_the_work(tmp_path, confidence):
    with pytest.raises(InvalidInput, match=r"--confidence: got .*; must lie between 0.5 and"):
        call(
            "train",
            "digits",
            *SMALL,
            "--canaries",
            "20",
            "--confidence",
            confidence,
            "--out",
            str(tmp_path / "x"),
        )
    assert not (tmp_path / "x").exists()


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="holds no finished dpfy run"):
        runner.invoke(app, ["run", str(tmp_path)], catch_exceptions=False)


@pytest.mark.slow
def test_selftest():
    answer = call("selftest")
    assert answer["good"] is True
    assert answer["bugs"] >= 24
