"""Hugging Face's Trainer with a private loop: equal to level 2 bit for bit, resumed bit for bit,
and nothing private gets out.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

import dpfy  # noqa: E402
from dpfy.core.errors import DpfyError, InvalidInput, Unsupported  # noqa: E402
from dpfy.integrations.hugging_face import PrivateTrainer  # noqa: E402
from dpfy.training import Update  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
import tiny  # noqa: E402

QUIET = {
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "per_device_train_batch_size": 8,
    "weight_decay": 0.0,
}
COSINE = {
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "save_strategy": "no",
    "logging_steps": 1,
}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


class At(transformers.TrainerCallback):
    """Does something after a step."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **given):
        if state.global_step == self.step:
            self.act(args, state, control, given)


def trainer(
    path: Path,
    name: str = "bert",
    *,
    arguments: dict[str, Any] | None = None,
    kind: type = PrivateTrainer,
    **settings: Any,
):
    args = transformers.TrainingArguments(str(path / "out"), **QUIET | COSINE | (arguments or {}))
    net = settings.pop("net", None) or tiny.model(name)
    run = settings.pop("run", dpfy.Run(path / "run", seed=3))
    data = settings.pop("data", None) or tiny.Texts(name)
    made = {
        "model": net,
        "args": args,
        "train_dataset": data,
        "data_collator": tiny.collate,
        "plan": tiny.plan(),
        "run": run,
    }
    made = kind(**made | {"runtime": tiny.RUNTIME} | settings)
    torch.manual_seed(tiny.SEED)
    return made


def two(path: Path, name: str, mixed: str = "") -> Any:
    def adam(net):
        return torch.optim.AdamW(
            [p for p in net.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0, fused=True
        )

    def cosine(optimizer):
        return transformers.get_cosine_schedule_with_warmup(optimizer, 2, tiny.STEPS)

    return tiny.level_two(path, name, adam, cosine, mixed)


@pytest.mark.parametrize("name", tiny.MODELS)
def test_trainer_equals_level_two_bit_for_bit(tmp_path, name):
    """With evaluation, logging and saving on the one side and none on the other."""
    public = {"eval_dataset": tiny.Texts(name, 10, 2), "eval_is": "public"}
    mine = trainer(
        tmp_path, name, arguments=EVALUATED | {"save_strategy": "steps", "save_steps": 3}, **public
    )
    out = mine.train()
    assert tiny.same(mine.model, two(tmp_path, name))
    assert out.global_step == tiny.STEPS
    assert out.training_loss is None, "the training loss is private"
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))
    assert tiny.section(tmp_path)["optimizer"]["schedule"].startswith(
        "LambdaLR(_get_cosine_schedule_with_warmup"
    )
    assert tiny.section(tmp_path)["recorded"] == "eval_loss"
    logged = {key for row in mine.state.log_history for key in row}
    assert {"learning_rate", "eval_loss", "epsilon"} <= logged
    assert not logged & {"loss", "grad_norm", "train_loss", "num_input_tokens_seen", "total_flos"}
    assert (
        next(row["learning_rate"] for row in mine.state.log_history if "learning_rate" in row)
        == 0.0
    ), "of the step made"
    assert {p.name for p in (tmp_path / "out").glob("checkpoint-*")} == {
        "checkpoint-3",
        "checkpoint-6",
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.MODELS)
def test_bfloat16_is_that_of_level_two_bit_for_bit(tmp_path, name):
    mine = trainer(tmp_path, name, arguments={"bf16": True})
    mine.train()
    assert tiny.same(mine.model, two(tmp_path, name, "model"))


# --- resumed through Trainer's own interface
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheduler", "saving"),
    [
        ("cosine", "steps"),
        pytest.param("reduce_lr_on_plateau", "no", marks=pytest.mark.slow),
        pytest.param("reduce_lr_on_plateau", "steps", marks=pytest.mark.slow),
        pytest.param("cosine", "no", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_killed_is_resumed_bit_for_bit(tmp_path, saving, scheduler):
    arguments = EVALUATED | {
        "lr_scheduler_type": scheduler,
        "save_strategy": saving,
        "save_steps": 2,
        "metric_for_best_model": "loss",
    }
    if scheduler != "cosine":
        arguments |= {
            "warmup_steps": 0,
            "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 1.0},
        }
    public = {"eval_dataset": tiny.Texts("bert", 10, 2), "eval_is": "public"}
    whole = trainer(tmp_path / "whole", arguments=arguments, **public)
    whole.train()
    for step in (1, 5):
        with pytest.raises(tiny.Stop):
            trainer(
                tmp_path / "cut", arguments=arguments, callbacks=[At(step, tiny.die)], **public
            ).train(resume_from_checkpoint=step > 1)
    again = trainer(tmp_path / "cut", arguments=arguments, **public)
    again.train(resume_from_checkpoint=True)
    assert tiny.same(again.model, whole.model)
    assert (tmp_path / "cut/run/metrics.jsonl").read_bytes() == (
        tmp_path / "whole/run/metrics.jsonl"
    ).read_bytes()

    def told(made):
        return [
            {k: row[k] for k in ("step", "learning_rate", "eval_loss") if k in row}
            for row in made.state.log_history
        ]

    assert told(again) == told(whole)
    assert (
        tiny.section(tmp_path / "cut")["optimizer"] == tiny.section(tmp_path / "whole")["optimizer"]
    )


@pytest.mark.slow
def test_a_killed_process_leaves_a_run_that_goes_on(tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.train()
    child = os.fork()
    if not child:
        try:
            arguments = {"save_strategy": "steps", "save_steps": 2}
            trainer(
                tmp_path / "cut",
                arguments=arguments,
                callbacks=[At(3, lambda *_: os.kill(os.getpid(), 9))],
            ).train()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    again = trainer(tmp_path / "cut", arguments={"save_strategy": "steps", "save_steps": 2})
    again.train(resume_from_checkpoint=str(tmp_path / "cut/out/checkpoint-2"))
    assert tiny.same(again.model, whole.model)


@pytest.mark.parametrize(
    ("arguments", "settings", "told"),
    [
        ({"learning_rate": 2e-2}, {}, "resume scheduler"),
        pytest.param({"warmup_steps": 3}, {}, "resume scheduler", marks=pytest.mark.slow),
        pytest.param({"weight_decay": 0.3}, {}, "resume optimizer", marks=pytest.mark.slow),
        pytest.param(
            {}, {"data": tiny.Texts("bert", seed=4)}, "resume data", marks=pytest.mark.slow
        ),
        pytest.param(
            {},
            {"runtime": replace(tiny.RUNTIME, max_physical_batch=5)},
            "resume physical batch",
            marks=pytest.mark.slow,
        ),
        (
            {},
            {"compute_loss_func": lambda outputs, labels: outputs.logits.square().mean(1)},
            "resume losses",
        ),
        pytest.param({}, {"plan": tiny.plan(steps=5)}, "plan|claim", marks=pytest.mark.slow),
    ],
)
def test_resuming_with_other_arguments_is_refused(tmp_path, arguments, settings, told):
    saved = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(tiny.Stop):
        trainer(tmp_path, arguments=saved, callbacks=[At(3, tiny.die)]).train()
    with pytest.raises(DpfyError, match=told):
        trainer(tmp_path, arguments=saved | arguments, **settings).train(
            resume_from_checkpoint=True
        )
    trainer(tmp_path, arguments=saved).train(resume_from_checkpoint=True)


def test_there_must_be_something_to_resume(tmp_path):
    with pytest.raises(InvalidInput, match="there is no run to resume"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(InvalidInput, match="a checkpoint of this run in output_dir"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "elsewhere/checkpoint-2"))


# --- what contradicts the plan, in one line
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"max_steps": 7}, "max_steps: got 7; the plan has 6 steps"),
        (
            {"num_train_epochs": 9},
            "num_train_epochs: got 9; the plan has 6 steps, 4 in an epoch: give num_train_epochs=2",
        ),
        ({"num_train_epochs": 3}, "num_train_epochs: got 3; the plan has 6 steps"),
        (
            {"max_grad_norm": 0.3},
            "max_grad_norm: got 0.3; the plan's clip norm bounds each example",
        ),
        (
            {"gradient_accumulation_steps": 4},
            "gradient_accumulation_steps: got 4; a batch of the plan is one step",
        ),
        ({"dataloader_drop_last": True}, "dataloader_drop_last"),
        (
            {"label_smoothing_factor": 0.1},
            "label_smoothing_factor=0.1 in private training is not supported; give "
            "compute_loss_func",
        ),
        ({"torch_compile": True}, "torch_compile"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha"),
        ({"include_num_input_tokens_seen": True}, "include_num_input_tokens_seen"),
        ({"eval_strategy": "steps", "eval_steps": 2}, 'eval_is: got None; say eval_is="public"'),
    ],
)
def test_arguments_that_contradict_a_plan_are_refused_before_anything_is_reserved(
    tmp_path, arguments, told
):
    with pytest.raises(DpfyError) as refused:
        trainer(tmp_path, arguments=arguments, eval_dataset=tiny.Texts("bert", 10, 2))
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_float16_is_refused(tmp_path):
    args = transformers.TrainingArguments(str(tmp_path / "out"), **QUIET)
    args.fp16 = True
    with pytest.raises(Unsupported, match=r"fp16=True.*bfloat16"):
        dpfy.integrations.trainer.check(args, tiny.plan())


def test_arguments_that_agree_are_taken(tmp_path):
    trainer(
        tmp_path,
        arguments={
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "max_grad_norm": 0.0,
        },
    )
    trainer(tmp_path, arguments={"num_train_epochs": 1.5, "dataloader_num_workers": 0})


def test_a_loss_of_ones_own_is_one_for_each_example(tmp_path):
    class Own(PrivateTrainer):
        def compute_loss(self, model, inputs, **given):
            return model(**inputs).loss

    with pytest.raises(Unsupported, match="override compute_losses"):
        trainer(tmp_path, kind=Own)
    with pytest.raises(InvalidInput, match="one loss per example"):
        trainer(tmp_path, compute_loss_func=lambda outputs, labels: outputs.logits.mean()).train()
    assert not (tmp_path / "run").exists(), "nothing was released: it is given back"
    with pytest.raises(Unsupported, match="number of records in the batch"):
        trainer(
            tmp_path, compute_loss_func=lambda outputs, labels: outputs.logits.mean(1) / len(labels)
        ).train()


def test_a_model_without_a_known_loss_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(
        Unsupported, match=r"the loss of Linear is not supported; give compute_loss_func"
    ):
        dpfy.integrations.trainer.of_model(torch.nn.Linear(2, 2))


# --- nothing private gets out
# -------------------------------------------------------------------------------------------------------


def test_callbacks_see_no_gradient_no_loss_and_no_batch(tmp_path):
    seen = []

    class Looks(transformers.TrainerCallback):
        def _look(
            self,
            args,
            state,
            control,
            model=None,
            optimizer=None,
            train_dataloader=None,
            logs=None,
            **given,
        ):
            seen.append([p.grad for p in model.parameters() if p.grad is not None])
            assert train_dataloader is None
            assert not {"loss", "grad_norm"} & set(logs or ())

        on_step_begin = on_substep_end = on_optimizer_step = on_step_end = on_log = on_epoch_end = (
            on_train_end
        ) = _look

    trainer(tmp_path, callbacks=[Looks()]).train()
    assert len(seen) > 20
    assert not any(seen)


def test_a_callback_that_writes_to_weights_or_rates_ends_the_run(tmp_path):
    def write(args, state, control, given):
        next(given["model"].parameters()).data.add_(1)

    with pytest.raises(DpfyError, match=r"outside of training\.step"):
        trainer(tmp_path / "weights", callbacks=[At(2, write)]).train()

    def rate(args, state, control, given):
        given["optimizer"].param_groups[0]["lr"] = 1.0

    with pytest.raises(InvalidInput, match="scheduler: got"):
        trainer(tmp_path / "rate", callbacks=[At(2, rate)]).train()


def test_a_backward_of_the_callers_is_refused(tmp_path):
    def backward(args, state, control, given):
        batch = tiny.collate(tiny.Texts("bert").items[:4])
        given["model"](**batch).loss.backward()

    with pytest.raises(DpfyError, match="backward"):
        trainer(tmp_path, callbacks=[At(2, backward)]).train()
    with pytest.raises(Unsupported, match="training_step in private training"):
        trainer(tmp_path / "step").training_step(None, None)


def test_evaluation_on_the_training_data_is_refused(tmp_path):
    data = tiny.Texts("bert")
    with pytest.raises(InvalidInput, match="eval_dataset: got 'the training data'"):
        trainer(tmp_path, data=data, eval_dataset=data, eval_is="public", arguments=EVALUATED)
    mine = trainer(tmp_path, data=data)
    with pytest.raises(InvalidInput, match="eval_dataset: got 'the training data'"):
        mine.evaluate(data)

    def measure(args, state, control, given):
        mine.evaluate(tiny.Texts("bert", 10, 2))

    mine.add_callback(At(2, measure))
    with pytest.raises(InvalidInput, match="eval_is"):
        mine.train()


@pytest.mark.parametrize(
    ("settings", "steps", "billed"), [({}, 4, 6), ({"plan": tiny.MAY_STOP}, 3, 4)]
)
def test_an_early_stop_ends_the_run_and_is_told(tmp_path, settings, steps, billed):
    def stop(args, state, control, given):
        control.should_training_stop = True

    with pytest.warns(UserWarning, match=f"ended after {steps} of 6 steps, {billed} charged"):
        out = trainer(tmp_path, callbacks=[At(steps, stop)], **settings).train()
    assert out.global_step == steps
    assert out.metrics["epsilon"] == tiny.check_ended(tmp_path, steps, billed)


def test_a_stop_before_a_step_ends_counts_the_step(tmp_path):
    class Stops(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **given):
            control.should_training_stop = True

    out = trainer(tmp_path, callbacks=[Stops()], plan=tiny.MAY_STOP).train()
    assert out.global_step == 1
    tiny.check_ended(tmp_path, 1)


@pytest.mark.slow
def test_a_patient_callback_is_as_patient_in_a_resumed_run(tmp_path):
    arguments = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    arguments |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}

    def made(path, *more):
        public = {"eval_dataset": tiny.Texts("bert", 10, 2), "eval_is": "public"}
        patient = transformers.EarlyStoppingCallback(3, early_stopping_threshold=100.0)
        return trainer(
            path, arguments=arguments, callbacks=[patient, *more], plan=tiny.MAY_STOP, **public
        )

    whole = made(tmp_path / "whole").train()
    assert whole.global_step == 4
    assert whole.metrics["epsilon"] == tiny.check_ended(tmp_path / "whole", 4)
    with pytest.raises(tiny.Stop):
        made(tmp_path / "cut", At(3, tiny.die)).train()
    assert made(tmp_path / "cut").train(resume_from_checkpoint=True).global_step == 4
    models = [(tmp_path / name / "run/model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert models[0] == models[1]


def test_the_run_folder_lies_where_nothing_is_pushed_from(tmp_path):
    with pytest.raises(InvalidInput, match="must lie outside of output_dir"):
        trainer(tmp_path, run=tmp_path / "out" / "run")
    mine = trainer(tmp_path, run=None)
    assert Path(mine.private_run.path) == tmp_path / "out-dpfy"


def test_the_card_is_in_the_model_card(tmp_path):
    mine = trainer(tmp_path, "llama")
    mine.train()
    mine.save_model()
    page = (tmp_path / "out/README.md").read_text()
    assert "# Privacy report" in page
    assert page.count("dpfy: begin") == 1
    assert (tmp_path / "out/privacy.json").read_bytes() == (
        tmp_path / "run/privacy.json"
    ).read_bytes()
    assert (tmp_path / "out/adapter_model.safetensors").is_file()
    mine.save_model()
    assert (tmp_path / "out/README.md").read_text().count("dpfy: begin") == 1


def test_averaged_weights_are_evaluated_and_handed_back(tmp_path):
    mine = trainer(tmp_path, update=Update(average=0.9))
    mine.train()
    from safetensors.torch import load_file

    released = load_file(tmp_path / "run/model.safetensors")
    assert all(
        torch.equal(value, mine.model.state_dict()[name]) for name, value in released.items()
    )


@pytest.mark.slow
def test_the_best_model_can_be_loaded_at_the_end(tmp_path):
    arguments = EVALUATED | {
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    }
    mine = trainer(
        tmp_path, arguments=arguments, eval_dataset=tiny.Texts("bert", 10, 2), eval_is="public"
    )
    mine.train()
    assert mine.state.best_model_checkpoint is not None
    assert mine.state.best_metric == min(
        row["eval_loss"] for row in mine.state.log_history if "eval_loss" in row
    )


def test_metrics_of_any_name_and_no_data(tmp_path):
    def metrics(predicted):
        return {"odd-name/here": 1.0, "diverged": math.inf}

    mine = trainer(
        tmp_path,
        arguments=EVALUATED,
        eval_dataset=tiny.Texts("bert", 10, 2),
        eval_is="public",
        compute_metrics=metrics,
    )
    mine.train()
    assert tiny.section(tmp_path)["recorded"] == "eval_loss, eval_odd_name_here"
    empty = trainer(tmp_path / "none")
    empty.train_dataset = None
    with pytest.raises(InvalidInput, match="train_dataset: got None; must be given"):
        empty.train()


def test_datasets_and_a_masking_collator(tmp_path):
    """Columns that the model does not take are left out, and masks are drawn afresh, the same in a
    resumed run.
    """
    datasets = pytest.importorskip("datasets")
    rows = [
        {"input_ids": item["input_ids"].tolist(), "note": "private"}
        for item in tiny.Texts("gpt2").items
    ]
    net = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=tiny.V,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
        )
    )

    def collator(items):
        batch = tiny.collate(
            [
                {
                    "input_ids": torch.as_tensor(i["input_ids"]),
                    "labels": torch.as_tensor(i["input_ids"]),
                }
                for i in items
            ]
        )
        hidden = torch.rand(batch["labels"].shape) < 0.5
        return batch | {"labels": batch["labels"].masked_fill(hidden, -100)}

    mine = trainer(tmp_path, net=net, data=datasets.Dataset.from_list(rows), data_collator=collator)
    mine.train()
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))


# --- what a careless colleague does
# -------------------------------------------------------------------------------------------------


def test_a_part_of_the_training_data_is_no_evaluation_data(tmp_path):
    data = tiny.Texts("bert")
    part = Subset(data, range(5))
    for given in (part, {"some": part}, Subset(part, [0])):
        with pytest.raises(InvalidInput, match="eval_dataset: got 'the training data'"):
            trainer(tmp_path, data=data, eval_dataset=given, eval_is="public", arguments=EVALUATED)
    mine = trainer(
        tmp_path,
        data=Subset(data, range(40)),
        eval_dataset=Subset(data, range(40, 48)),
        plan=tiny.plan(records=40),
    )
    mine.eval_dataset = Subset(data, [39])
    with pytest.raises(InvalidInput, match="eval_dataset: got 'the training data'"):
        mine.evaluate()
    mine.eval_dataset = {"some": Subset(data, [39])}
    with pytest.raises(InvalidInput, match="eval_dataset: got 'the training data'"):
        mine.evaluate("some")


def test_what_is_logged_where_losses_are_computed_is_withheld(tmp_path):
    class Logging(PrivateTrainer):
        def compute_losses(self, model, inputs):
            losses = super().compute_losses(model, inputs)
            self.log({"train_loss": losses.detach().mean()})
            return losses

    mine = trainer(tmp_path, kind=Logging)
    with pytest.warns(UserWarning, match=r"log\('train_loss'\) is withheld"):
        mine.train()
    assert not any("train_loss" in row for row in mine.state.log_history)


def test_the_loss_of_the_last_batch_is_not_logged_later_either(tmp_path):
    class Keeping(PrivateTrainer):
        def compute_losses(self, model, inputs):
            self.kept = (losses := super().compute_losses(model, inputs)).detach().mean()
            return losses

    mine = trainer(tmp_path, kind=Keeping)
    mine.add_callback(At(2, lambda *given: mine.log({"train_loss": mine.kept.item()})))
    with pytest.raises(InvalidInput, match="loss of the last batch"):
        mine.train()


def test_arguments_that_were_changed_since_are_looked_at_again(tmp_path):
    mine = trainer(tmp_path)
    mine.args.max_steps = 3
    with pytest.raises(InvalidInput, match="max_steps: got 3"):
        mine.train()
    assert not (tmp_path / "run").exists()


def test_predictions_while_training_change_nothing(tmp_path):
    def predict(args, state, control, given):
        mine.predict(tiny.Texts("bert", 10, 2))

    mine = trainer(tmp_path)
    mine.add_callback(At(2, predict))
    mine.train()
    assert tiny.same(mine.model, two(tmp_path, "bert"))
    mine = trainer(tmp_path / "own")
    mine.add_callback(At(2, lambda *given: mine.predict(mine.train_dataset)))
    with pytest.raises(InvalidInput, match="the training data"):
        mine.train()


def test_other_weights_than_those_of_the_run_are_not_described_as_its_own(tmp_path):
    mine = trainer(tmp_path)
    mine.train()
    mine.save_model(str(tmp_path / "same"))
    assert "not those" not in (tmp_path / "same/README.md").read_text()
    with torch.no_grad():
        next(mine.model.parameters()).add_(1)
    mine.save_model(str(tmp_path / "other"))
    assert (
        "weights saved here are not those that the run ended with"
        in (tmp_path / "other/README.md").read_text()
    )


def test_no_record_is_read_before_the_reservation(tmp_path):
    trainer(tmp_path, data=tiny.Guarded("bert", tmp_path / "run")).train()
