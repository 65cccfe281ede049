"""The progress bar: in one call and in your own loop, on standard error, only when wanted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import dpfy
from dpfy.training.metrics import marks

sys.path.insert(0, str(Path(__file__).parent))
import small


@pytest.mark.parametrize("wanted", [True, False])
def test_your_own_loop_has_a_bar_with_epsilon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wanted: bool
) -> None:
    net, plan = small.model(), small.plan(6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    runtime = dpfy.Runtime(progress=wanted, max_physical_batch=16)
    with dpfy.PrivateTraining(
        net, optimizer, small.data(), plan, dpfy.Run(tmp_path / "run", seed=0), runtime=runtime
    ) as training:
        for x, y in training.batches():
            training.step(functional.cross_entropy(net(x), y, reduction="none"))
    shown = capsys.readouterr()
    assert not shown.out
    assert ("6/6" in shown.err) is wanted
    assert (f"epsilon {plan.epsilon:.3f}" in shown.err) is wanted


def test_marks_end_with_the_last_step() -> None:
    assert marks(6) == {0, 1, 2, 3, 4, 5, 6}
    assert max(marks(1000)) == 1000
    assert len(marks(1000)) == 20
