"""Lightning with a private loop: equal to level 2 bit for bit, resumed bit for bit, and nothing
private gets out.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates
from torch.utils.data import DataLoader, Subset

lightning = pytest.importorskip("lightning")
pytest.importorskip("transformers")

import dpfy  # noqa: E402
from dpfy.core.errors import DpfyError, InvalidInput, Unsupported  # noqa: E402
from dpfy.integrations.lightning import BatchTurn, PrivateStrategy  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
import tiny  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Module(lightning.LightningModule):
    """As people write it, but for the reduction of the loss."""

    def __init__(self, net: nn.Module, scheduler: Any = None) -> None:
        super().__init__()
        self.net, self.scheduler = net, scheduler

    def training_step(self, batch, batch_idx):
        losses = tiny.losses(self.net, batch)
        self.log("train_loss", losses.mean())
        return losses

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", tiny.losses(self.net, batch).mean())

    def configure_optimizers(self):
        adam = tiny.adam(self.net)
        if self.scheduler is None:
            return adam
        return {"optimizer": adam, "lr_scheduler": self.scheduler(adam)}


class At(lightning.Callback):
    """Does something after a step."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            self.act(trainer, module, outputs, batch)


def loader(name: str, records: int = tiny.RECORDS, seed: int = 1, **settings: Any) -> DataLoader:
    return DataLoader(
        tiny.Texts(name, records, seed), batch_size=8, collate_fn=tiny.collate, **settings
    )


def cosine(optimizer):
    return {"scheduler": tiny.cosine(optimizer), "interval": "step"}


def trainer(
    path: Path, *, strategy: dict[str, Any] | None = None, saving: int = 0, **settings: Any
):
    made = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "accelerator": "cpu",
        "devices": 1,
    }
    made |= {"max_steps": tiny.STEPS, "num_sanity_val_steps": 0, "default_root_dir": path}
    callbacks = settings.pop("callbacks", [])
    if saving:
        callbacks = [
            *callbacks,
            lightning.pytorch.callbacks.ModelCheckpoint(
                path / "saved", every_n_train_steps=saving, save_last=True
            ),
        ]
    run = dpfy.Run(path / "run", seed=3)
    private = {"runtime": tiny.RUNTIME, "val_is": "public"} | (strategy or {})
    private.setdefault("plan", tiny.plan())
    chosen = PrivateStrategy(run=private.pop("run", run), **private)
    return lightning.Trainer(
        **made
        | {"enable_checkpointing": bool(saving), "strategy": chosen, "callbacks": callbacks}
        | settings
    )


def fit(
    path: Path,
    name: str = "bert",
    scheduler: Any = cosine,
    ckpt: Any = None,
    val: bool = True,
    **settings: Any,
) -> nn.Module:
    module = Module(tiny.model(name), scheduler)
    chosen = trainer(path, **settings)
    torch.manual_seed(tiny.SEED)
    data = loader(name, shuffle=True)
    chosen.fit(module, data, loader(name, 10, 2) if val else None, ckpt_path=ckpt)
    return module


@pytest.mark.parametrize("name", tiny.MODELS)
def test_lightning_equals_level_two_bit_for_bit(tmp_path, name):
    """With validation and checkpoints on the one side and none on the other."""
    module = fit(tmp_path, name, saving=2, val_check_interval=2)
    assert tiny.same(module.net, tiny.level_two(tmp_path, name))
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))
    assert tiny.section(tmp_path)["optimizer"]["schedule"].startswith("CosineAnnealingLR(")
    assert tiny.section(tmp_path)["recorded"] == "val_loss"
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6]


def test_a_scheduler_of_epochs_is_stepped_once_an_epoch(tmp_path):
    module = fit(tmp_path, scheduler=lambda o: rates.StepLR(o, 1, 0.5), val=False)
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 1e-2 / 2, (
        "6 steps are one epoch and a half"
    )
    assert (
        tiny.section(tmp_path)["optimizer"]["schedule"]
        == "StepLR(step_size=1, gamma=0.5) after every 4 steps"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.MODELS)
def test_bfloat16_is_that_of_level_two_bit_for_bit(tmp_path, name):
    module = fit(tmp_path, name, precision="bf16-mixed")
    assert tiny.same(module.net, tiny.level_two(tmp_path, name, mixed="step"))


# --- resumed through Lightning's own interface
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", [pytest.param("cosine", marks=pytest.mark.slow), "plateau"])
def test_a_fit_that_was_killed_is_resumed_bit_for_bit(tmp_path, scheduler):
    def plateau(optimizer):
        chosen = rates.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=1.0)
        return {"scheduler": chosen, "monitor": "val/loss"}

    made = cosine if scheduler == "cosine" else plateau
    settings = {"scheduler": made, "saving": 2, "val_check_interval": 2}
    whole = fit(tmp_path / "whole", **settings)
    with pytest.raises(tiny.Stop):
        fit(tmp_path / "cut", callbacks=[At(3, tiny.die)], **settings)
    with pytest.raises(tiny.Stop):
        fit(
            tmp_path / "cut",
            callbacks=[At(5, tiny.die)],
            ckpt=tmp_path / "cut/saved/last.ckpt",
            **settings,
        )
    again = fit(tmp_path / "cut", ckpt=tmp_path / "cut/saved/last.ckpt", **settings)
    assert tiny.same(again.net, whole.net)
    assert (
        tiny.section(tmp_path / "cut")["optimizer"] == tiny.section(tmp_path / "whole")["optimizer"]
    )
    assert again.trainer.global_step == tiny.STEPS


@pytest.mark.slow
def test_a_crash_between_the_two_checkpoints_is_made_good(tmp_path, monkeypatch):
    """Lightning's is there, the run's own is not: its steps are made again, as they were."""
    whole = fit(tmp_path / "whole", saving=2, val=False)
    real = dpfy.PrivateTraining.save

    def save(self):
        if self.steps_done == 4:
            raise tiny.Stop
        real(self)

    monkeypatch.setattr(dpfy.PrivateTraining, "save", save)
    with pytest.raises(tiny.Stop):
        fit(tmp_path / "cut", saving=2, val=False)
    monkeypatch.setattr(dpfy.PrivateTraining, "save", real)
    found = sorted((tmp_path / "cut/saved").glob("*step=4*"))
    again = fit(tmp_path / "cut", saving=2, ckpt=found[0], val=False)
    assert tiny.same(again.net, whole.net)


def test_only_the_latest_checkpoint_of_this_run_is_gone_on_from(tmp_path):
    with pytest.raises(tiny.Stop):
        fit(tmp_path, saving=2, callbacks=[At(5, tiny.die)], val=False)
    saved = tmp_path / "saved"
    latest = saved / "last.ckpt"
    content = torch.load(latest, weights_only=False)
    assert content["dpfy"] == {"steps": 4}
    torch.save(content | {"dpfy": {"steps": 2}}, saved / "early.ckpt")
    with pytest.raises(InvalidInput, match="is of step 2, the run stands at 4"):
        fit(tmp_path, saving=2, ckpt=saved / "early.ckpt", val=False)
    del content["dpfy"]
    torch.save(content, saved / "foreign.ckpt")
    with pytest.raises(InvalidInput, match="is no checkpoint of a private run"):
        fit(tmp_path, saving=2, ckpt=saved / "foreign.ckpt", val=False)
    with pytest.raises(InvalidInput, match=r"resume (model|scheduler)"):
        fit(
            tmp_path,
            saving=2,
            ckpt=latest,
            scheduler=lambda o: {"scheduler": rates.ExponentialLR(o, 0.9)},
            val=False,
        )
    with pytest.raises(InvalidInput, match="there is no run to resume"):
        fit(tmp_path / "other", saving=2, ckpt=latest, val=False)
    assert tiny.same(
        fit(tmp_path, saving=2, ckpt=latest, val=False).net, tiny.level_two(tmp_path, "bert")
    )


# --- what contradicts the plan, in one line
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_steps": 7}, "max_steps: got 7; the plan has 6 steps"),
        (
            {"max_steps": -1, "max_epochs": 1},
            "max_epochs: got 1; the plan has 6 steps, 4 in an epoch: give max_epochs=2",
        ),
        ({"max_epochs": 1}, "max_epochs: got 1; the plan has 6 steps"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches: got 2"),
        (
            {"gradient_clip_val": 1.0},
            "gradient_clip_val: got 1.0; the plan's clip norm bounds each example",
        ),
        ({"limit_train_batches": 3}, "limit_train_batches: got 3"),
        ({"overfit_batches": 2}, "overfit_batches: got 2"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        (
            {"strategy": {"val_is": None}},
            'val_is: got None; say PrivateStrategy(..., val_is="public")',
        ),
    ],
)
def test_settings_that_contradict_a_plan_are_refused_before_anything_is_reserved(
    tmp_path, settings, told
):
    with pytest.raises(DpfyError) as refused:
        fit(tmp_path, **settings)
    assert told in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_float16_and_manual_optimization_are_refused(tmp_path):
    with pytest.raises(Unsupported, match="bf16-mixed"):
        fit(tmp_path, precision="16-true")

    class Manual(Module):
        automatic_optimization = False

    module = Manual(tiny.model("bert"))
    module.automatic_optimization = False
    with pytest.raises(Unsupported, match="manual optimization"):
        trainer(tmp_path).fit(module, loader("bert"))


@pytest.mark.parametrize("bad", ["mean", "none"])
def test_one_loss_for_each_example_is_asked_for_in_one_line(tmp_path, bad):
    class Mean(Module):
        def training_step(self, batch, batch_idx):
            return tiny.losses(self.net, batch).mean() if bad == "mean" else None

    with pytest.raises(
        InvalidInput,
        match=r"training_step: got .*; return one loss for each example.*reduction=.none",
    ):
        trainer(tmp_path).fit(Mean(tiny.model("bert")), loader("bert"))
    assert not (tmp_path / "run").exists(), "nothing was released: it is given back"


# --- nothing private gets out
# -------------------------------------------------------------------------------------------------------


def test_what_training_step_logs_is_withheld_and_callbacks_see_no_record(tmp_path):
    seen = []

    def look(trainer, module, outputs, batch):
        seen.append(
            (
                dict(trainer.callback_metrics),
                outputs,
                batch,
                [p.grad for p in module.parameters() if p.grad is not None],
            )
        )

    class Keeping(Module):
        def training_step(self, batch, batch_idx):
            self.kept_loss = (losses := super().training_step(batch, batch_idx)).detach().mean()
            return losses

        def on_train_epoch_end(self):
            self.log("kept_loss", self.kept_loss)

    module = Keeping(tiny.model("bert"), cosine)
    chosen = trainer(tmp_path, callbacks=[At(step, look) for step in range(1, 7)])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        chosen.fit(module, loader("bert"))
    assert any("self.log('train_loss') is withheld" in str(w.message) for w in said)
    assert len(seen) == tiny.STEPS
    for metrics, outputs, batch, gradients in seen:
        assert metrics == {}
        assert isinstance(batch, BatchTurn)
        assert not gradients
        assert float(outputs["loss"]) == 0
    assert not {"train_loss", "kept_loss"} & set(chosen.callback_metrics)
    assert "log" not in vars(module)
    assert "train_loss" not in (tmp_path / "run/privacy.json").read_text()


def test_validation_on_the_training_data_is_refused(tmp_path):
    data = loader("bert")
    with pytest.raises(InvalidInput, match="val_dataloaders: got 'the training data'"):
        trainer(tmp_path).fit(
            Module(tiny.model("bert")), data, DataLoader(data.dataset, collate_fn=tiny.collate)
        )


def test_a_callback_that_writes_to_weights_ends_the_run(tmp_path):
    def write(trainer, module, outputs, batch):
        next(module.parameters()).data.add_(1)

    with pytest.raises(DpfyError, match=r"outside of training\.step"):
        fit(tmp_path, callbacks=[At(2, write)], val=False)


def stop(trainer: Any, *given: Any) -> None:
    trainer.should_stop = True


@pytest.mark.parametrize(("plan", "steps", "billed"), [(tiny.plan(), 4, 6), (tiny.MAY_STOP, 3, 4)])
def test_an_early_stop_ends_the_run_and_is_told(tmp_path, plan, steps, billed):
    with pytest.warns(UserWarning, match=f"ended after {steps} of 6 steps, {billed} charged"):
        fit(tmp_path, callbacks=[At(steps, stop)], val=False, strategy={"plan": plan})
    tiny.check_ended(tmp_path, steps, billed)


@pytest.mark.slow
def test_a_patient_callback_on_public_figures_ends_the_run(tmp_path):
    patient = lightning.pytorch.callbacks.EarlyStopping("val/loss", min_delta=100.0, patience=1)
    fit(tmp_path, callbacks=[patient], val_check_interval=2, strategy={"plan": tiny.MAY_STOP})
    tiny.check_ended(tmp_path, 4)


def test_a_crash_after_the_end_ends_there(tmp_path, monkeypatch):
    """The ledger says that the run ended, its card is not written: it makes no further step."""

    settings = {"val": False, "strategy": {"plan": tiny.MAY_STOP}, "saving": 1}
    with monkeypatch.context() as crash:
        crash.setattr(dpfy.training.finish, "_provenance", tiny.die)
        with pytest.raises(tiny.Stop):
            fit(tmp_path, callbacks=[At(3, stop)], **settings)
    module = fit(tmp_path, ckpt=tmp_path / "saved/last.ckpt", **settings)
    tiny.check_ended(tmp_path, 3)
    assert module.trainer.global_step == 3


@pytest.mark.slow
def test_a_fetcher_that_reads_ahead_does_no_harm(tmp_path):
    """The loader's own sampler is not used, and turns may be fetched ahead of their time."""
    module = Module(tiny.model("bert"), cosine)
    chosen = trainer(tmp_path)
    torch.manual_seed(tiny.SEED)
    chosen.fit(module, loader("bert", shuffle=True, drop_last=True))
    assert tiny.same(module.net, tiny.level_two(tmp_path, "bert"))


# --- what a careless colleague does
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sanity", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_part_of_the_training_data_is_no_validation_data(tmp_path, sanity):
    """Also where Lightning looks at the validation data first."""
    data = loader("bert")
    for part in (data.dataset, Subset(data.dataset, [1, 2])):
        with pytest.raises(InvalidInput, match="val_dataloaders: got 'the training data'"):
            trainer(tmp_path, num_sanity_val_steps=sanity).fit(
                Module(tiny.model("bert")), data, DataLoader(part, collate_fn=tiny.collate)
            )
    assert not (tmp_path / "run").exists()


def test_what_looks_for_settings_on_the_training_data_is_refused(tmp_path):
    finder = lightning.pytorch.callbacks.LearningRateFinder()
    with pytest.raises(Unsupported, match="LearningRateFinder"):
        fit(tmp_path, callbacks=[finder], val=False)
    assert not (tmp_path / "run").exists()


def test_no_record_is_read_before_the_reservation(tmp_path):
    data = DataLoader(tiny.Guarded("bert", tmp_path / "run"), batch_size=8, collate_fn=tiny.collate)
    trainer(tmp_path).fit(Module(tiny.model("bert"), cosine), data)


def test_a_plateau_without_its_metric_is_told(tmp_path):
    def plateau(optimizer):
        return {"scheduler": rates.ReduceLROnPlateau(optimizer), "monitor": "val/accuracy"}

    with pytest.raises(
        InvalidInput,
        match="monitor: got 'val/accuracy'; must be among the metrics of the validation: val_loss",
    ):
        fit(tmp_path, scheduler=plateau, val_check_interval=2)
