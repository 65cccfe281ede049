"""Losses written for one record: no replays are made, the report says why, and a run cannot change over to or from them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import dpfy
from dpfy.core.errors import InvalidInput
from dpfy.training.watch import Kind

sys.path.insert(0, str(Path(__file__).parent))
import watched
from watched import net, plain


def loop(path: Path, count: int, how: str, *, resume: bool = False) -> dpfy.PrivateTraining:
    """`count` steps of a run; with `how`, its losses count as isolated by construction."""
    torch.manual_seed(0)
    model = net()
    plan = dpfy.dpsgd(watched.RECORDS, 12, steps=20).with_noise(1.0, delta=1e-3)
    run = dpfy.Run(path / "run", seed=1, resume=resume)
    with dpfy.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=0.05), watched.vectors(), plan, run) as training:
        assert training.watch is not None
        if how:
            training.watch.isolate(how)
        for x, y in training.batches():
            training.step(plain(model, x, y))
            if training.steps_done == count:
                break
    return training


@pytest.mark.filterwarnings("ignore:run .* unfinished")
def test_isolated_losses_are_neither_recorded_nor_replayed_and_the_report_says_so(tmp_path: Path) -> None:
    training = loop(tmp_path, 20, "one by one")
    assert training.watch is not None
    checks = training.watch.checks
    assert (checks.recorded, checks.replayed, checks.through_model) == (0, 0, 0)
    assert all(training.watch.kind(step) is Kind.NOTHING for step in range(20))
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert "isolated by construction: one by one" in json.dumps(card)


@pytest.mark.filterwarnings("ignore:run .* unfinished")
@pytest.mark.parametrize(("before", "after"), [("", "one by one"), ("one by one", ""), ("one by one", "vectorised")])
def test_a_run_is_resumed_with_the_isolation_it_was_begun_with(before: str, after: str, tmp_path: Path) -> None:
    loop(tmp_path, 5, before)
    with pytest.raises(InvalidInput, match="resume losses"):
        loop(tmp_path, 8, after, resume=True)
    assert loop(tmp_path, 8, before, resume=True).steps_done == 8
