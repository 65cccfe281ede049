"""Exact noise in a plan: from Python and the command line to the card and its verification; audited
and resumed like any other.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import dpfy
from dpfy.cli.app import main
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.plan.correlated import bandmf, blt, dpftrl
from dpfy.plan.recipe import Plan
from dpfy.report import schema

FAST = [
    "--data",
    "digits",
    "--records",
    "1438",
    "--model",
    "linear",
    "--delta",
    "1e-4",
    "--batch-size",
    "200",
    "--steps",
    "9",
]


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main([*arguments])
    return int(stop.value.code or 0)


def test_from_the_command_line_to_the_card(tmp_path, capsys):
    out = tmp_path / "run"
    assert (
        call(
            "train",
            *FAST,
            "--set",
            "training.noise=exact",
            "--epsilon",
            "3",
            "--insecure-seed",
            "1",
            "--out",
            str(out),
            "--json",
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["epsilon"] <= 3
    assert call("verify", str(out)) == 0
    assert json.loads((out / "plan.json").read_text())["recipe"]["noise"] == "exact"
    assert 'noise = "exact"' in (out / "config.toml").read_text()
    card = json.loads((out / "privacy.json").read_text())
    schema.check(card)
    told = json.dumps(card)
    assert "real numbers" in told
    assert "floating point, " not in told
    assert "bits of the noise" in (out / "report.html").read_text()
    rows = [row for row in _rows(card) if row.get("what") == "arithmetic"]
    assert [row["holds"] for row in rows] == ["yes"]
    (out / "plan.json").write_text((out / "plan.json").read_text().replace('"exact"', '"float"'))
    assert call("verify", str(out)) == 1, "a report of exact noise beside a plan of float noise"


def _rows(value):
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _rows(part)


def test_a_plan_says_so_and_old_plans_read_as_they_were():
    recipe = dpfy.dpsgd(1000, 50, steps=10, noise="exact")
    plan = recipe.with_noise(1.0, delta=1e-5)
    assert Plan.from_json(plan.to_json()) == plan
    plain = dataclasses.replace(plan, recipe=dataclasses.replace(recipe, noise="float"))
    assert "noise" not in plain.to_json()["recipe"]
    assert plain.fingerprint() != plan.fingerprint()
    assert plan.epsilon == plain.epsilon, (
        "the charge is that of the real Gaussian: nothing is added for the bits"
    )
    with pytest.raises(InvalidInput, match="noise"):
        dpfy.dpsgd(1000, 50, steps=10, noise="exakt")


def test_which_mechanisms_have_it(capsys, tmp_path):
    for recipe in (
        bandmf(1000, 50, bands=4, steps=20, noise="exact"),
        blt(1000, 50, steps=20, noise="exact"),
        dpftrl(1000, 50, steps=20, estimator="completed", noise="exact"),
    ):
        assert recipe.noise == "exact"
    with pytest.raises(Unsupported, match="completed"):
        dpftrl(1000, 50, steps=20, noise="exact")
    flags = ["--set", "training.noise=exact", "--out", str(tmp_path / "run")]
    for mechanism in ("tree", "sqrt"):
        assert call("train", *FAST, *flags, "--mechanism", mechanism) == 2
        said = capsys.readouterr().err
        assert "exact noise for the strategy" in said
        assert "band-mf" in said
    assert (
        call("train", *FAST, "--set", "training.noise=nearly", "--out", str(tmp_path / "run")) == 2
    )
    assert "training.noise" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mechanism", ["band-mf", "blt"])
def test_correlated_noise_is_resumed_bit_for_bit(tmp_path, mechanism):
    def trained(name: str, stop: int | None) -> list[bytes]:
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        recipe = (
            bandmf(60, 10, bands=3, steps=12, noise="exact")
            if mechanism == "band-mf"
            else blt(60, 10, steps=12, noise="exact")
        )
        plan = recipe.with_noise(1.0, delta=1e-3)
        generator = torch.Generator().manual_seed(1)
        x, y = (
            torch.randn(60, 5, generator=generator),
            torch.randint(0, 3, (60,), generator=generator),
        )
        run = dpfy.Run(tmp_path / name, resume=True, seed=5)
        with dpfy.PrivateTraining(
            model, torch.optim.SGD(model.parameters(), lr=0.1), (x, y), plan, run
        ) as training:
            for features, labels in training.batches():
                training.step(
                    torch.nn.functional.cross_entropy(model(features), labels, reduction="none")
                )
                if stop is not None and training.steps_done == stop:
                    break
        return [p.detach().numpy().tobytes() for p in model.parameters()]

    whole = trained("whole", None)
    with pytest.warns(UserWarning, match="unfinished"):
        trained("halves", 5)
    assert trained("halves", None) == whole
