"""One training run of a study, private or plain, in a folder that is thrown away; what is kept is the cell."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import dpfy
from dpfy.core.codec import number
from dpfy.data.records import Records

EVALUATION = 2000


def private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Records, Records],
    plan: dpfy.Plan,
    *,
    seed: int,
    device: str = "cpu",
    update: dpfy.Update | None = None,
) -> dict[str, Any]:
    """`dpfy.fit` with a fixed noise seed (the data of the studies is public): accuracy, epsilon and their course over the steps."""
    train, test = data
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        run = dpfy.Run(Path(folder) / "run", seed=seed)
        result = dpfy.fit(
            model, train, plan=plan, optimizer=optimizer, run=run, test=test, runtime=dpfy.Runtime(device=device), update=update
        )
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    recipe = plan.recipe
    return {
        **measured(model, test, device),
        "curve": [{k: number(v) if isinstance(v, float) else v for k, v in row.items()} for row in rows],
        "epsilon": number(result.epsilon),
        "delta": plan.delta,
        "accountant": plan.accountant,
        "adjacency": recipe.adjacency.value,
        "unit": recipe.unit.name,
        "noise_multiplier": plan.noise_multiplier,
        "noise_on_sum": plan.stddev,
        "steps": recipe.steps,
        "training_seconds": round(result.seconds, 2),
    }


def plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Records, Records],
    *,
    epochs: int,
    batch: int,
    seed: int,
    device: str = "cpu",
) -> dict[str, Any]:
    """Ordinary training in reshuffled batches, without privacy: the upper bound."""
    train, test = (part.to(device) for part in data)
    torch.manual_seed(seed)
    model.to(device).train()
    start, curve = time.monotonic(), []
    for epoch in range(epochs):
        for indices in torch.randperm(len(train)).split(batch):
            x, y = train.take(indices)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        curve.append({"epoch": epoch + 1, **_scores(model, test)})
    return {**measured(model, test, device), "curve": curve, "training_seconds": round(time.monotonic() - start, 2)}


def measured(model: nn.Module, test: Records, device: str) -> dict[str, Any]:
    """Accuracy, confusion (rows: truth) and the time to label all test records."""
    held_out = test.to(device)
    start = time.monotonic()
    guesses = _outputs(model, held_out)[0].argmax(1)
    seconds = time.monotonic() - start
    truth = held_out.tensors[1]
    confusion = torch.zeros(10, 10, dtype=torch.int64, device=truth.device)
    confusion.index_put_((truth, guesses), torch.ones_like(truth), accumulate=True)
    right = float((guesses == truth).double().mean())
    return {"test_accuracy": right, "confusion": confusion.tolist(), "inference_seconds": round(seconds, 4)}


def _scores(model: nn.Module, test: Records) -> dict[str, float]:
    outputs, truth = _outputs(model, test)
    loss = float(functional.cross_entropy(outputs, truth))
    return {"test_loss": loss, "test_accuracy": float((outputs.argmax(1) == truth).double().mean())}


@torch.no_grad()
def _outputs(model: nn.Module, test: Records) -> tuple[Tensor, Tensor]:
    mode = model.training
    model.eval()
    try:
        parts = [model(test.take(indices)[0]) for indices in torch.arange(len(test)).split(EVALUATION)]
    finally:
        model.train(mode)
    return torch.cat(parts), test.tensors[1]
