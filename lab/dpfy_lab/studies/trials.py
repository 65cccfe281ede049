"""One training run of a study, private or plain, in a folder that is thrown away; what is kept is
the cell.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import dpfy
from dpfy.core.codec import number
from dpfy.data.records import Records
from dpfy.training import Update

EVALUATION = 2000
MARKS = 20
"""Places in a run where the course is noted."""


def private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Records, Records],
    plan: dpfy.Plan,
    *,
    seed: int,
    device: str = "cpu",
    update: Update | None = None,
) -> dict[str, Any]:
    """`dpfy.fit` with a fixed noise seed (the data of the studies is public): accuracy, epsilon and
    their course over the steps.
    """
    train, test = data
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        run = dpfy.Run(Path(folder) / "run", seed=seed)
        result = dpfy.fit(
            model,
            train,
            plan=plan,
            optimizer=optimizer,
            run=run,
            evaluation=dpfy.PublicTest(test),
            runtime=dpfy.Runtime(device=device),
            update=update,
        )
        rows = [
            json.loads(line)
            for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        ]
    return measured(model, test, device) | _told(plan, rows, result.epsilon, result.seconds)


def following(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Records, Records],
    plan: dpfy.Plan,
    *,
    seed: int,
    device: str = "cpu",
) -> dict[str, Any]:
    """The same with an adaptive clip norm and a learning rate that falls as the norm rises: their
    product stays what it was.

    The norm of each step was released by the steps before it, so a rate that follows it costs
    nothing.
    """
    train, test = data
    torch.manual_seed(seed)
    start, rows = time.monotonic(), []
    first = plan.recipe.clip.norm  # type: ignore[attr-defined]
    runtime = dpfy.Runtime(device=device)
    every = max(1, plan.recipe.steps // MARKS)
    with tempfile.TemporaryDirectory() as folder:
        run = dpfy.Run(Path(folder) / "run", seed=seed)
        falling = _falling(optimizer, lambda: first / training.clip.norm)  # type: ignore[attr-defined]
        with dpfy.PrivateTraining(model, falling, train, plan, run, runtime=runtime) as training:
            held_out = test.to(training.device)
            model.train()
            for x, y in training.batches():
                norm = training.clip.norm  # type: ignore[attr-defined]
                before = training.steps_done
                training.step(functional.cross_entropy(model(x), y, reduction="none"))
                if (
                    done := training.steps_done
                ) > before and done % every == 0:  # a step may take several physical batches
                    scores = {
                        "step": done,
                        "epsilon": plan.epsilon_after(done),
                        "clip_norm": norm,
                        **_scores(model, held_out),
                    }
                    rows.append({k: number(v) for k, v in scores.items()})
            epsilon = training.guarantee().epsilon(plan.delta)
    return measured(model, test, device) | _told(plan, rows, epsilon, time.monotonic() - start)


def _falling(
    optimizer: torch.optim.Optimizer, factor: Callable[[], float]
) -> torch.optim.Optimizer:
    """`optimizer`, with learning rates times what `factor` gives at each step: a function of
    released values alone.
    """
    rates, kind = [group["lr"] for group in optimizer.param_groups], type(optimizer)

    class Falling(kind):  # type: ignore[valid-type, misc]
        def step(self, closure: Any = None) -> Any:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate * factor()
            return super().step(closure)

    made: torch.optim.Optimizer = object.__new__(Falling)
    made.__dict__.update(optimizer.__dict__)
    return made


def _told(
    plan: dpfy.Plan, rows: list[dict[str, Any]], epsilon: float, seconds: float
) -> dict[str, Any]:
    recipe = plan.recipe
    return {
        "curve": [
            {k: number(v) if isinstance(v, float) else v for k, v in row.items()} for row in rows
        ],
        "epsilon": number(epsilon),
        "delta": plan.delta,
        "accountant": plan.accountant,
        "adjacency": recipe.adjacency.value,
        "unit": recipe.unit.name,
        "noise_multiplier": plan.noise_multiplier,
        "noise_on_sum": plan.stddev,
        "steps": recipe.steps,
        "training_seconds": round(seconds, 2),
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
    return {
        **measured(model, test, device),
        "curve": curve,
        "training_seconds": round(time.monotonic() - start, 2),
    }


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
    return {
        "test_accuracy": right,
        "confusion": confusion.tolist(),
        "inference_seconds": round(seconds, 4),
    }


def _scores(model: nn.Module, test: Records) -> dict[str, float]:
    outputs, truth = _outputs(model, test)
    loss = float(functional.cross_entropy(outputs, truth))
    return {"test_loss": loss, "test_accuracy": float((outputs.argmax(1) == truth).double().mean())}


@torch.no_grad()
def _outputs(model: nn.Module, test: Records) -> tuple[Tensor, Tensor]:
    mode = model.training
    model.eval()
    try:
        parts = [
            model(test.take(indices)[0]) for indices in torch.arange(len(test)).split(EVALUATION)
        ]
    finally:
        model.train(mode)
    return torch.cat(parts), test.tensors[1]
