"""What a newcomer does by mistake: forget the reduction, break out of the loop, ask for a device
that is not there.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import dpfy
from dpfy.accounting.filters import RenyiFilter
from dpfy.core.errors import BudgetExceeded, InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.training import config, job
from dpfy.training.run import TrainingRun

sys.path.insert(0, str(Path(__file__).parent))
import small


def train(
    path: Path, *, leave: int | None = None, reduction: str = "none", catch: bool = False
) -> dpfy.PrivateTraining:
    """A run on a shared ledger in which one plan fits; left after `leave` steps, with a wrong loss,
    or with its refusal caught.
    """
    net, plan = small.model(), small.plan(4)
    run = dpfy.Run(
        path / "run", ledger=path / "people.jsonl", budget=RenyiFilter(1.6 * plan.epsilon, 1e-3)
    )
    with dpfy.PrivateTraining(
        net, torch.optim.SGD(net.parameters(), lr=0.1), small.data(), plan, run
    ) as training:
        for x, y in training.batches():
            if training.steps_done == leave:
                break
            try:
                training.step(functional.cross_entropy(net(x), y, reduction=reduction))
            except InvalidInput:
                if not catch:
                    raise
                break
    return training


def billed(path: Path) -> int:
    return len(Ledger.read(path / "people.jsonl").permits())


def test_a_forgotten_reduction_costs_nothing(tmp_path):
    """Twice, and then the corrected run fits into a budget that has room for one."""
    for _ in range(2):
        with pytest.raises(InvalidInput, match='reduction="none"') as refusal:
            train(tmp_path, reduction="mean")
        assert "--" not in str(refusal.value)
        assert billed(tmp_path) == 0
        assert not (tmp_path / "run").exists()
    train(tmp_path)
    assert billed(tmp_path) == 1
    with pytest.raises(BudgetExceeded):
        TrainingRun(dpfy.Run(tmp_path / "next", ledger=tmp_path / "people.jsonl"), small.plan(4))


@pytest.mark.parametrize("how", [{"leave": 0}, {"reduction": "mean", "catch": True}])
def test_a_run_left_before_its_first_step_is_given_back(tmp_path, how):
    with pytest.warns(
        UserWarning, match=r"left before its first step: nothing was released.*given back"
    ) as said:
        train(tmp_path, **how)
    assert len(said) == 1
    assert billed(tmp_path) == 0
    assert not (tmp_path / "run").exists()
    train(tmp_path)


def test_a_run_left_after_a_step_stays_billed_and_goes_on(tmp_path):
    with pytest.warns(
        UserWarning,
        match=r"unfinished, 2 of 4 steps made, all 4 charged;.*secrets are kept.*resume=True",
    ):
        train(tmp_path, leave=2)
    assert billed(tmp_path) == 1
    assert (tmp_path / "run" / "checkpoint" / "secret.json").is_file()
    net = small.model()
    run = dpfy.Run(tmp_path / "run", resume=True, ledger=tmp_path / "people.jsonl")
    with dpfy.PrivateTraining(
        net, torch.optim.SGD(net.parameters(), lr=0.1), small.data(), small.plan(4), run
    ) as training:
        assert training.steps_done == 2
        for x, y in training.batches():
            training.step(functional.cross_entropy(net(x), y, reduction="none"))
    assert billed(tmp_path) == 1
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_a_run_that_is_interrupted_before_its_first_step_stays(tmp_path):
    """Who presses Ctrl-C may want to go on: nothing is undone."""
    net, plan = small.model(), small.plan(4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with (
        pytest.raises(KeyboardInterrupt) as end,
        dpfy.PrivateTraining(net, optimizer, small.data(), plan, tmp_path / "run"),
    ):
        raise KeyboardInterrupt
    assert "0 of 4 steps made" in end.value.__notes__[0]
    assert (tmp_path / "run" / "checkpoint" / "secret.json").is_file()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last = nn.Linear(small.FEATURES, 8), nn.Linear(8, small.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x.clone().requires_grad_()
        return self.last(
            checkpoint(lambda v: self.first(v).tanh(), kept, use_reentrant=self.reentrant)
        )


def test_reentrant_checkpoints_are_refused_before_anything_is_released(tmp_path):
    """No gradient of one example reaches the layers inside: they would be trained on noise
    alone.
    """
    for reentrant in (True, False):
        net = Checkpointed(reentrant)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if reentrant:
                with pytest.raises(Unsupported, match="use_reentrant=False"):
                    dpfy.fit(
                        net,
                        small.data(),
                        plan=small.plan(2),
                        optimizer=optimizer,
                        run=tmp_path / "run",
                    )
                assert not (tmp_path / "run").exists()
            else:
                dpfy.fit(
                    net, small.data(), plan=small.plan(2), optimizer=optimizer, run=tmp_path / "run"
                )


class Late(nn.Module):
    """Its reentrant checkpoint begins at a later call, in the middle of the graph."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.calls, self.begins = 0, first
        self.first, self.middle, self.last = (
            nn.Linear(small.FEATURES, 8),
            nn.Linear(8, 8),
            nn.Linear(8, small.CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.first(x).tanh()
        if self.calls > self.begins:
            hidden = checkpoint(lambda v: self.middle(v).tanh(), hidden, use_reentrant=True)
        return self.last(hidden)


@pytest.mark.parametrize("engine", ["auto", "bookkeeping", "batched", "loop"])
@pytest.mark.parametrize("first", [0, 1, 2, 5])
def test_a_reentrant_checkpoint_is_refused_whenever_and_in_whatever_engine_it_comes(
    tmp_path, engine, first
):
    net = Late(first)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    training = dpfy.PrivateTraining(
        net,
        optimizer,
        small.data(),
        small.plan(8),
        tmp_path / "run",
        runtime=dpfy.Runtime(engine=engine),
    )

    def run():
        with training:
            for x, y in training.batches():
                training.step(nn.functional.cross_entropy(net(x), y, reduction="none"))

    with pytest.raises(
        Unsupported, match=r"reentrant activation checkpointing.*use_reentrant=False"
    ):
        run()


def test_inspection_names_a_reentrant_checkpoint():
    assert "use_reentrant=False" in str(dpfy.inspect(Late(0), torch.randn(4, small.FEATURES)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has one")
def test_a_missing_gpu_is_said_to_be_missing():
    with pytest.raises(InvalidInput, match=r"which has no CUDA device .*use cpu"):
        dpfy.Runtime(device="cuda")


def test_the_card_says_what_it_is_about(tmp_path):
    about = {"data": "visits of 2024", "author": "the clinic"}
    net = small.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    dpfy.fit(
        net,
        small.data(),
        plan=small.plan(2),
        optimizer=optimizer,
        run=dpfy.Run(tmp_path / "run", about=about),
    )
    said = json.loads((tmp_path / "run" / "privacy.json").read_text())["provenance"]
    assert about.items() <= said.items()
    assert said["model"] == "Sequential"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", said["date"])
    for page in ("report.md", "report.html"):
        text = (tmp_path / "run" / page).read_text()
        assert all(
            words in text for words in ("visits of 2024", "the clinic", "Sequential", said["date"])
        )
    with pytest.raises(InvalidInput, match=r"about\.author"):
        dpfy.Run(tmp_path / "other", about={"author": "two\nlines"})


def test_a_number_of_records_that_forgets_the_holdout_costs_nothing(tmp_path):
    """Where the number is public: one line with the number to give, which works, on the same ledger
    and in the same folder.
    """
    x, y = small.data()
    np.savez(tmp_path / "people.npz", x=x.numpy(), y=y.numpy())
    flags = {
        "data.kind": "npz", "data.path": str(tmp_path / "people.npz"), "data.classes": 3, "data.range": (-4.0, 4.0), "model.name": "linear",  # noqa: E501
        "privacy.records": 200, "privacy.delta": 1e-3, "training.steps": 2, "ledger.path": str(tmp_path / "people.jsonl"),  # noqa: E501
        "ledger.budget_epsilon": 5.0, "privacy.adjacency": "replace-one",
    }  # fmt: skip
    with pytest.raises(
        InvalidInput, match=r"there are 160 records to train on.*give --records 160"
    ):
        job.run(config.make({}, flags), tmp_path / "run")
    assert billed(tmp_path) == 0
    assert not (tmp_path / "run").exists()
    job.run(config.make({}, flags | {"privacy.records": 160}), tmp_path / "run")
    assert billed(tmp_path) == 1
