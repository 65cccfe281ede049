"""`dpfy train --protect labels`: one line for bad input, a folder that verifies, predictions,
resuming.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dpfy
import dpfy.labels

sys.path.insert(0, str(Path(__file__).parent))
from calls import call, refused


@pytest.fixture
def arrays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    y = np.arange(400) % 2
    np.savez("people.npz", x=rng.normal(size=(400, 3)).astype(np.float32) + 3 * y[:, None], y=y)
    return [
        "--path",
        "people.npz",
        "--set",
        "data.classes=2",
        "--set",
        "data.range=[-8,8]",
        "--records",
        "320",
    ]


def test_a_run_verifies_predicts_and_is_resumed(capsys, arrays):
    status, out, err = call(
        capsys,
        "train",
        "--protect",
        "labels",
        *arrays,
        "--set",
        "data.test=public",
        "--out",
        "run",
        "--json",
    )
    assert status == 0, err
    told = json.loads(out)
    assert (told["adjacency"], told["unit"], told["method"], told["delta"]) == (
        "replace-one",
        "label",
        "projection",
        1e-5,
    )
    assert told["epsilon"] <= 1.0
    assert told["test_accuracy"] > 0.9
    assert call(capsys, "verify", "run")[0] == 0
    status, out, err = call(capsys, "predict", "run", "people.npz", "--json")
    assert status == 0, err
    said = [int(row["prediction"]) for row in json.loads(out)["predictions"]]
    assert (np.array(said) == np.arange(400) % 2).mean() > 0.9
    assert dpfy.labels.load("run")(torch.zeros(2, 3)).shape == (2, 2)
    assert not dpfy.load("run").training
    assert "publishes them" in Path("run/report.md").read_text()
    status, out, _ = call(capsys, "train", "--resume", "--out", "run", "--json")
    assert status == 0
    assert json.loads(out)["epsilon"] == told["epsilon"]


def test_a_pure_method_withholds_what_nobody_called_public(capsys, arrays):
    given = ["--method", "lp-mst", "--epsilon", "3", "--set", "labels.stages=3", "--out", "run"]
    status, out, err = call(capsys, "train", "--protect", "labels", *arrays, *given)
    assert status == 0, err
    assert "withheld" in out
    assert "pure 3.000-differential privacy for one label (labels only)" in out
    assert call(capsys, "verify", "run")[0] == 0


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--protect", "features"], "--protect"),
        (["--method", "rr"], "goes with --protect labels"),
        (["--protect", "labels", "--clip-norm", "1"], "--clip-norm"),
        (["--protect", "labels", "--method", "rr-on-bins"], "labels.method"),
        (["--protect", "labels", "--method", "rr", "--set", "labels.stages=2"], "labels.stages"),
        (["--protect", "labels", "--epsilon", "0"], "labels.epsilon"),
        (["--protect", "labels", "--data", "shakespeare"], "data.kind"),
        (["--protect", "labels", "--set", "data.test=billed"], "data.test"),
        (["--protect", "labels", "--set", "training.steps=3"], "--set section"),
        (["--protect", "labels", "--resume"], "--resume"),
        (["--protect", "labels", "--resume", "--out", "nothing"], "--resume"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(capsys, tmp_path, monkeypatch, words, match):
    monkeypatch.chdir(tmp_path)
    assert match in refused(capsys, "train", *words)
    assert list(tmp_path.iterdir()) == []


def test_every_field_is_shown(capsys):
    status, out, _ = call(capsys, "train", "--protect", "labels", "--show-config")
    assert status == 0
    assert "[labels]" in out
    assert "lp-mst" in out
