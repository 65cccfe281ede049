"""Training on batches of a fixed size: billed by their own event, divided by their size, resumed
bit for bit, and verified.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import dpfy
from dpfy import accounting
from dpfy.accounting.patterns import TrainingPattern
from dpfy.accounting.rules import unsampled
from dpfy.cli.app import main
from dpfy.core import events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.gradients.clip import FlatClip
from dpfy.noise.schedule import equal_phases
from dpfy.noise.toeplitz import Banded
from dpfy.plan.claim import ForeignBatches
from dpfy.plan.claim import TrainingClaim as Claim
from dpfy.plan.recipe import Recipe
from dpfy.report import card as cards
from dpfy.sampling.samplers import WithoutReplacementSampler

sys.path.insert(0, str(Path(__file__).parent))
import small

FIXED = {"sampling": "without-replacement", "adjacency": "replace-one"}


def recipe(batch: float = 20, **changes: object) -> Recipe:
    return dpfy.dpsgd(small.RECORDS, batch, **({"steps": 12, "clip_norm": 0.5} | FIXED | changes))


def step(noise: float, size: int = 20) -> events.Event:
    return events.SampledWithoutReplacement(small.RECORDS, size, events.Gaussian(noise))


def test_the_bill_is_that_of_fixed_size_samples():
    plan = recipe().with_noise(1.5, delta=1e-3)
    assert plan.event == events.Repeated(step(1.5), 12)
    assert plan.recipe.expected_batch == 20
    assert (
        plan.event
        == TrainingPattern(1.5, 1.0, 12, "without-replacement", small.RECORDS, 20).claim().event
    )
    assert recipe(small.RECORDS).event(1.5) == events.Repeated(events.Gaussian(1.5), 12), (
        "a batch of everybody"
    )
    phases = replace(recipe(), strategy=equal_phases(12, (2.0, 1.0)))
    assert phases.event(1.5) == events.Composed(
        (events.Repeated(step(3.0), 6), events.Repeated(step(1.5), 6))
    )
    calibrated = recipe().calibrate(2.0, 1e-3)
    assert 2.0 * 0.999 <= calibrated.epsilon <= 2.0
    assert dpfy.Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.epsilon < accounting.epsilon(
        unsampled(plan.event), 1e-3, adjacency=plan.recipe.adjacency
    )


def test_what_has_no_proof_is_refused_and_says_what_has():
    for adjacency in ("add-or-remove-one", "zero-out"):
        with pytest.raises(Unsupported, match="state replace-one"):
            recipe(adjacency=adjacency)
    with pytest.raises(InvalidInput, match="whole number"):
        recipe(20.5)
    with pytest.raises(InvalidInput, match="one of"):
        recipe(sampling="with-replacement")
    with pytest.raises(InvalidInput, match="those of the sampler"):
        Recipe(
            small.RECORDS + 1,
            WithoutReplacementSampler(20, small.RECORDS),
            12,
            FlatClip(1.0),
            adjacency="replace-one",
        )
    with pytest.raises(Unsupported, match="WithoutReplacement with Identity"):
        Recipe(
            small.RECORDS,
            WithoutReplacementSampler(20, small.RECORDS),
            12,
            FlatClip(1.0),
            Banded((1.0, 0.5)),
        )


def test_batches_formed_elsewhere_earn_no_amplification():
    plan = recipe().with_noise(1.5, delta=1e-3)
    claim = Claim(plan, ForeignBatches("shuffled in a buffer of 1,000 records, then read in order"))
    assert claim.event == events.Repeated(events.Gaussian(1.5), 12)
    assert any("without amplification" in line for line in claim.warnings({}))
    assert Claim(plan, ForeignBatches("shuffled", most=9)).event == events.Repeated(
        events.Gaussian(1.5), 9
    )


def train(folder: Path, stop: int | None = None, resume: bool = False) -> list[torch.Tensor]:
    """Train, or go on with, a run that ends early where `stop` says so."""
    torch.set_num_threads(1)
    net = small.model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    plan, runtime = recipe().with_noise(2.0, delta=1e-3), dpfy.Runtime(max_physical_batch=12)
    with dpfy.PrivateTraining(
        net, optimizer, small.data(), plan, dpfy.Run(folder, seed=3, resume=resume), runtime=runtime
    ) as training:
        for x, y in training.batches():
            training.step(functional.cross_entropy(net(x), y, reduction="none"))
            if training.steps_done == stop:
                break
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.filterwarnings("ignore:run .* unfinished")
def test_a_resumed_run_is_the_same_run_and_its_card_is_verified(tmp_path):
    whole = train(tmp_path / "whole")
    train(tmp_path / "cut", stop=5)
    for a, b in zip(whole, train(tmp_path / "cut", resume=True), strict=True):
        assert torch.equal(a, b)
    card = json.loads((tmp_path / "cut" / "privacy.json").read_text())
    told = cards.section(card, "training")
    assert told["mechanism"]["sampling"] == {
        "kind": "without-replacement",
        "batch_size": 20,
        "records": small.RECORDS,
    }
    assert "exactly 20 of 200" in told["mechanism"]["sampling_words"]
    assert card["guarantee"]["adjacency"] == "replace-one"
    assert any(
        "exactly 20 of 200" in line and "made for this pattern" in line for line in card["warnings"]
    )
    assert all(f.holds for f in dpfy.verify(tmp_path / "cut"))


@pytest.mark.parametrize("change", [-1, 1])
def test_data_of_another_size_is_refused_before_anything_is_reserved(tmp_path, change):
    """One record more or less is one percent less: Poisson plans allow for it, a fixed size does
    not.
    """
    x, y = small.data()
    x, y = (
        (x[:change], y[:change]) if change < 0 else (torch.cat([x, x[:1]]), torch.cat([y, y[:1]]))
    )
    net = small.model()
    plan = recipe().with_noise(2.0, delta=1e-3)
    with pytest.raises(InvalidInput, match="the plan was made for 200"):
        dpfy.fit(
            net,
            (x, y),
            plan=plan,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            run=tmp_path / "run",
        )
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main([*arguments])
    return int(stop.value.code or 0)


def test_on_the_command_line(tmp_path, capsys):
    fast = [
        "train",
        "--data",
        "digits",
        "--model",
        "linear",
        "--delta",
        "1e-4",
        "--batch-size",
        "64",
        "--steps",
        "3",
    ]
    fixed = [*fast, "--sampling", "without-replacement"]
    assert call(*fixed, "--out", str(tmp_path / "a")) == 2
    assert "state replace-one" in capsys.readouterr().err
    replaced = [*fixed, "--set", "privacy.adjacency=replace-one"]
    assert call(*replaced, "--out", str(tmp_path / "b")) == 0
    assert call("verify", str(tmp_path / "b")) == 0
    capsys.readouterr()
    assert call(*replaced, "--mechanism", "tree", "--out", str(tmp_path / "c")) == 2
    assert "goes with the mechanism dp-sgd" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "c").exists()


def test_an_audit_of_such_a_run_is_refused_with_the_way_out():
    from dpfy.audit.job import _auditable

    with pytest.raises(Unsupported, match="audit Poisson batches or random allocation"):
        _auditable(recipe().with_noise(1.25, delta=1e-3))
