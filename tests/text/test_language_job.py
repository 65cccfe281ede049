"""`dpfy train` on text: windows of tokens as units, and a language model by name."""

from __future__ import annotations

import json

import pytest
import torch

import dpfy
from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.core.unit import TOKEN_WINDOW, Adjacency, Unit
from dpfy.models.build import build
from dpfy.models.config import ModelConfig
from dpfy.training import config as configuration
from dpfy.training import job

SETTINGS = {
    "privacy.records": 160,
    "privacy.delta": 1e-3,
    "training.steps": 3,
    "training.batch_size": 40,
    "model.width": 16,
    "model.layers": 1,
    "data.length": 15,
}


def job_of(path, **more):
    return configuration.make({}, SETTINGS | {"data.path": str(path)} | more)


def test_a_text_file_trains_a_language_model_and_the_report_states_the_window(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("the patient slept well and walked today. " * 80)
    outcome = job.run(job_of(path), tmp_path / "run", seed=1)
    assert all(finding.holds for finding in dpfy.verify(outcome.run))
    unit = json.loads((outcome.run / "privacy.json").read_text())["unit"]
    assert (unit["name"], unit["tokens"]) == (TOKEN_WINDOW, 16)
    assert "at most 16 tokens" in unit["meaning"]
    model = dpfy.load(outcome.run)
    assert model(torch.zeros(2, 15, dtype=torch.int64)).shape == (2, 15, 256)
    with pytest.raises(DpfyError, match=r"dpfy\.load"):
        dpfy.predict(outcome.run, path)


def test_a_language_model_looks_at_nothing_that_follows():
    model = build(ModelConfig("gpt-small", width=16, layers=2), (10,), 256).eval()
    ids = torch.randint(0, 256, (3, 10))
    other = ids.clone()
    other[:, 6:] = torch.randint(0, 256, (3, 4))
    assert torch.equal(model(ids)[:, :6], model(other)[:, :6])
    assert not torch.equal(model(ids)[:, 6:], model(other)[:, 6:])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model.name": "linear", "model.width": 128, "model.layers": 4}, "model.name"),
        ({"model.width": 18}, "model.width"),
        ({"model.layers": 0}, "model.layers"),
        ({"data.test": "billed"}, "data.test"),
        ({"model.hidden": [3]}, "model.hidden"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_spent(tmp_path, change, named):
    path = tmp_path / "notes.txt"
    path.write_text("some text " * 400)
    with pytest.raises(InvalidInput, match=named.replace(".", r"\.")):
        job.run(job_of(path, **change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_table_has_no_language_model():
    values = {"data.kind": "digits", "model.name": "gpt-small"}
    with pytest.raises(InvalidInput, match=r"model\.name"):
        job.plan_of(configuration.make({}, values))


def test_windows_of_other_lengths_are_other_units_and_documents_are_not(tmp_path):
    def opened(name, tokens):
        unit = Unit(name, tokens=tokens)
        return Ledger.open(
            tmp_path / f"{name}.jsonl", unit=unit, adjacency=Adjacency.ADD_OR_REMOVE_ONE
        )

    for name in (TOKEN_WINDOW, "example"):
        opened(name, 16)
        with pytest.raises(InvalidInput, match="ledger unit"):
            opened(name, 32)
    opened("document", 16)
    opened("document", 32)
