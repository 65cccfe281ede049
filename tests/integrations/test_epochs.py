"""One rule of epochs in all tools: with records that are no whole number of batches the Trainer,
Lightning, Accelerate and `fit` make the steps of the plan, in the same passes, to the same bits.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

transformers = pytest.importorskip("transformers")
lightning = pytest.importorskip("lightning")
pytest.importorskip("accelerate")

import dpfy  # noqa: E402
from dpfy.core.errors import InvalidInput  # noqa: E402
from dpfy.integrations import adapter  # noqa: E402
from dpfy.integrations.accelerate import PrivateAccelerator  # noqa: E402
from dpfy.integrations.hugging_face import PrivateTrainer  # noqa: E402
from dpfy.integrations.lightning import PrivateStrategy  # noqa: E402

PLAN = dpfy.dpsgd(records=60, batch_size=14, epochs=2, clip_norm=0.5).with_noise(1.0, delta=1e-2)
"""60 records are 4.29 batches: 9 steps, 5 in the first epoch and 4 in the last."""
RUNTIME = dpfy.Runtime(max_physical_batch=4, device="cpu", progress=False)
LOADER: dict[str, Any] = {}
"""What else the caller's loader says."""
TOOLS = ("trainer", "lightning", "accelerate", "fit")


def data() -> TensorDataset:
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, 0] > 0).long())


def loader_of() -> DataLoader:
    return DataLoader(data(), batch_size=14, **LOADER)


def net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Linear(5, 2)


class Model(nn.Module):
    """As the Trainer calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        return self.net(x)


class Module(lightning.LightningModule):
    def __init__(self, ends: list[int]) -> None:
        super().__init__()
        self.net, self.ends = net(), ends

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")

    def validation_step(self, batch, batch_idx):
        self.ends.append(self.trainer.global_step)

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == PLAN.recipe.steps
        return torch.optim.SGD(self.parameters(), lr=0.3)


class Ends(transformers.TrainerCallback):
    def __init__(self, ends: list[int]) -> None:
        self.ends = ends

    def on_evaluate(self, args, state, control, **given):
        self.ends.append(state.global_step)


def rows(part: TensorDataset) -> list[dict[str, torch.Tensor]]:
    return [{"x": x, "labels": y} for x, y in part]


def by_trainer(run: dpfy.Run, epochs: float, ends: list[int], **settings: Any) -> nn.Module:
    """With an evaluation after each epoch."""
    args = transformers.TrainingArguments(
        str(run.path) + "-out",
        num_train_epochs=epochs,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        lr_scheduler_type="constant",
        **settings,
    )
    model = Model()
    made = PrivateTrainer(
        model=model,
        args=args,
        train_dataset=rows(data()),
        eval_dataset=rows(TensorDataset(*(t[:3].clone() for t in data().tensors))),
        plan=PLAN,
        run=run,
        runtime=RUNTIME,
        eval_is="public",
        compute_loss_func=lambda out, y, **_: F.cross_entropy(out, y, reduction="none"),
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.3), None),
        callbacks=[Ends(ends)],
    )
    made.evaluate = lambda *_, **__: (
        made.callback_handler.on_evaluate(made.args, made.state, made.control, metrics={}) and {}
    )
    out = made.train()
    assert made.state.epoch == adapter.epoch_at(PLAN.recipe, PLAN.recipe.steps)
    assert made.state.num_train_epochs == adapter.epoch_count(PLAN.recipe)
    assert out.training_loss is None, "the training loss is private, and NaN would be a failure"
    return made.model.net


def by_lightning(run: dpfy.Run, epochs: int, ends: list[int], **settings: Any) -> nn.Module:
    """With a validation after each epoch, as is Lightning's default."""
    module = Module(ends)
    made = lightning.Trainer(
        strategy=PrivateStrategy(PLAN, run, device="cpu", runtime=RUNTIME, val_is="public"),
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **settings,
    )
    public = TensorDataset(*(t[:3].clone() for t in data().tensors))
    made.fit(module, loader_of(), DataLoader(public, batch_size=3))
    assert made.current_epoch == epochs
    assert made.global_step == PLAN.recipe.steps
    return module.net


def by_accelerate(run: dpfy.Run, epochs: int, ends: list[int], **settings: Any) -> nn.Module:
    """The loop of the documentation."""
    model = net()
    made = PrivateAccelerator(plan=PLAN, run=run, runtime=RUNTIME, cpu=True, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = made.prepare(model, optimizer, loader_of())
    each = adapter.steps_per_epoch(PLAN.recipe)
    assert (made.epochs, len(loader)) == (adapter.epoch_count(PLAN.recipe), each)
    for _ in range(epochs):
        for x, y in loader:
            made.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            optimizer.zero_grad()
        ends.append(made.training.steps_done)
    made.end_training()
    return model


def by_fit(run: dpfy.Run, epochs: int, ends: list[int]) -> nn.Module:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    dpfy.fit(model, data(), plan=PLAN, optimizer=optimizer, run=run, runtime=RUNTIME)
    return model


def by_loop(run: dpfy.Run, epochs: int, ends: list[int]) -> dpfy.PrivateTraining:
    """A loop of one's own, up to its first line."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    return dpfy.PrivateTraining(model, optimizer, DataLoader(data(), batch_size=14), PLAN, run)


DRIVE = dict(zip(TOOLS, (by_trainer, by_lightning, by_accelerate, by_fit), strict=True))


def reference(path: Path) -> torch.Tensor:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    torch.manual_seed(3)
    with dpfy.PrivateTraining(
        model, optimizer, data(), PLAN, dpfy.Run(path / "two", seed=3), runtime=RUNTIME
    ) as training:
        for x, y in training.batches():
            training.step(F.cross_entropy(model(x), y, reduction="none"))
    assert training.steps_done == PLAN.recipe.steps
    return model.weight.detach()


@pytest.mark.parametrize("tool", TOOLS)
def test_a_plan_of_two_epochs_is_two_epochs_in_every_tool(tmp_path, tool):
    ends: list[int] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(unfinished|ended after)")
        made = DRIVE[tool](dpfy.Run(tmp_path / "run", seed=3), 2, ends)
    assert ends == ([] if tool == "fit" else [5, 9]), "one measurement after each epoch"
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))
    assert torch.equal(made.weight, reference(tmp_path))


VARIATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "half an epoch more": ({"batch_size": 14, "epochs": 1.5}, {}),
    "less than an epoch": ({"batch_size": 14, "epochs": 0.5}, {}),
    "small batches": ({"batch_size": 7, "epochs": 3}, {}),
    "all records in a batch": ({"batch_size": 60, "epochs": 2}, {}),
    "whole batches": ({"batch_size": 20, "epochs": 2}, {}),
    "a number of steps": ({"batch_size": 13, "steps": 11}, {}),
    "one step": ({"batch_size": 13, "steps": 1}, {}),
    "drop_last": ({"batch_size": 14, "epochs": 2}, {"drop_last": True}),
    "drop_last of a loader that shuffles": (
        {"batch_size": 16, "epochs": 2.5},
        {"drop_last": True, "shuffle": True},
    ),
    "random allocation": ({"batch_size": 20, "epochs": 2, "sampling": "random-allocation"}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("variation", VARIATIONS)
def test_epochs_of_any_plan_are_the_same_in_every_tool(tmp_path, monkeypatch, tool, variation):
    """The steps of the plan, one measurement after each epoch, and the bits of a loop by hand."""
    recipe, loader = VARIATIONS[variation]
    plan = dpfy.dpsgd(records=60, clip_norm=0.5, **recipe).with_noise(1.0, delta=1e-2)
    monkeypatch.setitem(globals(), "PLAN", plan)
    monkeypatch.setitem(globals(), "LOADER", loader)
    each, count = adapter.steps_per_epoch(plan.recipe), adapter.epoch_count(plan.recipe)
    ends: list[int] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(unfinished|ended after)")
        made = DRIVE[tool](dpfy.Run(tmp_path / "run", seed=3), count, ends)
    due = [min(each * n, plan.recipe.steps) for n in range(1, count + 1)]
    assert ends == ([] if tool == "fit" else due)
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))
    assert torch.equal(made.weight, reference(tmp_path))


@pytest.mark.parametrize("tool", ["trainer", "lightning"])
@pytest.mark.parametrize("epochs", [1, 3])
def test_another_number_of_epochs_is_refused_with_the_one_to_use(tmp_path, tool, epochs):
    name = "num_train_epochs" if tool == "trainer" else "max_epochs"
    told = f"{name}: got {epochs}; the plan has 9 steps, 5 in an epoch: give {name}=2"
    with pytest.raises(InvalidInput, match=told):
        DRIVE[tool](dpfy.Run(tmp_path / "run"), epochs, [])
    assert not (tmp_path / "run").exists()


def test_an_accelerated_loop_that_is_too_short_tells_the_number_of_passes(tmp_path):
    with pytest.warns(UserWarning, match=r"after 5 of 9 steps.*the plan is 2 passes") as said:
        by_accelerate(dpfy.Run(tmp_path / "run"), 1, [])
    assert len(said) == 3, "that batches are the plan's, the passes, and that it is unfinished"
    assert {one.filename for one in said} == {__file__}, "they point at the caller's lines"


@pytest.mark.parametrize("tool", ["lightning", "loop"])
def test_what_is_said_of_a_loader_points_at_the_callers_line(tmp_path, tool):
    drive = by_lightning if tool == "lightning" else by_loop
    with pytest.warns(UserWarning, match="the plan draws the batches instead") as said:
        drive(dpfy.Run(tmp_path / "run"), 2, [])
    found = [one.filename for one in said if "the plan draws" in str(one.message)]
    assert found == [__file__]


@pytest.mark.parametrize(
    ("tool", "setting"),
    [
        ("trainer", {"gradient_accumulation_steps": 7, "per_device_train_batch_size": 2}),
        ("lightning", {"accumulate_grad_batches": 7}),
        ("accelerate", {"gradient_accumulation_steps": 7}),
    ],
)
def test_accumulation_is_the_runs_in_every_tool(tmp_path, tool, setting):
    """Also where it would make batches of the plan's size."""
    knob = "per_device_train_batch_size" if tool == "trainer" else "max_physical_batch"
    with pytest.raises(InvalidInput, match=f"_(steps|batches): got 7; .*leave it 1, .*{knob}"):
        DRIVE[tool](dpfy.Run(tmp_path / "run"), 2, [], **setting)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("records", "batch", "epochs", "ends", "last"),
    [
        (600, 64, 2, [10, 19], 2.0),
        (600, 64, 3, [10, 20, 29], 3.0),
        (600, 60, 2, [10, 20], 2.0),
        (48, 12, 1.5, [4, 6], 1.5),
        (48, 12, 0.75, [3], 0.75),
        (96, 64, 4, [2, 4, 6], 3.0),
    ],
)
def test_epochs_of_a_plan(records, batch, epochs, ends, last):
    recipe = dpfy.dpsgd(records, batch, epochs=epochs)
    each, count = adapter.steps_per_epoch(recipe), adapter.epoch_count(recipe)
    assert [min(each * n, recipe.steps) for n in range(1, count + 1)] == ends
    shown = [adapter.epoch_at(recipe, step) for step in range(1, recipe.steps + 1)]
    assert shown == sorted(set(shown)), "it grows with every step"
    assert [shown[end - 1] for end in ends] == [*range(1, count), last]
    adapter.check_epochs("epochs", epochs, recipe)
    adapter.check_epochs("epochs", count, recipe)
    for other in (0, -1, epochs + 2, float("inf")):
        with pytest.raises(InvalidInput, match=f"give epochs={count}"):
            adapter.check_epochs("epochs", other, recipe)
