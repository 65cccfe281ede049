"""Loggers get what a run may publish and nothing else. The writers are fakes with the interfaces of
the packages.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dpfy
from dpfy.core.errors import InvalidInput
from dpfy.integrations.loggers import to_mlflow, to_tensorboard, to_wandb

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
import small


class Fake:
    """Remembers every call: a SummaryWriter, a run of wandb (with its summary), the module
    mlflow.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.summary: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **settings: self.calls.append((name, given, settings))


LOGGERS = {"tensorboard": to_tensorboard, "wandb": to_wandb, "mlflow": to_mlflow}


@pytest.mark.parametrize("name", LOGGERS)
def test_public_values_reach_the_logger_and_private_ones_do_not(tmp_path, name):
    net, fake = small.model(), Fake()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    with dpfy.PrivateTraining(net, sgd, small.data(), small.plan(3), tmp_path / "run") as training:
        log = LOGGERS[name](training, fake)
        for x, y in training.batches():
            losses = nn.functional.cross_entropy(net(x), y, reduction="none")
            training.step(losses)
            before = len(fake.calls)
            for bad in (losses.mean().item(), losses.mean(), losses, "0.3"):
                with pytest.raises(InvalidInput):
                    log(loss=bad)
            assert len(fake.calls) == before
            if training.boundary:
                log(accuracy=0.25 * training.steps_done)
        with pytest.raises(InvalidInput, match="after the block of the run"):
            log.card()
    told = log.card()
    assert told["epsilon"] == pytest.approx(training.plan.epsilon)
    assert (small.card_of(tmp_path / "run"))["recorded"] == "accuracy"
    written = repr(fake.calls) + repr(fake.summary)
    assert "accuracy" in written
    assert "0.75" in written
    assert "learning_rate" in written
    assert "'loss'" not in written
    assert "epsilon" in written
    logged = [
        call
        for call in fake.calls
        if call[0] in ("add_scalar", "log", "log_metrics") and "accuracy" in repr(call[1])
    ]
    assert [
        given[2] if name == "tensorboard" else settings["step"] for _, given, settings in logged
    ] == [1, 2, 3]
