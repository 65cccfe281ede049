"""A model that diverges is a result like another: the run ends, is billed, and can be verified."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import dpfy

sys.path.insert(0, str(Path(__file__).parent))
import small


def test_a_loss_that_is_no_number_does_not_break_the_run(tmp_path):
    net = nn.Sequential(
        nn.Linear(small.FEATURES, 16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, small.CLASSES),
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=1e18)
    result = dpfy.fit(
        net,
        small.data(),
        plan=small.plan(),
        optimizer=optimizer,
        run=tmp_path / "run",
        evaluation=dpfy.PublicTest(small.held_out()),
    )
    assert not torch.isfinite(torch.tensor(result.utility["test_loss"]))
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows[-1]["step"] == small.STEPS
    assert "infinity" in {row["test_loss"] for row in rows}
    card = small.card_of(tmp_path / "run")
    assert card["utility"]["test_loss"] == "infinity"
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))
